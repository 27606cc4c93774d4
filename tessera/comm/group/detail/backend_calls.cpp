#include "tessera/comm/group/detail/backend_calls.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <bit>

namespace tessera::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

const Endpoint& endpoint_of(const RequestState& call, const at::Tensor& tensor) {
  return call.group().endpoint(tensor.device().type());
}

at::Tensor flat(const at::Tensor& plain, bool as_bytes) {
  // A tensor of one or no element counts as contiguous whatever its strides say; as bytes it must
  // have stride 1.
  auto out =
      plain.dim() == 1 && plain.stride(0) == 1 ? plain : plain.as_strided({plain.numel()}, {1});
  return as_bytes ? out.view(at::kByte) : out;
}

}  // namespace

const Endpoint& endpoint_for(RequestState& call, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) call.on_stream();
  return endpoint_of(call, tensor);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::chrono::milliseconds backend_limit(const RequestState& call, const Endpoint& endpoint) {
  return call.limit() + endpoint.abilities.slack;
}

std::int64_t wire_width(RequestState& call, const at::Tensor& tensor) {
  return endpoint_of(call, tensor).abilities.moves(tensor.scalar_type())
             ? 1
             : static_cast<std::int64_t>(tensor.element_size());
}

at::Tensor wire_input(RequestState& call, const at::Tensor& tensor) {
  const bool as_bytes = !endpoint_of(call, tensor).abilities.moves(tensor.scalar_type());
  const auto plain = is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  auto out = flat(plain, as_bytes);
  call.keep(out);
  return out;
}

at::Tensor wire_output(RequestState& call, const at::Tensor& tensor) {
  const bool as_bytes = !endpoint_of(call, tensor).abilities.moves(tensor.scalar_type());
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  if (is_plain(tensor)) {
    auto out = flat(tensor, as_bytes);
    call.keep(out);
    return out;
  }
  auto scratch = at::empty({tensor.numel()}, tensor.options());
  call.copy_back(tensor, scratch);
  return flat(scratch, as_bytes);
}

std::vector<at::Tensor> split_flat(const at::Tensor& tensor, const Sizes& counts) {
  Tensors pieces;
  pieces.reserve(counts.size());
  std::int64_t begin = 0;
  for (const auto count : counts) {
    pieces.push_back(tensor.narrow(0, begin, count));
    begin += count;
  }
  return pieces;
}

void broadcast_flat(RequestState& call, const at::Tensor& tensor, int root) {
  const auto& endpoint = endpoint_for(call, tensor);
  Tensors tensors{tensor};
  hand_over<c10d::BroadcastOptions>(call, endpoint, [&](auto& options) {
    options.rootRank = root;
    return endpoint.backend->broadcast(tensors, options);
  });
}

bool gathers_in_place(const RequestState& call, const at::Tensor& tensor) {
  return call.group().size() == 2 && endpoint_of(call, tensor).abilities.gathers_through_copies;
}

void all_gather_equal(RequestState& call, at::Tensor output, at::Tensor input) {
  const auto& endpoint = endpoint_for(call, output);
  if (output.dim() != 1) output = output.view({-1});
  hand_over<c10d::AllgatherOptions>(call, endpoint, [&](const auto& options) {
    return endpoint.backend->_allgather_base(output, input, options);
  });
}

void all_to_all_counts(RequestState& call, at::Tensor output, at::Tensor input, Sizes output_counts,
                       Sizes input_counts) {
  const auto& endpoint = endpoint_for(call, output);
  hand_over<c10d::AllToAllOptions>(call, endpoint, [&](const auto& options) {
    return endpoint.backend->alltoall_base(output, input, output_counts, input_counts, options);
  });
}

void all_gather_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                       const Sizes& counts) {
  const auto& endpoint = endpoint_for(call, output);
  if (endpoint.abilities.uneven)
    return hand_over_uneven(call, endpoint, [&](UnevenBackend& uneven, CallLimit limit) {
      return uneven.all_gather_v(output, input, counts, limit);
    });
  const int n = call.group().size(), me = call.group().rank();
  if (n == 2) {
    const int peer = 1 - me;
    const auto parts = split_flat(output, counts);
    if (input.numel() > 0) parts[me].copy_(input);
    Sizes received(2, 0), sent(2, 0);
    received[peer] = counts[peer];
    sent[peer] = input.numel();
    return all_to_all_counts(call, parts[peer], input, received, sent);
  }
  const std::int64_t largest = *std::max_element(counts.begin(), counts.end()),
                     levels = std::bit_width(static_cast<unsigned>(n - 1));
  if (levels * output.numel() < (n - 1) * largest) {
    const auto parts = split_flat(output, counts);
    if (input.numel() > 0) parts[me].copy_(input);
    for (int r = 0; r < n; ++r)
      if (counts[r] > 0) broadcast_flat(call, parts[r], r);
    return;
  }
  auto copies = input.repeat({n});
  call.keep(copies);
  all_to_all_counts(call, output, copies, counts, Sizes(n, input.numel()));
}

