// Messages between the ranks of a group over shm.

#include <cstdint>

#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

// Tags of c10d have 31 bits.
constexpr std::uint32_t kExchangeTag = 0x80000000U;

std::uint32_t shm_tag(int tag) {
  if (tag < 0) throw InvalidArgument(concat("message tag ", tag, " is negative"));
  return static_cast<std::uint32_t>(tag);
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::exchange_all(ShmCall call,
                                             const std::vector<shm::Message>& messages,
                                             CallLimit limit) {
  const char* name = call.name;
  return run(
      std::move(call), limit, 0, [&](shm::Call o) { group().exchange(messages, o, name); },
      [&](shm::Call o) { return group().started().exchange(messages, o, name); });
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor tensor = only("send", tensors);
  required_rank(to, "the receiver of send");
  auto call = call_of("send", OpType::SEND);
  const auto message = message_of(call, true, tensor, to, shm_tag(tag));
  return exchange_all(std::move(call), {message}, {});
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor tensor = only("receive", tensors);
  required_rank(from, "the sender of receive");
  auto call = call_of("receive", OpType::RECV, {tensor});
  const auto message = message_of(call, false, tensor, from, shm_tag(tag));
  return exchange_all(std::move(call), {message}, {});
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only("receive from any rank", tensors);
  auto call = call_of("receive from any rank", OpType::RECVANYSOURCE, {tensor});
  const auto message = message_of(call, false, tensor, shm::Message::kAnySource, shm_tag(tag));
  return exchange_all(std::move(call), {message}, {});
}

ShmBackend::WorkPtr ShmBackend::exchange(const std::vector<Message>& messages, CallLimit limit) {
  auto call = call_of("exchange", OpType::COALESCED);
  if (messages.size() == 1)
    call.name = messages.front().kind == Message::Kind::send ? "send" : "receive";
  std::vector<shm::Message> all;
  for (const auto& m : messages) {
    require_cpu("exchange", m.tensor);
    required_rank(m.peer, "a peer of exchange");
    all.push_back(message_of(call, m.kind == Message::Kind::send, m.tensor, m.peer, kExchangeTag));
  }
  return exchange_all(std::move(call), all, limit);
}

}  // namespace tessera::detail
