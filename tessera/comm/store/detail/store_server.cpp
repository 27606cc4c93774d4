#include "tessera/comm/store/detail/store_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/store/store.h"

namespace tessera::detail {
namespace {

// A rank answers the challenge at once. One on a busy host may need longer: it tries again.
constexpr std::chrono::seconds kStrangerLimit{5};
constexpr std::chrono::seconds kTellAfter{5};
// If there are too many of them, those go first that have had this long.
constexpr std::chrono::seconds kYoung{1};
constexpr std::size_t kMostStrangers = 256, kFewestStrangers = 16;
// Rank 0 needs descriptors of its own: groups, files of its loader.
constexpr std::size_t kSpareDescriptors = 256;
constexpr int kAcceptsATurn = 64;
constexpr std::chrono::milliseconds kRest{100};

[[noreturn]] void throw_no_room(const char* what, int reason) {
  throw RendezvousError(
      concat("rank 0 cannot serve the job's store: the system ", what, ": ", std::strerror(reason),
             "; raise the limits of its host (ulimit -n, ulimit -u), or use less there"),
      {0});
}

}  // namespace

StoreServer::StoreServer(Socket listener, int world_size, std::string job, Secret secret)
    : listener_(std::move(listener)),
      port_(local_port(listener_)),
      world_size_(world_size),
      job_(job.substr(0, longest_name)),
      secret_(std::move(secret)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      fd_of_rank_(static_cast<std::size_t>(world_size), -1),
      left_(static_cast<std::size_t>(world_size), false) {
  if (secret_.name.empty())
    throw InvalidArgument("the job's store was given a secret without a name");
  if (!epoll_ || !wake_) throw_no_room("has no file descriptors for it", errno);
  broken_.reserve(4096);  // so that a connection can be dropped when memory has run out
  const auto world = static_cast<std::size_t>(world_size), open = open_descriptors();
  const std::size_t limit = allow_descriptors(open + world + kMostStrangers + kSpareDescriptors);
  most_strangers_ = std::clamp(limit / 8, kFewestStrangers, kMostStrangers);
  if (limit < open + world)
    failure_ = concat("rank 0 serves ", world, " ranks and needs a file descriptor for each, but ",
                      open, " are open and the limit is ", limit,
                      "; raise it on the host of rank 0 (ulimit -n, or LimitNOFILE of a service)");
  // accept_some() must end when no connection is waiting
  ::fcntl(listener_.fd(), F_SETFL, ::fcntl(listener_.fd(), F_GETFL, 0) | O_NONBLOCK);
  for (const int fd : {listener_.fd(), wake_.fd()})
    if (!watch(EPOLL_CTL_ADD, fd, EPOLLIN)) throw_no_room("cannot watch its sockets", errno);
  tell_ = deadline_after(kTellAfter);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw_no_room("starts no thread for it", error.code().value());
  }
}

StoreServer::~StoreServer() {
  stop_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
  thread_.join();
}

void StoreServer::run() {
  for (;;) {
    try {
      if (!turn()) return;
    } catch (const std::exception&) {
      // Memory ran out, or a frame was invalid: the connection whose event it was is dropped, the
      // store stays.
      if (handled_ >= 0) broken_.push_back(std::exchange(handled_, -1));
    }
  }
}

bool StoreServer::turn() {
  drop_broken();
  if (stop_ && end_ == Deadline::max()) end_ = deadline_after(linger_.load());
  if (stop_) {
    const bool unsent =
        std::ranges::any_of(clients_, [](const auto& c) { return !c.second->out.empty(); });
    const bool present = complete_ && gone_ < world_size_;
    if (Clock::now() >= end_ || (!present && !unsent)) return false;
  }
  Deadline next = std::min({end_, deadline_, listen_again_, tell_});
  if (!strangers_.empty())
    next = std::min(next, clients_.at(strangers_.begin()->second)->since + kStrangerLimit);
  epoll_event events[64];
  const int n =
      epoll_wait(epoll_.fd(), events, 64, next == Deadline::max() ? -1 : poll_milliseconds(next));
  for (int i = 0; i < n; ++i) {
    handled_ = events[i].data.fd;
    handle(handled_, events[i].events);
    handled_ = -1;
    drop_broken();
  }
  watch_strangers();
  check_deadline();
  tell_missing();
  return true;
}

void StoreServer::handle(int fd, std::uint32_t events) {
  if (fd == wake_.fd()) {
    std::uint64_t count;
    [[maybe_unused]] const auto got = ::read(fd, &count, sizeof count);
  } else if (fd == listener_.fd()) {
    accept_some();
  } else if (const auto at = clients_.find(fd); at != clients_.end()) {
    if (events & EPOLLOUT) write(*at->second);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read(*at->second);
  }
}

void StoreServer::drop_broken() {
  while (!broken_.empty()) {
    const int gone = broken_.back();
    broken_.pop_back();
    drop(gone);
  }
}

// Where many ranks die at once, each is lost to all others: what nobody will read is not kept, or a
// job of ten thousand that is killed costs rank 0 gigabytes.
void StoreServer::give_up(Client& client) {
  client.broken = true;
  std::string().swap(client.out);
  broken_.push_back(client.socket.fd());
}

void StoreServer::accept_some() {
  for (int i = 0; i < kAcceptsATurn; ++i) {
    if (strangers_.size() >= most_strangers_) {
      watch_strangers();
      drop_broken();
      if (strangers_.size() >= most_strangers_) return listen_for_more(false);
    }
    Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
      // The connection stays in the queue, and would be reported again at once, for ever.
      no_descriptors_ = resting_ = true;
      if (!strangers_.empty()) broken_.push_back(strangers_.begin()->second);
      return listen_for_more(false);
    }
    if (!socket) return;
    const int on = 1;
    setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    keep_alive(socket);
    auto client = std::make_unique<Client>();
    const int fd = socket.fd();
    client->socket = std::move(socket);
    client->number = ++connections_;
    client->since = Clock::now();
    client->nonce = new_secret();
    client->out = store_magic;
    client->out += Writer(Frame::challenge)
                       .number(static_cast<std::uint8_t>(complete_))
                       .text(secret_.name)
                       .text(client->nonce)
                       .take();
    if (!watch(EPOLL_CTL_ADD, fd, EPOLLIN)) continue;
    auto& held = *(clients_[fd] = std::move(client));
    strangers_[held.number] = fd;
    write(held);
  }
}

