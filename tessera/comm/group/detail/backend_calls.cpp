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

bool moves(const Endpoint& endpoint, c10::ScalarType dtype) {
  return endpoint.reducing ? endpoint.reducing->moves(dtype) : every_library_moves(dtype);
}

at::Tensor flat(const at::Tensor& plain, bool as_bytes) {
  // A tensor of one or no element counts as contiguous whatever its strides say; as bytes it must
  // have stride 1.
  auto out =
      plain.dim() == 1 && plain.stride(0) == 1 ? plain : plain.as_strided({plain.numel()}, {1});
  return as_bytes ? out.view(at::kByte) : out;
}

// Gloo's own limit starts when one of its threads takes up the call; ours is the one that counts,
// so that the error can name the missing ranks.
constexpr std::chrono::milliseconds kGlooSlack{2000};

CallLimit limit_of(const RequestState& call, const Endpoint& endpoint) {
  return {backend_limit(call, endpoint), call.blocking()};
}

// The options of a call for the backend, which is told at the same time which call comes.
template <class Options>
Options options_of(RequestState& call, const Endpoint& endpoint) {
  sign(call, endpoint);
  Options options;
  options.timeout = backend_limit(call, endpoint);
  options.asyncOp = !call.blocking();
  return options;
}

void expect_device(RequestState& call, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) call.on_stream();
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::chrono::milliseconds backend_limit(const RequestState& call, const Endpoint& endpoint) {
  return endpoint.name == "gloo" ? call.limit() + kGlooSlack : call.limit();
}

std::int64_t wire_width(RequestState& call, const at::Tensor& tensor) {
  return moves(endpoint_of(call, tensor), tensor.scalar_type())
             ? 1
             : static_cast<std::int64_t>(tensor.element_size());
}

at::Tensor wire_input(RequestState& call, const at::Tensor& tensor) {
  const bool as_bytes = !moves(endpoint_of(call, tensor), tensor.scalar_type());
  const auto plain = is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  auto out = flat(plain, as_bytes);
  call.keep(out);
  return out;
}

at::Tensor wire_output(RequestState& call, const at::Tensor& tensor) {
  const bool as_bytes = !moves(endpoint_of(call, tensor), tensor.scalar_type());
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
  const auto& endpoint = endpoint_of(call, tensor);
  expect_device(call, tensor);
  Tensors tensors{tensor};
  call.launch([&] {
    auto options = options_of<c10d::BroadcastOptions>(call, endpoint);
    options.rootRank = root;
    call.add(endpoint.backend->broadcast(tensors, options));
  });
}

bool gathers_in_place(const RequestState& call, const at::Tensor& tensor) {
  return call.group().size() == 2 && endpoint_of(call, tensor).name == "gloo";
}

void all_gather_equal(RequestState& call, at::Tensor output, at::Tensor input) {
  const auto& endpoint = endpoint_of(call, output);
  expect_device(call, output);
  if (output.dim() != 1) output = output.view({-1});
  call.launch([&] {
    call.add(endpoint.backend->_allgather_base(output, input,
                                               options_of<c10d::AllgatherOptions>(call, endpoint)));
  });
}

void all_to_all_counts(RequestState& call, at::Tensor output, at::Tensor input, Sizes output_counts,
                       Sizes input_counts) {
  const auto& endpoint = endpoint_of(call, output);
  expect_device(call, output);
  call.launch([&] {
    call.add(endpoint.backend->alltoall_base(output, input, output_counts, input_counts,
                                             options_of<c10d::AllToAllOptions>(call, endpoint)));
  });
}

