#include "tessera/comm/store/detail/socket.h"
#include "tessera/base/pinned.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/store/store.h"

namespace tessera::detail {
namespace {

std::string numeric(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "?";
  return text;
}

/// The numeric address and the port of an end of a connection: this one's by getsockname(), the
/// other one's by getpeername(); "?" if it is gone.
std::pair<std::string, int> end_of(const Socket& socket, int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (ask(socket.fd(), any, &size) != 0) return {"?", 0};
  return {numeric(any, size),
          ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(any)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(any)->sin_port)};
}

// Which descriptors a forked child must not keep. One object per process, as the table of
// descriptors and the handlers of fork() are.
class KeptFromChildren {
 public:
  static KeptFromChildren& get() {
    // never destroyed: sockets may outlive every other object
    static KeptFromChildren* const all = new KeptFromChildren;
    return *all;
  }
  void add(int fd) {
    const std::lock_guard lock(mutex_);
    descriptors_.insert(fd);
  }
  void remove(int fd) {
    const std::lock_guard lock(mutex_);
    descriptors_.erase(fd);
  }

 private:
  KeptFromChildren() { pthread_atfork(before, after_in_parent, after_in_child); }
  static void before() { get().mutex_.lock(); }
  static void after_in_parent() { get().mutex_.unlock(); }
  // Calls only functions that a child of a process with several threads may call.
  static void after_in_child() {
    auto& all = get();
    // The number stays in use: an object of the parent that ends in the child must not close or
    // write to a file that the child opened.
    const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : all.descriptors_)
      if (nothing < 0)
        ::close(fd);
      else
        ::dup3(nothing, fd, O_CLOEXEC);
    if (nothing >= 0) ::close(nothing);
    all.mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> descriptors_;
};

struct Addresses : Pinned {
  addrinfo* first = nullptr;
  ~Addresses() {
    if (first) freeaddrinfo(first);
  }
};

/// Asks the name service unless `host` is a numeric address. Returns an empty text on success.
std::string look_up(const std::string& host, int port, int flags, Addresses& out) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int failed = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &out.first);
  return failed == 0 ? "" : gai_strerror(failed);
}

bool is_numeric(const std::string& host) {
  unsigned char bytes[sizeof(in6_addr)];
  if (inet_pton(AF_INET, host.c_str(), bytes) == 1) return true;
  if (inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), bytes) == 1) return true;
  in_addr old_spelling{};  // "127.1"
  return inet_aton(host.c_str(), &old_spelling) != 0;
}

