#pragma once
// libtorch's side of the safetensors format (files/internal/safetensors.h): which dtype of libtorch
// is which of the format's. One dtype of the one is exactly one of the other, or an error; no value
// is ever converted.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/files/internal/safetensors.h"

namespace tessera {

/// The entry of a tensor, without its place in the file. Float4_e2m1fn_x2, two values in a byte, is
/// F4 with a last dim of twice the size. Throws InvalidArgument for a dtype that the format does
/// not have (complex double, quantized ones).
SafetensorsTensor safetensors_tensor(const std::string& name, at::ScalarType dtype,
                                     const std::vector<std::int64_t>& shape);

/// A tensor of a file as libtorch sees it.
struct TorchLayout {
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
};
/// Nothing for the dtypes that libtorch does not have: F6_E2M3, F6_E3M2, and F4 without dims or
/// with an odd last dim.
std::optional<TorchLayout> torch_layout(const SafetensorsTensor& tensor);
/// The same. Throws FileError with the file and the tensor.
TorchLayout need_torch_layout(const SafetensorsTensor& tensor, const std::string& path);

}  // namespace tessera
