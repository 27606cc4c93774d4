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
#include "tessera/shm/detail/layout.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace tessera::shm::detail {
namespace {

/// The kernel takes 253 in one message.
constexpr std::size_t kMostDescriptors = 250;

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

/// Before what failed for lack of room is tried again.
void pause_briefly() { ::poll(nullptr, 0, 1); }

/// Writes all bytes, the descriptors with the first of them, or throws.
void write_all(const Descriptor& socket, const void* data, std::size_t bytes, const int* fds,
               std::size_t count, Deadline deadline) {
  const auto* at = static_cast<const char*>(data);
  std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
  while (bytes > 0) {
    wait_for(socket, POLLOUT, deadline, "another rank did not read");
    iovec part{const_cast<char*>(at), bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (count > 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(c), fds, count * sizeof(int));
    }
    const ssize_t n = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    // A user may have as many descriptors on the way as one process may open.
    if (n < 0 && errno == ETOOMANYREFS) {
      if (time_left(deadline).count() == 0)
        refuse_socket(Cause::not_permitted,
                      "sending descriptors of memory and processes (raise ulimit -n)");
      pause_briefly();
      continue;
    }
    if (n <= 0) refuse_socket(Cause::absent, "another rank went away while the group was made");
    at += n;
    bytes -= static_cast<std::size_t>(n);
    count = 0;
  }
}

void append_descriptors(msghdr& message, std::vector<Descriptor>& got) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      got.emplace_back(fd);
    }
  }
}

/// Reads all bytes; without `got` the kernel drops the descriptors that come with them.
void read_all(const Descriptor& socket, void* data, std::size_t bytes, std::vector<Descriptor>* got,
              Deadline deadline) {
  auto* at = static_cast<char*>(data);
  std::vector<char> control(got != nullptr ? CMSG_SPACE(kMostDescriptors * sizeof(int)) : 0);
  while (bytes > 0) {
    wait_for(socket, POLLIN, deadline, "another rank did not answer");
    iovec part{at, bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.empty() ? nullptr : control.data();
    message.msg_controllen = control.size();
    const ssize_t n = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0)
      throw SetupError(Cause::absent, "shm: another rank went away while the group was made");
    if (got != nullptr) append_descriptors(message, *got);
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

/// The process that made the other end, as reported by the kernel.
ucred peer_of(const Descriptor& socket) {
  ucred who{};
  socklen_t length = sizeof who;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
    refuse_socket(Cause::not_permitted, "SO_PEERCRED");
  return who;
}

Descriptor open_process(pid_t process) {
  Descriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  if (!pidfd) refuse_socket(Cause::not_permitted, "pidfd_open (Linux 5.3 or newer is needed)");
  return pidfd;
}

}  // namespace

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  if (::getentropy(bytes.data(), count) != 0) refuse_socket(Cause::not_permitted, "getrandom");
  return bytes;
}

Listener listen_locally() {
  Listener listener{Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
                    "tessera-" + random_bytes(16)};
  if (!listener.socket) refuse_socket(Cause::not_permitted, "a local socket");
  const auto [address, length] = address_of(listener.name);
  if (::bind(listener.socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    refuse_socket(Cause::not_permitted, "bind");
  if (::listen(listener.socket.get(), SOMAXCONN) != 0)
    refuse_socket(Cause::not_permitted, "listen");
  return listener;
}

Descriptor accept_from(const Descriptor& listener) {
  for (;;) {
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket || errno == EAGAIN) return socket;
    if (errno != EINTR && errno != ECONNABORTED) refuse_socket(Cause::not_permitted, "accept");
  }
}

Descriptor connect_to(const std::string& name, Deadline deadline) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) refuse_socket(Cause::not_permitted, "a local socket");
  const auto [address, length] = address_of(name);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == ECONNREFUSED)
      throw SetupError(Cause::other_host,
                       "shm: nobody listens where rank 0 said: it is on another host, in a network "
                       "namespace of its own, or has ended");
    if (errno != EINTR && errno != EAGAIN) refuse_socket(Cause::not_permitted, "connect");
    if (time_left(deadline).count() == 0)
      throw SetupError(Cause::absent, "shm: rank 0 did not let this rank in within the time limit");
    // Local sockets have no other way to wait for a place in the queue without blocking.
    pause_briefly();
  }
  return socket;
}

uid_t user_of(const Descriptor& socket) { return peer_of(socket).uid; }

Descriptor process_of(const Descriptor& socket) {
  int pidfd = -1;
  socklen_t length = sizeof pidfd;
  // Newer kernels return the process itself; older ones its number, which may have been reused.
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) != 0)
    return open_process(peer_of(socket).pid);
  return Descriptor(pidfd);
}

Descriptor own_process() { return open_process(::getpid()); }

void send_text(const Descriptor& socket, const std::string& text,
               const std::vector<int>& descriptors, Deadline deadline) {
  const TextHead head{static_cast<std::uint32_t>(text.size()),
                      static_cast<std::uint32_t>(descriptors.size())};
  const auto part = [&](std::size_t at) {
    return std::min(descriptors.size() - at, kMostDescriptors);
  };
  write_all(socket, head.data(), sizeof head, descriptors.data(), part(0), deadline);
  // Further ones travel with a byte each time.
  for (std::size_t at = kMostDescriptors; at < descriptors.size(); at += kMostDescriptors)
    write_all(socket, "+", 1, descriptors.data() + at, part(at), deadline);
  write_all(socket, text.data(), text.size(), nullptr, 0, deadline);
}

std::string receive_text(const Descriptor& socket, std::vector<Descriptor>* descriptors,
                         Deadline deadline) {
  TextHead head{};
  std::vector<Descriptor> got;
  auto* wanted = descriptors != nullptr ? &got : nullptr;
  read_all(socket, head.data(), sizeof head, wanted, deadline);
  if (head[0] > kMostText || head[1] > (descriptors != nullptr ? kMaxRanks + 1U : 0U))
    throw SetupError(Cause::disagreement,
                     "shm: what came over the local socket is no message of this library");
  char more = 0;
  for (std::size_t at = kMostDescriptors; at < head[1]; at += kMostDescriptors)
    read_all(socket, &more, 1, wanted, deadline);
  std::string text(head[0], '\0');
  read_all(socket, text.data(), text.size(), nullptr, deadline);
  if (got.size() != head[1])
    throw SetupError(Cause::not_permitted,
                     concat("shm: ", got.size(), " of ", head[1],
                            " descriptors came: this process may open no more (ulimit -n)"));
  if (descriptors != nullptr) *descriptors = std::move(got);
  return text;
}

}  // namespace tessera::shm::detail
