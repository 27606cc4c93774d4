#pragma once
// Data movement on any c10d backend, in flat tensors. Uses what c10d::Backend and UnevenBackend
// offer and composes the rest from it.
//
// What is composed where a backend has no uneven collectives (Gloo), for n ranks, S elements in
// total, and M elements in the largest shard:
//   all-gather-v         Of two ranks, each shard is sent straight to its place. Of more, each is
//                        broadcast by its rank if ceil(log2 n) S < (n - 1) M, else one all-to-all
//                        in which every rank sends its shard n times: the busiest sender bounds the
//                        latter, the number of tree levels the former (if one rank holds
//                        everything: 2 S against 3 S on 4 ranks).
//   gather-v, scatter-v  One all-to-all with zero counts but for the root's.
//   reduce-scatter       One all-to-all, then the shards are reduced here in rank order:
//                        (n - 1) / n S sent by each rank, half of what an all-reduce sends,
//                        any sizes, dtypes and operations; S elements of scratch, of two ranks
//                        none: what the other one sends lands in the output.
//   exchange             A send or receive for each message.

#include <ATen/core/Tensor.h>

#include "tessera/comm/group/detail/request_state.h"
#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// `tensor` as the backend reads it: contiguous, conjugation and negation resolved,
/// one-dimensional, as bytes if the backend does not know the dtype.
at::Tensor wire_input(RequestState& call, const at::Tensor& tensor);
/// The flat tensor that the backend writes for `tensor`: its own memory where possible, else
/// scratch that is copied back when the call ends.
at::Tensor wire_output(RequestState& call, const at::Tensor& tensor);
/// Elements of the wire tensor per element of `tensor`: its item size if it travels as bytes, else
/// 1.
std::int64_t wire_width(RequestState& call, const at::Tensor& tensor);

/// True for memory in plain row-major order without pending conjugation or negation.
bool is_plain(const at::Tensor& tensor);

// All tensors below are flat and contiguous; counts are elements, one number per rank.
void broadcast_flat(RequestState& call, const at::Tensor& tensor, int root);
void all_gather_equal(RequestState& call, at::Tensor output, at::Tensor input);
void all_gather_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                       const Sizes& counts);
/// True where all_gather_counts() needs no memory beside its tensors and the backend's own
/// all-gather does (Gloo's, the size of the result twice).
bool gathers_in_place(const RequestState& call, const at::Tensor& tensor);
void all_to_all_counts(RequestState& call, at::Tensor output, at::Tensor input, Sizes output_counts,
                       Sizes input_counts);
/// All-to-all with counts that each rank knows for itself alone, as users give them: one message
/// for each pair of ranks with data, which is not delivered where its two ends differ.
void all_to_all_pairs(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                      const Sizes& output_counts, const Sizes& input_counts);
/// Gather, which writes `whole` on the root, or scatter, which reads it there; every rank has a
/// `part`.
void rooted_equal(RequestState& call, const at::Tensor& whole, const at::Tensor& part, int root,
                  bool gathers);
void rooted_counts(RequestState& call, const at::Tensor& whole, const at::Tensor& part,
                   const Sizes& counts, int root, bool gathers);
/// Sends and receives `messages`, none of which is empty or from this rank to itself.
void exchange_flat(RequestState& call, const std::vector<Message>& messages);
/// Sends or receives one message by c10d's own call and throws what the backend throws. With a
/// `card`, the message is not delivered to a receive with another card.
void exchange_one(RequestState& call, const Endpoint& endpoint, const Message& message, int tag,
                  const MessageCard* card);

/// Tells the backend which call comes next, so that ranks that make different calls do not read
/// each other's data.
void sign(RequestState& call, const Endpoint& endpoint);
/// The endpoint for `tensor`, whose device's stream waits for the call if it has one.
const Endpoint& endpoint_for(RequestState& call, const at::Tensor& tensor);

/// True if messages between this rank and `peer` travel one by one (Gloo), each with a tag and a
/// work for which its thread waits at one go.
bool travels_alone(const Endpoint& endpoint, int peer);

/// How to wait for a message between this rank and `peer`.
Wait message_wait(const Endpoint& endpoint, int peer);

/// The time limit to pass to the backend of `endpoint`.
std::chrono::milliseconds backend_limit(const RequestState& call, const Endpoint& endpoint);
void add_collective(RequestState& call, const Endpoint& endpoint,
                    c10::intrusive_ptr<c10d::Work> work);

/// Hands one collective to the backend: `make` makes it with c10d's options.
template <class Options, class Make>
void hand_over(RequestState& call, const Endpoint& endpoint, const Make& make) {
  call.launch([&] {
    sign(call, endpoint);
    Options options;
    options.timeout = backend_limit(call, endpoint);
    options.asyncOp = !call.blocking();
    add_collective(call, endpoint, make(options));
  });
}

/// As hand_over(), for a call of UnevenBackend.
template <class Make>
void hand_over_uneven(RequestState& call, const Endpoint& endpoint, const Make& make) {
  call.launch([&] {
    if (endpoint.abilities.signs_uneven) sign(call, endpoint);
    const CallLimit limit{backend_limit(call, endpoint), call.blocking()};
    add_collective(call, endpoint, make(*endpoint.abilities.uneven, limit));
  });
}

/// Views of consecutive stretches of a flat tensor, of `counts` elements each.
std::vector<at::Tensor> split_flat(const at::Tensor& tensor, const Sizes& counts);

}  // namespace tessera::detail
