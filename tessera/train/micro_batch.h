#pragma once
// MicroBatch: what one rank trains on at once; an optimizer step may have several.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/fields.h"

namespace tessera {

struct MicroBatch {
  /// The batch dim in front.
  std::vector<at::Tensor> tensors;
  /// Rows of this rank.
  std::int64_t rows = 0;
  /// Rows of this rank that count: the weight of its mean unless the task says otherwise. 0: a rank
  /// that has run out of data and takes part so that no other one waits.
  std::int64_t real = 0;
  /// Bool [rows], true where a row counts; undefined if all do.
  at::Tensor mask;
  /// Within the epoch, the same on every rank.
  std::uint64_t index = 0;
  /// Of `tensors`, as in LoadedBatch; empty: they have none.
  std::vector<std::string> names = {};
  /// The tensor of that name: field("inputs/wind"). Throws InvalidArgument where there is none.
  at::Tensor field(std::string_view name) const { return detail::field_of(names, tensors, name); }
  Fields fields() const { return {names, tensors}; }
};

}  // namespace tessera
