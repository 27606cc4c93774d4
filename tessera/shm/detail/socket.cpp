#include "tessera/shm/detail/socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/text.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace tessera::shm::detail {

namespace {

[[noreturn]] void refuse_socket(Cause cause, const char* call) {
  const int error = errno;
  throw SetupError(cause, concat("shm: ", call, ": ", std::strerror(error)));
}

std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A name that begins with 0 is not a file.
  const std::size_t length = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

void wait_for(const Descriptor& socket, short events, Deadline deadline, const char* what) {
  for (;;) {
    pollfd poll{socket.get(), events, 0};
    const int n = ::poll(&poll, 1, poll_milliseconds(deadline));
    if (n > 0) return;
    if (n < 0 && errno != EINTR) refuse_socket(Cause::not_permitted, "poll");
    if (time_left(deadline).count() == 0)
      throw SetupError(Cause::absent, concat("shm: ", what, " within the time limit"));
  }
}

/// Writes all bytes, or throws.
void write_all(const Descriptor& socket, const char* data, std::size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    wait_for(socket, POLLOUT, deadline, "another rank did not read");
    const ssize_t n = ::send(socket.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) refuse_socket(Cause::absent, "another rank went away while the group was made");
    data += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void read_all(const Descriptor& socket, char* data, std::size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    wait_for(socket, POLLIN, deadline, "another rank did not answer");
    const ssize_t n = ::recv(socket.get(), data, bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0)
      throw SetupError(Cause::absent, "shm: another rank went away while the group was made");
    data += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

}  // namespace

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t got = 0; got < count;) {
    const ssize_t n = ::getrandom(bytes.data() + got, count - got, 0);
    if (n < 0 && errno != EINTR) refuse_socket(Cause::not_permitted, "getrandom");
    if (n > 0) got += static_cast<std::size_t>(n);
  }
  return bytes;
}

Listener listen_locally(int backlog) {
  Listener listener{Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
                    "tessera-" + random_bytes(16)};
  if (!listener.socket) refuse_socket(Cause::not_permitted, "a local socket");
  const auto [address, length] = address_of(listener.name);
  if (::bind(listener.socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    refuse_socket(Cause::not_permitted, "bind");
  if (::listen(listener.socket.get(), backlog) != 0) refuse_socket(Cause::not_permitted, "listen");
  return listener;
}

Descriptor accept_from(const Descriptor& listener, Deadline deadline) {
  for (;;) {
    wait_for(listener, POLLIN, deadline, "not all ranks came");
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket) return socket;
    if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN)
      refuse_socket(Cause::not_permitted, "accept");
  }
}

Descriptor connect_to(const std::string& name) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) refuse_socket(Cause::not_permitted, "a local socket");
  const auto [address, length] = address_of(name);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EINTR) continue;
    if (errno == ECONNREFUSED)
      throw SetupError(Cause::other_host,
                       "shm: rank 0 is not on this host, or in a network namespace of its own");
    refuse_socket(Cause::not_permitted, "connect");
  }
  return socket;
}

Descriptor own_process() {
  Descriptor process(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!process) refuse_socket(Cause::not_permitted, "pidfd_open (Linux 5.3 or newer is needed)");
  return process;
}

Peer peer_of(const Descriptor& socket) {
  ucred who{};
  socklen_t length = sizeof who;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
    refuse_socket(Cause::not_permitted, "SO_PEERCRED");
  int pidfd = -1;
  length = sizeof pidfd;
  // Newer kernels return the process itself; older ones its number, which may have been reused.
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) != 0)
    pidfd = static_cast<int>(::syscall(SYS_pidfd_open, who.pid, 0));
  if (pidfd < 0) refuse_socket(Cause::not_permitted, "pidfd_open (Linux 5.3 or newer is needed)");
  return {Descriptor(pidfd), who.uid};
}

void send_text(const Descriptor& socket, const std::string& text,
               const std::vector<int>& descriptors, Deadline deadline) {
  const std::uint32_t head[2] = {static_cast<std::uint32_t>(text.size()),
                                 static_cast<std::uint32_t>(descriptors.size())};
  iovec part{const_cast<std::uint32_t*>(head), sizeof head};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control;
  if (!descriptors.empty()) {
    control.resize(CMSG_SPACE(descriptors.size() * sizeof(int)));
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), descriptors.data(), descriptors.size() * sizeof(int));
  }
  ssize_t n = 0;
  do {
    wait_for(socket, POLLOUT, deadline, "another rank did not read");
    n = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (n < 0 && (errno == EINTR || errno == EAGAIN));
  if (n < 0) refuse_socket(Cause::absent, "another rank went away while the group was made");
  // Descriptors are sent with the first byte.
  const auto sent = static_cast<std::size_t>(n);
  write_all(socket, reinterpret_cast<const char*>(head) + sent, sizeof head - sent, deadline);
  write_all(socket, text.data(), text.size(), deadline);
}

std::string receive_text(const Descriptor& socket, std::vector<Descriptor>* descriptors,
                         Deadline deadline) {
  std::uint32_t head[2] = {};
  iovec part{head, sizeof head};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(253 * sizeof(int)));
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t n = 0;
  do {
    wait_for(socket, POLLIN, deadline, "another rank did not answer");
    n = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && (errno == EINTR || errno == EAGAIN));
  if (n <= 0)
    throw SetupError(Cause::absent, "shm: another rank went away while the group was made");
  std::vector<Descriptor> got;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      got.emplace_back(fd);
    }
  }
  const auto received = static_cast<std::size_t>(n);
  read_all(socket, reinterpret_cast<char*>(head) + received, sizeof head - received, deadline);
  if (head[0] > kMostText)
    throw SetupError(Cause::disagreement,
                     "shm: what came over the local socket is no message of this library");
  std::string text(head[0], '\0');
  read_all(socket, text.data(), text.size(), deadline);
  if (got.size() != head[1])
    throw SetupError(Cause::not_permitted,
                     concat("shm: ", got.size(), " of ", head[1],
                            " descriptors came: this process may open no more (ulimit -n)"));
  if (descriptors != nullptr) *descriptors = std::move(got);
  return text;
}

}  // namespace tessera::shm::detail
