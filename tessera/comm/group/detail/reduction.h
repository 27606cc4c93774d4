#pragma once
// Reductions computed here rather than by a backend, and conversions around a backend's own.

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/comm/group/types.h"

namespace c10d {
struct ReduceOp;
}

namespace tessera::detail {

/// The c10d equivalent of `op`; `factor` is used for `premultiplied` alone.
c10d::ReduceOp to_c10d(ReduceOp::Kind op, double factor = 1);

/// Checks that the values of a dtype can be reduced by an operation. Throws InvalidArgument for min
/// and max of complex, a mean or weight of integers, a sum of bool, and any reduction of dtypes
/// without arithmetic in libtorch (float8, unsigned 16 to 64 bits, quantised).
void check_reducible(const char* operation, c10::ScalarType dtype, ReduceOp::Kind op);

/// The dtype in which sums and products are accumulated: float32 for half and bfloat16, complex64
/// for complex32, else the dtype itself.
c10::ScalarType accumulation_type(c10::ScalarType dtype);

/// Computes output = parts[0] op parts[1] op ... in that order, accumulated in accumulation_type
/// and rounded once; NaN propagates. All tensors have the same shape and dtype; `op` is sum, avg,
/// product, min or max. `output` may be one of `parts`.
void reduce_in_order(const at::Tensor& output, const std::vector<at::Tensor>& parts,
                     ReduceOp::Kind op);

/// Floating-point numbers as integers of the same width that order in the same way (-0 before +0),
/// so that a backend whose min or max drops NaN can work on them: for max a NaN becomes the largest
/// integer, for min the smallest. float32 -> int32, float64 -> int64; contiguous tensors. The map
/// is its own inverse but for NaN: bits ^ (sign ? 0x7fff... : 0).
at::Tensor order_keys(const at::Tensor& values, ReduceOp::Kind op);
void from_order_keys(const at::Tensor& output, const at::Tensor& keys, ReduceOp::Kind op);
/// As order_keys() and from_order_keys(), by operators of libtorch, for tensors that are not on the
/// CPU.
at::Tensor order_keys_by_operators(const at::Tensor& values, ReduceOp::Kind op);
void from_order_keys_by_operators(const at::Tensor& output, const at::Tensor& keys,
                                  ReduceOp::Kind op);

}  // namespace tessera::detail
