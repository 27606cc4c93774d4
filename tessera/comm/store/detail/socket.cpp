#include "tessera/comm/store/detail/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "tessera/base/text.h"
#include "tessera/comm/store/store.h"

namespace tessera::detail {
namespace {

std::string numeric(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "?";
  return text;
}

struct Addresses {
  addrinfo* first = nullptr;
  Addresses() = default;
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  ~Addresses() {
    if (first) freeaddrinfo(first);
  }
};

/// Empty text on success.
std::string look_up(const std::string& host, int port, int flags, Addresses& out) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int failed = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &out.first);
  return failed == 0 ? "" : gai_strerror(failed);
}

void set_blocking(int fd, bool on) {
  const int flags = fcntl(fd, F_GETFL, 0);
  fcntl(fd, F_SETFL, on ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

/// Zero on success, else errno.
int connect_once(const addrinfo& address, Deadline deadline, Socket& out) {
  Socket socket(
      ::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol));
  if (!socket) return errno;
  set_blocking(socket.fd(), false);
  if (::connect(socket.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    pollfd waiting{socket.fd(), POLLOUT, 0};
    int ready;
    do ready = ::poll(&waiting, 1, remaining_ms(deadline));
    while (ready < 0 && errno == EINTR);
    if (ready == 0) return ETIMEDOUT;
    int failed = 0;
    socklen_t size = sizeof failed;
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &failed, &size);
    if (failed) return failed;
  }
  const int on = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A rank that connects to a free local port of its own can meet itself (simultaneous open).
  sockaddr_storage here{}, there{};
  socklen_t here_size = sizeof here, there_size = sizeof there;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&here), &here_size);
  getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&there), &there_size);
  if (here_size == there_size && std::memcmp(&here, &there, here_size) == 0) return ECONNREFUSED;
  out = std::move(socket);
  return 0;
}

}  // namespace

int remaining_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Socket::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Socket::close() {
  if (fd_ >= 0) ::close(release());
}

bool is_loopback_address(const std::string& numeric_address) {
  return numeric_address.rfind("127.", 0) == 0 || numeric_address == "::1";
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return addresses;
  for (const ifaddrs* i = first; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
    const int family = i->ifa_addr->sa_family;
    if (family == AF_INET) addresses.push_back(numeric(i->ifa_addr, sizeof(sockaddr_in)));
    if (family == AF_INET6) addresses.push_back(numeric(i->ifa_addr, sizeof(sockaddr_in6)));
  }
  freeifaddrs(first);
  std::stable_partition(addresses.begin(), addresses.end(), is_loopback_address);
  return addresses;
}

std::vector<std::string> targets(const std::string& host, bool other_hosts, std::string& reason) {
  Addresses found;
  const std::string failed = look_up(host, 0, 0, found);
  if (!failed.empty()) reason = concat("the name '", host, "' cannot be resolved: ", failed);
  std::vector<std::string> addresses;
  for (const addrinfo* a = found.first; a; a = a->ai_next)
    addresses.push_back(numeric(a->ai_addr, a->ai_addrlen));
  if (!other_hosts || std::none_of(addresses.begin(), addresses.end(), is_loopback_address))
    return addresses;
  std::erase_if(addresses, is_loopback_address);
  if (addresses.empty()) {
    addresses = own_addresses();
    std::erase_if(addresses, [](const std::string& a) {
      return is_loopback_address(a) || a.rfind("169.254.", 0) == 0 || a.rfind("fe80:", 0) == 0;
    });
    if (addresses.empty())
      reason = concat("'", host,
                      "' means loopback here, and this host has no other address, though the job "
                      "has ranks on other hosts");
  }
  return addresses;
}

Socket listen_on(const std::string& numeric_address, int port, bool* in_use) {
  Addresses found;
  const std::string failed = look_up(numeric_address, port, AI_NUMERICHOST | AI_PASSIVE, found);
  if (!failed.empty())
    throw RendezvousError(
        concat("'", numeric_address, "' is not a numeric address (", failed, ")"));
  const addrinfo& address = *found.first;
  Socket socket(
      ::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol));
  const int on = 1;
  if (socket) setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!socket || ::bind(socket.fd(), address.ai_addr, address.ai_addrlen) != 0 ||
      ::listen(socket.fd(), SOMAXCONN) != 0) {
    const int error = errno;
    if (in_use) *in_use = error == EADDRINUSE;
    std::string advice;
    if (error == EADDRINUSE)
      advice = "another program listens there; choose another port, or end that program";
    else if (error == EADDRNOTAVAIL)
      advice = concat("this host's addresses are ", list(own_addresses()),
                      "; the rendezvous address must be one of rank 0's host");
    else if (error == EACCES)
      advice = "ports below 1024 need privileges; choose a higher one";
    throw RendezvousError(concat("rank 0 cannot serve the job's store on port ", port, " of ",
                                 numeric_address, ": ", std::strerror(error),
                                 advice.empty() ? "" : "; ", advice));
  }
  return socket;
}

int local_port(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

std::string local_address(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size);
  return numeric(reinterpret_cast<sockaddr*>(&address), size);
}

std::string peer_name(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return "?";
  const int port =
      ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(address).sin_port);
  return concat(numeric(reinterpret_cast<sockaddr*>(&address), size), ":", port);
}

Socket connect_to(const std::string& host, int port, bool other_hosts, Deadline deadline) {
  const auto begin = Clock::now();
  std::string reason = "the time limit was over at once";
  auto pause = std::chrono::milliseconds(5);
  do {
    const auto addresses = targets(host, other_hosts, reason);
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      Addresses found;
      if (!look_up(addresses[i], port, AI_NUMERICHOST, found).empty()) continue;
      Socket socket;
      // An address that swallows packets must not use up the time of the next one.
      const Deadline share =
          i + 1 < addresses.size() ? Clock::now() + (deadline - Clock::now()) / 2 : deadline;
      const int failed = connect_once(*found.first, share, socket);
      if (!failed) return socket;
      reason = concat(addresses[i], ": ", std::strerror(failed));
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(
        pause, std::max<Clock::duration>(deadline - Clock::now(), Clock::duration::zero())));
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  } while (Clock::now() < deadline);
  const auto waited =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
  throw RendezvousError(
      concat("the job's store on ", host, ":", port, " could not be reached within ", waited,
             " ms (", reason, "); check that rank 0 runs, and that address and port are rank 0's"));
}

Transfer send_all(const Socket& socket, const void* data, std::size_t size, Deadline deadline) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = ::send(socket.fd(), at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      at += n;
      size -= static_cast<std::size_t>(n);
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return Transfer::closed;
    pollfd waiting{socket.fd(), POLLOUT, 0};
    if (::poll(&waiting, 1, remaining_ms(deadline)) == 0) return Transfer::late;
  }
  return Transfer::done;
}

Transfer receive_all(const Socket& socket, void* data, std::size_t size, Deadline deadline,
                     std::size_t* got) {
  char* at = static_cast<char*>(data);
  std::size_t ignored;
  std::size_t& n = got ? *got : ignored;
  n = 0;
  while (n < size) {
    const ssize_t some = ::recv(socket.fd(), at + n, size - n, MSG_DONTWAIT);
    if (some > 0) {
      n += static_cast<std::size_t>(some);
      continue;
    }
    if (some == 0) return Transfer::closed;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Transfer::closed;
    pollfd waiting{socket.fd(), POLLIN, 0};
    if (::poll(&waiting, 1, remaining_ms(deadline)) == 0) return Transfer::late;
  }
  return Transfer::done;
}

}  // namespace tessera::detail
