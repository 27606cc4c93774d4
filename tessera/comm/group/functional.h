#pragma once
// Differentiable collectives: they return new tensors, and backward() sends the gradients back.
// Sizes may be uneven along dim 0, zeros included, and all can be differentiated twice.
//
//   Tensor y = functional::all_gather(group, x, {3, 0, 2});      // y: the rows of all ranks
//
// What a gradient means across ranks. Let x = (x_0 ... x_{n-1}) be the inputs of the ranks, y = A x
// their outputs, and <a, b> the sum over ranks of the ranks' inner products. The numbers that
// arrive in backward can be read in two ways:
//
//   Cotangent::summed
//       The loss is L = L_0 + ... + L_{n-1}, each rank calls backward on its own L_r, and a
//       cotangent is what this rank's loss contributes. Backward applies the adjoint A' with
//       <A x, y> = <x, A' y>:
//         all_reduce     -> all_reduce           all_gather -> reduce_scatter
//         reduce_scatter -> all_gather           all_to_all -> all_to_all the other way
//         broadcast      -> reduce               reduce     -> broadcast
//         gather         -> scatter              scatter    -> gather
//         send           -> receive
//   Cotangent::replicated
//       The output is the same on all ranks, all compute the same loss L from it, and L counts
//       once. Cotangents are then equal on all ranks, and backward needs no communication:
//         all_reduce     -> the cotangent itself
//         all_gather     -> this rank's rows of it
//         broadcast      -> the cotangent on the root, zero elsewhere
//       Twice differentiated, it communicates again.
//
// With one loss computed by all ranks, `summed` gives n times the gradient; with a loss per rank,
// `replicated` misses the others' contributions. Example: two ranks, x_0 = 1, x_1 = 2, y =
// all_reduce(x) = 3, and both ranks compute L = y^2. As one loss, dL/dx_r = 2 y = 6: `replicated`.
// As L_0 + L_1, it is 12: `summed`.
//
// Backward is collective: each rank's graph must hold the same calls. So all ranks of a call must
// agree on whether its input requires a gradient (compared with CheckLevel::collective), and what a
// call returns must reach the loss on every rank, also where it is empty or zero (add
// `token.sum()`, which is 0). Forward mode AD is not supported: its tangents are not sent.

#include <ATen/core/Tensor.h>

#include "tessera/comm/group/group.h"

namespace tessera::functional {

enum class Cotangent : unsigned char { summed, replicated };

/// Reduces `x` over the ranks. `op` is sum, avg or premultiplied; others are not linear and throw
/// InvalidArgument (all_reduce with max has no gradient on ties).
at::Tensor all_reduce(const Group& group, const at::Tensor& x, ReduceOp op = ReduceOp::sum,
                      Cotangent cotangent = Cotangent::summed);
/// Concatenates the ranks' rows along dim 0. Without `sizes` all ranks have the same number of
/// rows.
at::Tensor all_gather(const Group& group, const at::Tensor& x, const Sizes& sizes = {},
                      Cotangent cotangent = Cotangent::summed);
/// Reduces `x` over the ranks and returns this rank's rows of the result.
at::Tensor reduce_scatter(const Group& group, const at::Tensor& x, const Sizes& sizes = {},
                          ReduceOp op = ReduceOp::sum);
at::Tensor all_to_all(const Group& group, const at::Tensor& x, const Sizes& output_sizes = {},
                      const Sizes& input_sizes = {});
/// `x` has the same shape on all ranks; its values count on the root alone, elsewhere its gradient
/// is zero.
at::Tensor broadcast(const Group& group, const at::Tensor& x, int root,
                     Cotangent cotangent = Cotangent::summed);
/// The reduced value on the root, zeros elsewhere.
at::Tensor reduce(const Group& group, const at::Tensor& x, int root, ReduceOp op = ReduceOp::sum);
/// The rows of all ranks on the root, no rows elsewhere.
at::Tensor gather(const Group& group, const at::Tensor& x, int root, const Sizes& sizes = {});
/// This rank's rows of the root's `x`. On other ranks `x` gives the dtype, the device and the dims
/// after the first (at::empty({0, 8}) will do). `sizes` is required.
at::Tensor scatter(const Group& group, const at::Tensor& x, int root, const Sizes& sizes);
/// Sends `x` to a rank (not collective). Returns a token without elements through which the
/// gradient comes back.
at::Tensor send(const Group& group, const at::Tensor& x, int to);
/// Receives a tensor of the shape of `like` (not collective). The gradient of `like` is zero; it
/// must require a gradient if the sender's tensor does.
at::Tensor receive(const Group& group, const at::Tensor& like, int from);

/// Enters a value that is the same on all ranks into computation that differs by rank: y = x, and
/// backward sums the gradients of all ranks. (The adjoint of all_reduce with
/// Cotangent::replicated.)
at::Tensor replicate(const Group& group, const at::Tensor& x);
/// This rank's rows of a value that is the same on all ranks; backward gathers. (The adjoint of
/// all_gather with Cotangent::replicated.)
at::Tensor own_rows(const Group& group, const at::Tensor& x, const Sizes& sizes);

}  // namespace tessera::functional
