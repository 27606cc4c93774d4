#pragma once
// Gradients of sharded parameters: the partial sums that backward leaves are reduced in buckets
// while it runs.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/gradient/reducer.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Turns `value` in place into a partial sum with the spec `partial`: one rank keeps what it holds,
/// the others hold zero, and nothing is sent. Returns false, and changes nothing, where that is not
/// possible.
bool make_partial(const at::Tensor& value, const ShardSpec& partial);

struct UnitParameter {
  std::string name;
  at::Tensor tensor;
  /// Gradients of different units never share a bucket. Only whether two are equal counts.
  std::size_t unit = 0;
  /// The dtype in which it is reduced; none: its own.
  std::optional<at::ScalarType> message = {};
};

/// Makes the reducer of sharded parameters and sets its hooks; the parameters own it. Collective
/// over the mesh.
void reduce_parameters(const std::vector<UnitParameter>& parameters, const DeviceMesh& mesh,
                       const ReducerOptions& options);

}  // namespace tessera::detail
