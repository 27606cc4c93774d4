#pragma once
// TCP sockets with deadlines: what the job's store needs, and no more.

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/deadline.h"

namespace tessera::detail {

using Clock = std::chrono::steady_clock;

/// A file descriptor that is closed with its holder. A forked child does not keep it: there it is
/// /dev/null under the same number, so that the connections of a rank that dies end even if its
/// children live on.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

/// True for "127.0.0.1", "::1" and the like.
bool is_loopback_address(const std::string& numeric_address);
/// True for "0.0.0.0", "::" and other spellings of "any address of this host". Looks up no name.
bool is_any_address(const std::string& host);
/// The numeric addresses of this host's interfaces that are up, loopback first.
std::vector<std::string> own_addresses();
/// The numeric addresses that `host`, the address of rank 0, may stand for, in the resolver's
/// order. With `other_hosts`, loopback is excluded: a host that resolves its own name to loopback
/// (Debian's 127.0.1.1) means its outward addresses. Empty if the name is unknown, nothing is left
/// or the name service does not answer by the deadline; `reason` then says why.
std::vector<std::string> targets(const std::string& host, bool other_hosts, Deadline deadline,
                                 std::string& reason);

/// Listens on exactly this address. Port 0: any free one. Throws RendezvousError naming address and
/// port (in use, which `in_use` reports too, not an address of this host, not allowed).
Socket listen_on(const std::string& numeric_address, int port, bool* in_use = nullptr);
int local_port(const Socket& socket);
/// The numeric address of this end.
std::string local_address(const Socket& socket);
/// The numeric address of the other end; "?" if it is gone.
std::string peer_address(const Socket& socket);
/// "10.0.0.3:41022", the other end; "?" if it is gone.
std::string peer_name(const Socket& socket);

/// Tries the addresses of `host` until one accepts. Throws RendezvousError at the deadline with the
/// last reason; a name that is unknown is tried again too.
Socket connect_to(const std::string& host, int port, bool other_hosts, Deadline deadline);

/// Raises this process' soft limit of file descriptors to `wanted`, or as far as the hard limit
/// allows. Returns the limit that is then in force.
std::size_t allow_descriptors(std::size_t wanted);
/// Number of file descriptors that are open now.
std::size_t open_descriptors();
/// Makes the system detect within minutes that the other end is gone without closing (cut off,
/// powered down), and keeps firewalls from dropping a connection that is idle for hours.
void keep_alive(const Socket& socket);

/// At most `limit` bytes, with anything but printable ASCII replaced by '.': for messages that
/// quote what came from outside.
std::string printable(std::string_view bytes, std::size_t limit = 200);

enum class Transfer { done, closed, late };
Transfer send_all(const Socket& socket, const void* data, std::size_t size, Deadline deadline);
/// `got` counts the bytes received, also when not all were.
Transfer receive_all(const Socket& socket, void* data, std::size_t size, Deadline deadline,
                     std::size_t* got = nullptr);

}  // namespace tessera::detail
