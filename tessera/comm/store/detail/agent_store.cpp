#include "tessera/comm/store/detail/agent_store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tessera/base/text.h"
#include "tessera/comm/store/store.h"

namespace tessera::detail {
namespace {

// c10d's own greeting (TCPStoreBackend.hpp: query numbers and magic), sent here first because c10d
// waits for the answer without a limit.
constexpr std::uint8_t kValidate = 0, kPing = 13;
constexpr std::uint32_t kMagic = 0x3C85F7CE;

/// Returns the numeric address at which the store answers: c10d looks up names without a limit,
/// too.
std::string probe(const std::string& host, int port, Deadline deadline) {
  const Socket socket = connect_to(host, port, false, deadline);
  const std::uint32_t nonce = 0x7e55e7a;
  char question[10];
  question[0] = kValidate;
  std::memcpy(question + 1, &kMagic, 4);
  question[5] = kPing;
  std::memcpy(question + 6, &nonce, 4);
  std::uint32_t answer = 0;
  const Transfer sent = send_all(socket, question, sizeof question, deadline);
  const Transfer got =
      sent == Transfer::done ? receive_all(socket, &answer, sizeof answer, deadline) : sent;
  if (got == Transfer::done && answer == nonce) return peer_address(socket);
  throw RendezvousError(concat(
      "torchrun's agent should serve a store on ", host, ":", port, ", but ",
      got == Transfer::late ? "what listens there is silent" : "something else listens there",
      "; give the job a port that no other program uses"));
}

}  // namespace

c10::intrusive_ptr<c10d::Store> agent_store(const std::string& host, int port, Deadline deadline) {
  const std::string address = probe(host, port, deadline);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = false;
  options.waitWorkers = false;
  // c10d counts whole seconds
  options.timeout = std::max(std::chrono::milliseconds(1000), time_left(deadline));
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const c10::Error& error) {
    throw RendezvousError(concat("the store of torchrun's agent on ", host, ":", port, ": ",
                                 error.what_without_backtrace()));
  }
}

}  // namespace tessera::detail