void rooted_equal(RequestState& call, const at::Tensor& whole, const at::Tensor& part, int root,
                  bool gathers) {
  const auto& endpoint = endpoint_for(call, part);
  const Sizes counts(call.group().size(), part.numel());
  // One call that knows the counts of all ranks, and compares them.
  if (endpoint.abilities.uneven) return rooted_counts(call, whole, part, counts, root, gathers);
  std::vector<Tensors> wholes;
  if (call.group().rank() == root) wholes.push_back(split_flat(whole, counts));
  Tensors parts{part};
  if (gathers)
    hand_over<c10d::GatherOptions>(call, endpoint, [&](auto& options) {
      options.rootRank = root;
      return endpoint.backend->gather(wholes, parts, options);
    });
  else
    hand_over<c10d::ScatterOptions>(call, endpoint, [&](auto& options) {
      options.rootRank = root;
      return endpoint.backend->scatter(parts, wholes, options);
    });
}

void rooted_counts(RequestState& call, const at::Tensor& whole, const at::Tensor& part,
                   const Sizes& counts, int root, bool gathers) {
  const auto& endpoint = endpoint_for(call, part);
  if (endpoint.abilities.uneven)
    return hand_over_uneven(call, endpoint, [&](UnevenBackend& uneven, CallLimit limit) {
      return gathers ? uneven.gather_v(whole, part, counts, root, limit)
                     : uneven.scatter_v(part, whole, counts, root, limit);
    });
  const int n = call.group().size();
  const bool is_root = call.group().rank() == root;
  const at::Tensor at_root = is_root ? whole : part.new_empty({0});
  const Sizes all = is_root ? counts : Sizes(n, 0);
  Sizes mine(n, 0);
  mine[root] = part.numel();
  if (gathers)
    all_to_all_counts(call, at_root, part, all, mine);
  else
    all_to_all_counts(call, part, at_root, mine, all);
}

namespace {

// Tags of messages that are delivered only to an end with the same description: above those of
// users, of the cards and of compared messages (checks.cpp). 8 bits of the message's number, 21 of
// its hash.
int tag_of(const MessageCard& card) {
  constexpr int kOurs = 1 << 30, kOfCall = 1 << 29;
  return kOurs | (card.of_call ? kOfCall : 0) | static_cast<int>((card.number & 0xff) << 21) |
         static_cast<int>(card.hash() & 0x1fffff);
}

MessageCard message_card(RequestState& call, const Message& message) {
  const bool sends = message.kind == Message::Kind::send;
  return {.number = call.group().next_message(message.peer, sends),
          .peer = message.peer,
          .sends = sends,
          .dtype = message.tensor.scalar_type(),
          .elements = message.tensor.numel()};
}

}  // namespace

void all_to_all_pairs(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                      const Sizes& output_counts, const Sizes& input_counts) {
  const auto& endpoint = endpoint_of(call, output);
  if (endpoint.abilities.uneven)
    return all_to_all_counts(call, output, input, output_counts, input_counts);
  const int n = call.group().size(), me = call.group().rank();
  const auto to = split_flat(input, input_counts), from = split_flat(output, output_counts);
  if (to[me].numel() > 0) from[me].copy_(to[me]);
  for (const bool sends : {false, true})
    for (int step = 1; step < n; ++step) {
      const int peer = sends ? (me + step) % n : (me - step + n) % n;
      const auto& part = sends ? to[peer] : from[peer];
      if (part.numel() == 0) continue;
      const MessageCard card{.number = call.sequence(),
                             .peer = peer,
                             .sends = sends,
                             .of_call = true,
                             .dtype = part.scalar_type(),
                             .elements = part.numel()};
      const Message message{sends ? Message::Kind::send : Message::Kind::receive, part, peer};
      call.launch([&] { exchange_one(call, endpoint, message, tag_of(card), &card); });
    }
}

void exchange_flat(RequestState& call, const std::vector<Message>& messages) {
  const auto& endpoint = endpoint_for(call, messages.front().tensor);
  // First those that travel by themselves: the others may depend on them, through third ranks.
  std::vector<Message> batch;
  for (const auto& m : messages) {
    if (!travels_alone(endpoint, m.peer)) {
      batch.push_back(m);
      continue;
    }
    const auto card = message_card(call, m);
    call.launch([&] { exchange_one(call, endpoint, m, tag_of(card), &card); });
  }
  if (batch.empty()) return;
  call.launch([&] {
    call.add(endpoint.abilities.uneven->exchange(batch,
                                                 {backend_limit(call, endpoint), call.blocking()}),
             message_wait(endpoint, batch.front().peer));
  });
}

void exchange_one(RequestState& call, const Endpoint& endpoint, const Message& message, int tag,
                  const MessageCard* card) {
  Tensors tensors{message.tensor};
  const bool sends = message.kind == Message::Kind::send;
  call.add(sends ? endpoint.backend->send(tensors, message.peer, tag)
                 : endpoint.backend->recv(tensors, message.peer, tag),
           message_wait(endpoint, message.peer), card);
}

bool travels_alone(const Endpoint& endpoint, int peer) {
  return !endpoint.abilities.uneven || !endpoint.abilities.uneven->batches(peer);
}

Wait message_wait(const Endpoint& endpoint, int peer) {
  if (travels_alone(endpoint, peer)) return Wait::at_one_go;
  return endpoint.abilities.ends_messages ? Wait::for_all : Wait::in_slices;
}

void sign(RequestState& call, const Endpoint& endpoint) {
  if (!endpoint.abilities.signature) return;
  endpoint.abilities.sign(call.card().hash());
  call.set_signed();
}

void add_collective(RequestState& call, const Endpoint& endpoint,
                    c10::intrusive_ptr<c10d::Work> work) {
  call.add(std::move(work), endpoint.abilities.ends_collectives ? Wait::for_all : Wait::in_slices);
}

}  // namespace tessera::detail
