#pragma once
// Reductions computed here rather than by a backend, and conversions around a backend's own.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/comm/group/types.h"

namespace c10d {
struct ReduceOp;
}

namespace tessera::detail {

/// The c10d equivalent of `op`; `factor` is used for `premultiplied` alone.
c10d::ReduceOp to_c10d(ReduceOp::Kind op, double factor = 1);
/// The inverse of to_c10d(); nullopt for what groups lack (operations on bits). Throws
/// InvalidArgument for a premultiplied sum without one number as its factor.
std::optional<ReduceOp> from_c10d(const c10d::ReduceOp& op);

/// Checks that the values of a dtype can be reduced by an operation. Throws InvalidArgument for min
/// and max of complex, a mean or weight of integers, a sum of bool, and any reduction of dtypes
/// without arithmetic in libtorch (float8, unsigned 16 to 64 bits, quantised).
void check_reducible(const char* operation, c10::ScalarType dtype, ReduceOp::Kind op);

/// The dtype in which sums and products are accumulated: float32 for half and bfloat16, complex64
/// for complex32, else the dtype itself.
c10::ScalarType accumulation_type(c10::ScalarType dtype);

/// How one reduction is done, exactly, on a transport that does only some of them:
///   premultiplied      the tensor times its factor first, then a sum
///   avg                a sum, then divided by the number of ranks
///   half, bfloat16     travel and accumulate as float32, rounded once at the end
///   int16              as int32; bool min, max, product: as uint8
///   complex sum        as pairs of real numbers
///   float min, max     as integers in the same order, so that NaN propagates (order_keys); costs
///                      two passes over the local data
///   what is left       (complex products) is not for the transport: `compose`
struct Recipe {
  ReduceOp op;           // given to the transport
  c10::ScalarType wide;  // dtype of the data before the conversions of wire()
  bool scale = false;    // times the factor before
  bool divide = false;   // by the number of ranks after
  bool real = false;     // complex as pairs
  bool keys = false;     // order keys
  bool bytes = false;    // bool as uint8
  bool compose = false;  // gather the data, and reduce it in order
  /// The dtype in which the transport reduces.
  c10::ScalarType wire_type() const;
  /// Numbers that travel for each element.
  std::int64_t width() const { return real ? 2 : 1; }
  /// The values of `tensor` as the transport reduces them, in plain order: its own memory where
  /// nothing changes. With `writes`, that memory may be changed.
  at::Tensor outgoing(const at::Tensor& tensor, bool writes) const;
  /// True if settle() has anything to do.
  bool settles(const at::Tensor& target, const at::Tensor& result) const;
  /// Ends a reduction over `ranks` ranks: `result`, of wire_type(), becomes the values of `target`.
  void settle(const at::Tensor& target, const at::Tensor& result, int ranks) const;
};

/// The recipe for a transport that does by itself what `native` says.
Recipe recipe_of(bool (*native)(c10::ScalarType, ReduceOp::Kind), c10::ScalarType dtype,
                 ReduceOp op);

/// Computes output = parts[0] op parts[1] op ... in that order, accumulated in accumulation_type
/// and rounded once; NaN propagates. All tensors have the same shape and dtype; `op` is sum, avg,
/// product, min or max. `output` may be one of `parts`.
void reduce_in_order(const at::Tensor& output, const std::vector<at::Tensor>& parts,
                     ReduceOp::Kind op);

/// Floating-point numbers as integers of the same width that order in the same way (-0 before +0),
/// so that a backend whose min or max drops NaN can work on them: for max a NaN becomes the largest
/// integer, for min the smallest. float32 -> int32, float64 -> int64; contiguous tensors. The map
/// is its own inverse but for NaN: bits ^ (sign ? 0x7fff... : 0). `on_cpu`: by loops over memory of
/// the CPU; else by operators of libtorch, wherever the tensors are.
at::Tensor order_keys(const at::Tensor& values, ReduceOp::Kind op, bool on_cpu);
void from_order_keys(const at::Tensor& output, const at::Tensor& keys, ReduceOp::Kind op,
                     bool on_cpu);

}  // namespace tessera::detail
