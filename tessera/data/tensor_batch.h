#pragma once
// TensorBatch: the tensors of a batch with what is known of its rows, from file to gradient.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/fields.h"

namespace tessera {

struct TensorBatch {
  std::uint64_t step = 0, epoch = 0;
  /// Tensors with the rows in dim 0.
  std::vector<at::Tensor> tensors = {};
  /// The number of rows, and of those that count: the weight of their mean. Others are padding.
  std::int64_t rows = 0, real = 0;
  /// Bool [rows], true where a row counts; undefined if all do.
  at::Tensor mask = {};
  /// The names of `tensors`, nested by '/' (see Fields); empty: they have none.
  std::vector<std::string> names = {};
  /// The tensor of that name: field("inputs/wind"). Throws InvalidArgument where there is none.
  at::Tensor field(std::string_view name) const { return detail::field_of(names, tensors, name); }
  /// All of them; fields().under("inputs") are those of a group.
  Fields fields() const { return {names, tensors}; }
};

}  // namespace tessera