void all_gather_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                       const Sizes& counts) {
  const auto& endpoint = endpoint_of(call, output);
  expect_device(call, output);
  if (endpoint.uneven) {
    call.launch([&] {
      sign_uneven(call, endpoint);
      call.add(endpoint.uneven->all_gather_v(output, input, counts, limit_of(call, endpoint)));
    });
    return;
  }
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

void gather_equal(RequestState& call, const at::Tensor& output, const at::Tensor& input, int root) {
  const auto& endpoint = endpoint_of(call, input);
  // One call that knows the counts of all ranks, and compares them.
  if (endpoint.uneven)
    return gather_counts(call, output, input, Sizes(call.group().size(), input.numel()), root);
  expect_device(call, input);
  std::vector<Tensors> outputs;
  if (call.group().rank() == root)
    outputs.push_back(split_flat(output, Sizes(call.group().size(), input.numel())));
  Tensors inputs{input};
  call.launch([&] {
    auto options = options_of<c10d::GatherOptions>(call, endpoint);
    options.rootRank = root;
    call.add(endpoint.backend->gather(outputs, inputs, options));
  });
}

void gather_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                   const Sizes& counts, int root) {
  const auto& endpoint = endpoint_of(call, input);
  expect_device(call, input);
  if (endpoint.uneven) {
    call.launch([&] {
      sign_uneven(call, endpoint);
      call.add(endpoint.uneven->gather_v(output, input, counts, root, limit_of(call, endpoint)));
    });
    return;
  }
  const int n = call.group().size();
  const bool is_root = call.group().rank() == root;
  Sizes to(n, 0);
  to[root] = input.numel();
  all_to_all_counts(call, is_root ? output : input.new_empty({0}), input,
                    is_root ? counts : Sizes(n, 0), to);
}

void scatter_equal(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                   int root) {
  const auto& endpoint = endpoint_of(call, output);
  if (endpoint.uneven)
    return scatter_counts(call, output, input, Sizes(call.group().size(), output.numel()), root);
  expect_device(call, output);
  std::vector<Tensors> inputs;
  if (call.group().rank() == root)
    inputs.push_back(split_flat(input, Sizes(call.group().size(), output.numel())));
  Tensors outputs{output};
  call.launch([&] {
    auto options = options_of<c10d::ScatterOptions>(call, endpoint);
    options.rootRank = root;
    call.add(endpoint.backend->scatter(outputs, inputs, options));
  });
}

void scatter_counts(RequestState& call, const at::Tensor& output, const at::Tensor& input,
                    const Sizes& counts, int root) {
  const auto& endpoint = endpoint_of(call, output);
  expect_device(call, output);
  if (endpoint.uneven) {
    call.launch([&] {
      sign_uneven(call, endpoint);
      call.add(endpoint.uneven->scatter_v(output, input, counts, root, limit_of(call, endpoint)));
    });
    return;
  }
  const int n = call.group().size();
  const bool is_root = call.group().rank() == root;
  Sizes from(n, 0);
  from[root] = output.numel();
  all_to_all_counts(call, output, is_root ? input : output.new_empty({0}), from,
                    is_root ? counts : Sizes(n, 0));
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
  if (endpoint.uneven) return all_to_all_counts(call, output, input, output_counts, input_counts);
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
  const auto& endpoint = endpoint_of(call, messages.front().tensor);
  expect_device(call, messages.front().tensor);
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
  call.launch([&] { call.add(endpoint.uneven->exchange(batch, limit_of(call, endpoint))); });
}

void exchange_one(RequestState& call, const Endpoint& endpoint, const Message& message, int tag,
                  const MessageCard* card) {
  Tensors tensors{message.tensor};
  const bool sends = message.kind == Message::Kind::send;
  call.add(sends ? endpoint.backend->send(tensors, message.peer, tag)
                 : endpoint.backend->recv(tensors, message.peer, tag),
           travels_alone(endpoint, message.peer), card);
}

bool travels_alone(const Endpoint& endpoint, int peer) {
  return !endpoint.uneven || !endpoint.uneven->batches(peer);
}

void sign(RequestState& call, const Endpoint& endpoint) {
  if (!endpoint.signing) return;
  endpoint.signing->sign(call.card().hash());
  call.set_signed();
}

void sign_uneven(RequestState& call, const Endpoint& endpoint) {
  if (endpoint.uneven->signs_uneven()) sign(call, endpoint);
}

}  // namespace tessera::detail
