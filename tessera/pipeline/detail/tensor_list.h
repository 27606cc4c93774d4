#pragma once
// Lists of tensors as they travel between stages: what they are, and their memory on the wire.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

/// A tensor on its way forward.
struct Carried {
  at::Tensor value;
  /// Whether a gradient comes back.
  bool wants = false;
};

struct TensorSpec {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<std::int64_t> sizes, strides;
  bool wants = false;
  bool operator==(const TensorSpec&) const = default;

  std::int64_t numel() const;
};

using ListSpec = std::vector<TensorSpec>;

/// Throws InvalidArgument for a tensor that is undefined or has no memory of its own (sharded,
/// sparse).
TensorSpec spec_of(const at::Tensor& tensor, bool wants);
ListSpec spec_of(const std::vector<Carried>& list);
/// "float64 [3, 8], int64 [3]".
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
