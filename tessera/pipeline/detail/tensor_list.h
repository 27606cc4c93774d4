#pragma once
// Lists of tensors as they travel between stages: what they are, and their memory on the wire.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// A tensor on its way forward.
struct CarriedTensor {
  at::Tensor value;
  /// Whether a gradient comes back.
  bool wants = false;
  /// Of a sharded tensor, whose local `value` is; none: a plain one.
  ShardSpec shards = {};
};

/// A ShardSpec in words that the ranks of all stages share.
struct ShardLayout {
  /// Of the pipeline's mesh.
  std::vector<int> axes;
  std::vector<Placement> placements;
  /// The global shape.
  std::vector<std::int64_t> shape;
  ShardSizes sizes;
  bool operator==(const ShardLayout&) const = default;
};

/// Throws InvalidArgument for a spec whose mesh is not that of this rank's stages, or some of its
/// axes: other ranks would hold other parts of it than those of the next stage.
ShardLayout layout_of(const ShardSpec& spec, const DeviceMesh& mesh, const std::string& axis);
/// The same on the mesh of this rank's stages.
ShardSpec spec_of(const ShardLayout& layout, const DeviceMesh& mesh);

struct TensorSpec {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  /// Of what travels: of a sharded tensor, its local.
  std::vector<std::int64_t> sizes, strides;
  bool wants = false;
  std::optional<ShardLayout> shards = {};
  bool operator==(const TensorSpec&) const = default;
};

using ListSpec = std::vector<TensorSpec>;

/// Throws InvalidArgument for a tensor that is undefined or has no memory of its own (sharded,
/// sparse).
TensorSpec spec_of(const at::Tensor& tensor, bool wants);
/// `mesh`, `axis`: of the pipeline. Throws InvalidArgument as layout_of(), too.
ListSpec spec_of(const std::vector<CarriedTensor>& list, const DeviceMesh& mesh,
                 const std::string& axis);
/// "float64 [3, 8], int64 [3]"; of sharded tensors the local shapes and how they lie.
std::string to_string(const ListSpec& list);

std::vector<std::int64_t> encode(const ListSpec& list);
/// Throws InvalidArgument for what encode() does not make.
ListSpec decode(const std::vector<std::int64_t>& numbers);

/// The tensor's elements in the order of spec_of(): of one dim, contiguous, sharing memory where
/// that is possible.
at::Tensor to_wire(const at::Tensor& tensor, const TensorSpec& spec);
/// A new tensor and, in `wire`, its memory.
at::Tensor empty_for(const TensorSpec& spec, c10::Device device, at::Tensor& wire);

}  // namespace tessera::detail
