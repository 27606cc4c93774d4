#pragma once
// Data movement on any c10d backend, in flat tensors: what c10d::Backend and UnevenBackend have is
// used, the rest is composed from it.
//
// Composed where a backend has no uneven collectives (Gloo); n ranks, S elements in all, M the
// largest part:
//   all-gather-v         Each part broadcast by its rank, if ceil(log2 n) S < (n - 1) M, else one
//                        all-to-all in which every rank sends its part n times: the busiest sender
//                        bounds the latter, the number of tree levels the former (one rank holds
//                        all: 2 S against 3 S on 4 ranks).
//   gather-v, scatter-v  One all-to-all with zero counts but for the root's.
//   reduce-scatter       One all-to-all, then the parts are reduced here in rank order:
//                        (n - 1) / n S sent by each rank, half of what an all-reduce sends,
//                        S elements of scratch, any sizes, dtypes and operations.
//   exchange             A send or receive for each message.

#include <ATen/core/Tensor.h>

#include "tessera/comm/group/detail/request_state.h"
#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// The tensor as the backend reads it: contiguous, conjugation and negation resolved, one dim,
/// bytes where the backend does not know the dtype.
at::Tensor wire_input(RequestState& call, const at::Tensor& tensor);
/// The same for what the backend writes: the tensor's own memory if it can be, else scratch that is
/// copied back when the call ends.
at::Tensor wire_output(RequestState& call, const at::Tensor& tensor);
/// Elements of a wire tensor per element of `tensor`: its item size if bytes travel, else 1.
std::int64_t wire_width(RequestState& call, const at::Tensor& tensor);

/// True for memory in plain row-major order without pending conjugation or negation.
bool is_plain(const at::Tensor& tensor);

// All tensors below are flat and contiguous; counts are elements, one a rank.
void broadcast_flat(RequestState& call, const at::Tensor& tensor, int root);
void all_gather_equal(RequestState& call, at::Tensor output, at::Tensor input);
void all_gather_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                       const Sizes& counts);
void all_to_all_counts(RequestState& call, at::Tensor output, at::Tensor input, Sizes output_counts,
                       Sizes input_counts);
/// The same of a user's call, whose counts no rank knows of the others: a message for each pair
/// with data, which is not delivered where its two ends differ.
void all_to_all_pairs(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                      const Sizes& output_counts, const Sizes& input_counts);
void gather_equal(RequestState& call, const at::Tensor& output, const at::Tensor& input, int root);
void gather_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                   const Sizes& counts, int root);
void scatter_equal(RequestState& call, const at::Tensor& output, const at::Tensor& input, int root);
void scatter_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                    const Sizes& counts, int root);
/// No message to this rank itself, none empty.
void exchange_flat(RequestState& call, const std::vector<Message>& messages);
/// By c10d's own send or receive. What the backend throws is thrown.
/// With a `card`, the message is not delivered to a receive with another card.
void exchange_one(RequestState& call, const Endpoint& endpoint, const Message& message, int tag,
                  const MessageCard* card);

/// Tells the backend which call comes next, so that ranks that make different ones do not read each
/// other's data.
void sign(RequestState& call, const Endpoint& endpoint);

/// The limit to give to a backend.
std::chrono::milliseconds backend_limit(const RequestState& call, const Endpoint& endpoint);
/// The pieces of a flat tensor: views of `counts` elements.
std::vector<at::Tensor> split_flat(const at::Tensor& tensor, const Sizes& counts);

}  // namespace tessera::detail
