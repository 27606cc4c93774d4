#pragma once
// Checks of a tensor's memory before a backend reads or writes it.

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::detail {

/// Says why no backend can read this tensor and what to do instead; empty if one can. Undefined,
/// sparse, nested and quantized tensors are refused, wrappers without memory of their own (a
/// ShardTensor), and tensors whose storage is smaller than they are. Never throws.
std::string why_unreadable(const at::Tensor& tensor);
/// As why_unreadable(), for a tensor that is written: refuses an immutable tensor of zeros as well.
std::string why_unwritable(const at::Tensor& tensor);

/// The tensor itself, or, for an immutable tensor of zeros (which has no memory), a copy in memory.
at::Tensor in_memory(const at::Tensor& tensor);

/// True if two elements of the tensor share memory, which must be readable. Exact for all strides.
bool shares_elements(const at::Tensor& tensor);
/// True if an element of `a` shares memory with one of `b`. Exact for all strides; constant time
/// for contiguous tensors and for views with the same strides.
bool share_elements(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::detail
