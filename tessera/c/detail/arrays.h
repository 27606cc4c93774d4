#pragma once
// The caller's arrays as plain tensors over the same memory, and dtypes.

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/c/detail/call.h"

namespace tessera::c {

/// Throws Misuse for what is no dtype of an array.
at::ScalarType dtype_of(tessera_dtype dtype);
/// Throws Misuse for a dtype that C has no name for.
tessera_dtype dtype_of(at::ScalarType dtype);
/// In elements, as the array says or its order does. Throws Misuse for numbers of dims, negative
/// sizes, and elements that lie over each other.
std::vector<std::int64_t> strides_of(const tessera_array& array);
/// A plain tensor over the caller's memory. Throws as strides_of(), and where memory lacks.
at::Tensor tensor_over(const tessera_array* array, const char* name);

}  // namespace tessera::c