bool StoreServer::watch(int operation, int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  return epoll_ctl(epoll_.fd(), operation, fd, &event) == 0;
}

void StoreServer::listen_for_more(bool on) {
  watch(EPOLL_CTL_MOD, listener_.fd(), on ? std::uint32_t{EPOLLIN} : 0u);
  listening_ = on;
  if (on) resting_ = false;
  listen_again_ = on ? Deadline::max() : deadline_after(kRest);
}

void StoreServer::watch_strangers() {
  const auto now = Clock::now();
  const bool full = strangers_.size() >= most_strangers_;
  for (const auto& [number, fd] : strangers_) {
    const auto age = now - clients_.at(fd)->since;
    if (age < kYoung || (age < kStrangerLimit && !full)) break;
    broken_.push_back(fd);
    if (age < kStrangerLimit) break;  // one place is enough
  }
  // As soon as half of them have been admitted or dropped; without descriptors after a pause.
  const bool room = !resting_ && strangers_.size() <= most_strangers_ / 2;
  if (!listening_ && (room || now >= listen_again_)) listen_for_more(true);
}

void StoreServer::read(Client& client) {
  // One block per turn, so that a connection that sends much does not delay the others.
  char part[65536];
  const bool stranger = client.rank < 0;
  const std::size_t room = stranger ? largest_stranger : sizeof part;
  ssize_t n;
  do n = ::recv(client.socket.fd(), part, room, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (n <= 0 || (stranger && client.in.size() + static_cast<std::size_t>(n) > largest_stranger))
    return give_up(client);
  client.in.append(part, static_cast<std::size_t>(n));
  if (!client.greeted) {
    const auto size = std::min(client.in.size(), store_magic.size());
    // not this protocol: a browser, a port scan
    if (std::string_view(client.in).substr(0, size) != store_magic.substr(0, size))
      return give_up(client);
    if (size < store_magic.size()) return;
    client.in.erase(0, size);
    client.greeted = true;
  }
  std::size_t used = 0;
  while (!client.closing) {
    std::uint32_t size;
    if (client.in.size() - used < sizeof size) break;
    std::memcpy(&size, client.in.data() + used, sizeof size);
    if (size > (client.rank < 0 ? largest_stranger : largest_frame)) return give_up(client);
    if (client.in.size() - used - sizeof size < size) break;
    Reader in(std::string_view(client.in).substr(used + sizeof size, size));
    serve(client, in);
    used += sizeof size + size;
  }
  client.in.erase(0, used);
}

void StoreServer::write(Client& client) {
  std::size_t sent = 0;
  bool failed = false;
  while (sent < client.out.size()) {
    const ssize_t n = ::send(client.socket.fd(), client.out.data() + sent, client.out.size() - sent,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += static_cast<std::size_t>(n);
    } else if (n < 0 && errno != EINTR) {
      failed = errno != EAGAIN && errno != EWOULDBLOCK;
      break;
    }
  }
  client.out.erase(0, sent);
  if (failed || (client.closing && client.out.empty())) return give_up(client);
  watch(EPOLL_CTL_MOD, client.socket.fd(), client.out.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void StoreServer::send(Client& client, std::string frame) {
  if (client.broken) return;
  const bool idle = client.out.empty();
  client.out += frame;
  if (idle) write(client);
}

void StoreServer::send_to_all(const std::string& frame) {
  for (int rank = 0; rank < world_size_; ++rank)
    if (Client* client = of_rank(rank)) send(*client, frame);
}

StoreServer::Client* StoreServer::of_rank(int rank) {
  if (rank < 0 || rank >= world_size_ || fd_of_rank_[rank] < 0) return nullptr;
  const auto at = clients_.find(fd_of_rank_[rank]);
  return at == clients_.end() ? nullptr : at->second.get();
}

void StoreServer::drop(int fd) {
  const auto at = clients_.find(fd);
  if (at == clients_.end()) return;
  const int rank = at->second->rank;
  const std::string who = at->second->who;
  strangers_.erase(at->second->number);
  clients_.erase(at);  // closes the socket, which also removes it from the epoll set
  stop_waiting(fd, nullptr);
  if (rank < 0 || fd_of_rank_[rank] != fd) return;
  fd_of_rank_[rank] = -1;
  --here_;
  if (complete_) {
    ++gone_;
    return tell_lost(rank, who);
  }
  if (failure_.empty())
    fail_meeting(concat("rank ", rank, " (", who, ") ended while the ranks were meeting"), {rank});
}

}  // namespace tessera::detail
