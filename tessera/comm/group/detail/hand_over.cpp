#include "tessera/comm/group/detail/hand_over.h"

#include <ATen/ATen.h>

#include <utility>

#include "tessera/comm/backends/flat.h"

namespace tessera::detail {
namespace {

const Endpoint& endpoint_of(const RequestState& call, const at::Tensor& tensor) {
  return call.group().endpoint(tensor.device().type());
}

/// Lets the call wait for what the transport has left, in the manner of `wait`.
void take_works(RequestState& call, TransportCall& given, Wait wait) {
  for (auto& started : given.works) {
    if (started.wait != Wait::at_one_go) started.wait = wait;
    call.add(std::move(started));
  }
  for (const auto& tensor : given.kept) call.keep(tensor);
  if (given.then) call.then(std::move(given.then));
}

}  // namespace

CallCard card_of(const at::Tensor& tensor, int root, const Sizes& sizes) {
  CallCard card;
  card.dtype = tensor.scalar_type();
  card.device = tensor.device().type();
  card.root = root;
  card.elements = sizes.empty() ? tensor.numel() : row_numel(tensor);
  card.sizes = sizes;
  return card;
}

const Endpoint& endpoint_for(RequestState& call, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) call.on_stream();
  return endpoint_of(call, tensor);
}

std::int64_t wire_width(RequestState& call, const at::Tensor& tensor) {
  return endpoint_of(call, tensor).abilities.moves(tensor.scalar_type())
             ? 1
             : static_cast<std::int64_t>(tensor.element_size());
}

at::Tensor wire_input(RequestState& call, const at::Tensor& tensor) {
  const bool moves = endpoint_of(call, tensor).abilities.moves(tensor.scalar_type());
  auto out = moves ? flat(plain(tensor)) : flat_bytes(plain(tensor));
  call.keep(out);
  return out;
}

at::Tensor wire_output(RequestState& call, const at::Tensor& tensor) {
  const bool moves = endpoint_of(call, tensor).abilities.moves(tensor.scalar_type());
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  at::Tensor target = tensor;
  if (!is_plain(tensor)) {
    target = at::empty({tensor.numel()}, tensor.options());
    call.copy_back(tensor, target);
  }
  auto out = moves ? flat(target) : flat_bytes(target);
  call.keep(out);
  return out;
}

void hand_over(RequestState& call, const Endpoint& endpoint, TransportCall& given,
               Transport::Function make) {
  call.launch([&] {
    given.sign = call.card().hash();
    given.source = &call.card().source;
    if (endpoint.abilities.signs) call.set_signed();
    given.number = call.sequence();
    given.timeout = call.limit() + endpoint.abilities.slack;
    given.blocking = call.blocking();
    (endpoint.transport.get()->*make)(given);
    take_works(call, given, endpoint.abilities.ends_collectives ? Wait::for_all : Wait::in_slices);
  });
}

void exchange_flat(RequestState& call, const std::vector<Message>& messages) {
  const auto& endpoint = endpoint_for(call, messages.front().tensor);
  // First those that travel by themselves: the others may depend on them, through third ranks.
  std::vector<Message> batch;
  for (const auto& m : messages) {
    if (endpoint.transport->batches(m.peer)) {
      batch.push_back(m);
      continue;
    }
    const bool sends = m.kind == Message::Kind::send;
    const MessageCard card{.number = call.group().next_message(m.peer, sends),
                           .peer = m.peer,
                           .sends = sends,
                           .dtype = m.tensor.scalar_type(),
                           .elements = m.tensor.numel()};
    hand_messages(call, endpoint, {m}, card.tag(), &card);
  }
  if (!batch.empty()) hand_messages(call, endpoint, std::move(batch), TransportCall::kInOrder);
}

void hand_messages(RequestState& call, const Endpoint& endpoint, std::vector<Message> messages,
                   int tag, const MessageCard* card) {
  call.launch([&] {
    TransportCall given;
    given.messages = std::move(messages);
    given.tag = tag;
    given.timeout = call.limit() + endpoint.abilities.slack;
    given.blocking = call.blocking() && tag == TransportCall::kInOrder;
    endpoint.transport->exchange(given);
    if (card)
      for (auto& started : given.works) started.card = *card;
    take_works(call, given, endpoint.abilities.ends_messages ? Wait::for_all : Wait::in_slices);
  });
}

}  // namespace tessera::detail
