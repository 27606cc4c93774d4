// The job's store. An even first byte: the bytes come from a stranger. An odd one: they come from
// a rank that knows the secret and has been let in, as frames of the store's protocol.

#include <sys/socket.h>

#include "fuzz.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/store.h"

using namespace tessera;
using namespace tessera::detail;

namespace {

constexpr std::chrono::seconds kLimit{5};

/// The store's nonce, from its magic and its challenge.
std::string nonce_of(const Socket& socket) {
  char head[13 + 4];
  std::uint32_t size = 0;
  fuzz::must(receive_all(socket, head, sizeof head, deadline_after(kLimit)) == Transfer::done,
             "the store greets");
  std::memcpy(&size, head + 13, sizeof size);
  std::string frame(size, '\0');
  fuzz::must(receive_all(socket, frame.data(), size, deadline_after(kLimit)) == Transfer::done,
             "the store challenges");
  Reader in(frame);
  in.number<std::uint8_t>();
  in.text();
  return std::string(in.text());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static_assert(store_magic.size() == 13);
  if (size == 0) return 0;
  StoreServer server(listen_on("127.0.0.1", 0), 1, "job");
  {
    const Socket socket = connect_to("127.0.0.1", server.port(), false, deadline_after(kLimit));
    std::string sent(store_magic);
    if (data[0] % 2) {
      const std::string nonce = nonce_of(socket);
      auto hello = hello_fields(0, 1, 5000, "me", "job", "n");
      const auto fields = Writer(hello).take();
      sent += hello.text(rank_proof(Secret::none(), nonce, fields)).take();
    }
    sent.append(fuzz::text_of(data + 1, size - 1));
    send_all(socket, sent.data(), sent.size(), deadline_after(kLimit));
    ::shutdown(socket.fd(), SHUT_WR);
    // The store reads all of it, and then the end, before it closes its own end.
    char rest[4096];
    while (::recv(socket.fd(), rest, sizeof rest, 0) > 0) {
    }
  }
  return 0;
}