/// As look_up(), with a limit, which getaddrinfo() does not have: it runs in a thread that is left
/// behind if the name service does not answer in time.
std::string look_up_within(const std::string& host, Deadline deadline,
                           std::vector<std::string>& addresses) {
  using Answer = std::pair<std::string, std::vector<std::string>>;
  std::packaged_task<Answer(int)> ask([host](int flags) {
    Addresses found;
    Answer answer{look_up(host, 0, flags, found), {}};
    for (const addrinfo* a = found.first; a; a = a->ai_next)
      answer.second.push_back(numeric(a->ai_addr, a->ai_addrlen));
    return answer;
  });
  auto answer = ask.get_future();
  try {
    if (is_numeric(host))
      ask(AI_NUMERICHOST);
    else
      std::thread(std::move(ask), 0).detach();
  } catch (const std::system_error&) {
    return "the system has no thread left to ask the name service in";
  }
  if (answer.wait_until(deadline) != std::future_status::ready)
    return "the name service does not answer";
  try {
    std::string failed;
    std::tie(failed, addresses) = answer.get();
    return failed;
  } catch (const std::exception& error) {
    return error.what();
  }
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
    do ready = ::poll(&waiting, 1, poll_milliseconds(deadline));
    while (ready < 0 && errno == EINTR);
    if (ready == 0) return ETIMEDOUT;
    int failed = 0;
    socklen_t size = sizeof failed;
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &failed, &size);
    if (failed) return failed;
  }
  const int on = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  keep_alive(socket);
  // A rank that connects to a free local port may connect to itself (simultaneous open).
  if (end_of(socket, getsockname) == end_of(socket, getpeername)) return ECONNREFUSED;
  out = std::move(socket);
  return 0;
}

}  // namespace

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ >= 0) KeptFromChildren::get().add(fd_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Socket::close() {
  if (fd_ < 0) return;
  KeptFromChildren::get().remove(fd_);
  ::close(std::exchange(fd_, -1));
}

bool is_loopback_address(const std::string& numeric_address) {
  return numeric_address.rfind("127.", 0) == 0 || numeric_address == "::1";
}

bool is_any_address(const std::string& host) {
  in_addr old{};
  if (inet_aton(host.c_str(), &old) != 0) return old.s_addr == htonl(INADDR_ANY);
  in6_addr six{};
  if (inet_pton(AF_INET6, host.c_str(), &six) != 1) return false;
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&six) &&
                      std::all_of(six.s6_addr + 12, six.s6_addr + 16, [](auto b) { return !b; });
  return mapped || IN6_IS_ADDR_UNSPECIFIED(&six);
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

std::vector<std::string> targets(const std::string& host, bool other_hosts, Deadline deadline,
                                 std::string& reason) {
  std::vector<std::string> addresses;
  const std::string failed = look_up_within(host, deadline, addresses);
  if (!failed.empty())
    reason = concat("the name '", printable(host), "' cannot be resolved: ", failed);
  if (std::ranges::any_of(addresses, is_any_address)) {
    std::erase_if(addresses, is_any_address);
    if (addresses.empty()) reason = concat("'", printable(host), "' is no address of one host");
  }
  if (!other_hosts || std::ranges::none_of(addresses, is_loopback_address)) return addresses;
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

std::size_t open_descriptors() {
  DIR* entries = ::opendir("/proc/self/fd");
  if (!entries) return 0;
  std::size_t n = 0;
  while (::readdir(entries)) ++n;
  ::closedir(entries);
  return n > 3 ? n - 3 : 0;  // ".", "..", and the folder itself
}

std::size_t allow_descriptors(std::size_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  if (limit.rlim_cur < wanted && limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = std::min<rlim_t>(wanted, limit.rlim_max);
    if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<std::size_t>(std::min<rlim_t>(limit.rlim_cur, SIZE_MAX));
}

void keep_alive(const Socket& socket) {
  constexpr int on = 1, quiet_s = 30, between_s = 10, probes = 12;
  constexpr unsigned gone_ms = 150'000;
  setsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPIDLE, &quiet_s, sizeof quiet_s);
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &gone_ms, sizeof gone_ms);
}

std::string printable(std::string_view bytes, std::size_t limit) {
  std::string out;
  for (const char c : bytes.substr(0, limit)) out += (c >= 32 && c < 127) ? c : '.';
  if (bytes.size() > limit) out += "...";
  return out;
}

int local_port(const Socket& socket) { return end_of(socket, getsockname).second; }

std::string local_address(const Socket& socket) { return end_of(socket, getsockname).first; }

std::string peer_address(const Socket& socket) { return end_of(socket, getpeername).first; }

std::string peer_name(const Socket& socket) {
  const auto [address, port] = end_of(socket, getpeername);
  return address == "?" ? address : concat(address, ":", std::to_string(port));
}

Socket connect_to(const std::string& host, int port, bool other_hosts, Deadline deadline) {
  const auto limit = time_left(deadline);  // what is said is what was given, however late we wake
  std::string reason = "the time limit had passed at the start";
  auto pause = std::chrono::milliseconds(5);
  do {
    const auto addresses = targets(host, other_hosts, deadline, reason);
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      Addresses found;
      if (!look_up(addresses[i], port, AI_NUMERICHOST, found).empty()) continue;
      Socket socket;
      // An address that drops packets must not use up the time of the next one.
      const Deadline share =
          i + 1 < addresses.size() ? deadline_after(time_left(deadline) / 2) : deadline;
      const int failed = connect_once(*found.first, share, socket);
      if (!failed) return socket;
      reason = concat(addresses[i], ": ", std::strerror(failed));
    }
    std::this_thread::sleep_for(std::min(pause, time_left(deadline)));
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  } while (Clock::now() < deadline);
  throw RendezvousError(
      concat("the job's store on ", host, ":", port, " could not be reached within ", limit.count(),
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
    if (::poll(&waiting, 1, poll_milliseconds(deadline)) == 0 && Clock::now() >= deadline)
      return Transfer::late;
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
    if (::poll(&waiting, 1, poll_milliseconds(deadline)) == 0 && Clock::now() >= deadline)
      return Transfer::late;
  }
  return Transfer::done;
}

}  // namespace tessera::detail
