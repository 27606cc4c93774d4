#pragma once
// The calls of a group, each launched into a RequestState: check the arguments, prepare the
// tensors, hand them to the backend, and register what is left to do when the data has arrived.

#include <optional>
#include <vector>

#include "tessera/comm/group/detail/request_state.h"
#include "tessera/comm/group/group.h"

namespace tessera::detail {

void launch_broadcast(RequestState& call, const at::Tensor& tensor, int root);
void launch_all_reduce(RequestState& call, const at::Tensor& tensor, ReduceOp op);
void launch_reduce(RequestState& call, const at::Tensor& tensor, int root, ReduceOp op);
void launch_reduce_scatter(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                           ReduceOp op, const Sizes& sizes);
void launch_scan(RequestState& call, const at::Tensor& tensor, ReduceOp op);
void launch_all_to_all(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                       const Sizes& output_sizes, const Sizes& input_sizes);
/// Gather (`whole` is written) or scatter (it is read); without a root, all-gather. Every rank has
/// a `part`, and the root, or every rank, the whole.
void launch_parts(RequestState& call, const at::Tensor& whole, const at::Tensor& part,
                  std::optional<int> root, const Sizes& sizes, bool gathers);
void launch_exchange(RequestState& call, const std::vector<Message>& messages);
void launch_barrier(RequestState& call);

}  // namespace tessera::detail
