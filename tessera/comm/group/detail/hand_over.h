#pragma once
// What a group's calls hand to the transport of their tensors' device.

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/request_state.h"
#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// `tensor` as the transport reads it: in plain order, one-dimensional, as bytes if the transport
/// does not know the dtype.
at::Tensor wire_input(RequestState& call, const at::Tensor& tensor);
/// The flat tensor that the transport writes for `tensor`: its own memory where possible, else
/// scratch that is copied back when the call ends.
at::Tensor wire_output(RequestState& call, const at::Tensor& tensor);
/// Elements of the wire tensor per element of `tensor`: its item size if it travels as bytes, else
/// 1.
std::int64_t wire_width(RequestState& call, const at::Tensor& tensor);

/// The card of a collective whose tensors are alike on all ranks, or, with sizes, have rows alike.
CallCard card_of(const at::Tensor& tensor, int root, const Sizes& sizes = {});

/// The endpoint for `tensor`, whose device's stream waits for the call if it has one.
const Endpoint& endpoint_for(RequestState& call, const at::Tensor& tensor);

/// Hands one collective to the transport.
void hand_over(RequestState& call, const Endpoint& endpoint, TransportCall& given,
               Transport::Function make);

/// Sends and receives `messages`, none of which is empty or from this rank to itself.
void exchange_flat(RequestState& call, const std::vector<Message>& messages);
/// Hands such messages to the transport: as one call in order, or each with a tag. With a `card`, a
/// message is not delivered to a receive with another card.
void hand_messages(RequestState& call, const Endpoint& endpoint, std::vector<Message> messages,
                   int tag, const MessageCard* card = nullptr);

}  // namespace tessera::detail
