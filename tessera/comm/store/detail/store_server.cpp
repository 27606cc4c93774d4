#include "tessera/comm/store/detail/store_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

std::vector<std::string> texts(Reader& in) {
  std::vector<std::string> all;
  for (auto n = in.number<std::uint32_t>(); n > 0; --n) all.emplace_back(in.text());
  return all;
}

}  // namespace

StoreServer::StoreServer(Socket listener, int world_size, std::string job)
    : listener_(std::move(listener)),
      port_(local_port(listener_)),
      world_size_(world_size),
      job_(std::move(job)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      fd_of_rank_(static_cast<std::size_t>(world_size), -1),
      left_(static_cast<std::size_t>(world_size), false) {
  // accept_all() ends when nobody waits
  ::fcntl(listener_.fd(), F_SETFL, ::fcntl(listener_.fd(), F_GETFL, 0) | O_NONBLOCK);
  for (const int fd : {listener_.fd(), wake_.fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event);
  }
  thread_ = std::thread([this] { run(); });
}

StoreServer::~StoreServer() {
  stop_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
  thread_.join();
}

void StoreServer::run() {
  Deadline end = Deadline::max();
  epoll_event events[64];
  for (;;) {
    if (stop_ && end == Deadline::max()) end = Clock::now() + linger_.load();
    if (stop_) {
      const bool unsent = std::any_of(clients_.begin(), clients_.end(),
                                      [](const auto& c) { return !c.second->out.empty(); });
      const bool present = complete_ && gone_ < world_size_;
      if (Clock::now() >= end || (!present && !unsent)) return;
    }
    const Deadline next = std::min(end, deadline_);
    const int n =
        epoll_wait(epoll_.fd(), events, 64, next == Deadline::max() ? -1 : remaining_ms(next));
    for (int i = 0; i < n; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.fd()) {
        std::uint64_t count;
        [[maybe_unused]] const auto got = ::read(fd, &count, sizeof count);
      } else if (fd == listener_.fd()) {
        accept_all();
      } else if (const auto at = clients_.find(fd); at != clients_.end()) {
        if (events[i].events & EPOLLOUT) write(*at->second);
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read(*at->second);
      }
      while (!broken_.empty()) {
        const int gone = broken_.back();
        broken_.pop_back();
        drop(gone);
      }
    }
    check_deadline();
    for (; !broken_.empty(); broken_.pop_back()) drop(broken_.back());
  }
}

void StoreServer::accept_all() {
  for (;;) {
    Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = socket.fd();
    epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, socket.fd(), &event);
    auto client = std::make_unique<Client>();
    const int fd = socket.fd();
    client->socket = std::move(socket);
    auto& held = *(clients_[fd] = std::move(client));
    held.out = store_magic;
    write(held);
  }
}

void StoreServer::read(Client& client) {
  char part[65536];
  for (;;) {
    const ssize_t n = ::recv(client.socket.fd(), part, sizeof part, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n <= 0) {
      broken_.push_back(client.socket.fd());
      break;
    }
    client.in.append(part, static_cast<std::size_t>(n));
    if (static_cast<std::size_t>(n) < sizeof part) break;
  }
  if (!client.greeted) {
    const auto n = std::min(client.in.size(), store_magic.size());
    // not one of ours: a browser, a port scan
    if (std::string_view(client.in).substr(0, n) != store_magic.substr(0, n)) {
      broken_.push_back(client.socket.fd());
      return;
    }
    if (n < store_magic.size()) return;
    client.in.erase(0, n);
    client.greeted = true;
  }
  std::size_t used = 0;
  while (!client.closing) {
    std::uint32_t size;
    if (client.in.size() - used < sizeof size) break;
    std::memcpy(&size, client.in.data() + used, sizeof size);
    if (size > largest_frame) {
      broken_.push_back(client.socket.fd());
      return;
    }
    if (client.in.size() - used - sizeof size < size) break;
    try {
      Reader in(std::string_view(client.in).substr(used + sizeof size, size));
      serve(client, in);
    } catch (const std::out_of_range&) {
      broken_.push_back(client.socket.fd());
      return;
    }
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
  if (failed || (client.closing && client.out.empty())) {
    broken_.push_back(client.socket.fd());
    return;
  }
  epoll_event event{};
  event.events = client.out.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  event.data.fd = client.socket.fd();
  epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, client.socket.fd(), &event);
}

void StoreServer::send(Client& client, std::string frame) {
  const bool idle = client.out.empty();
  client.out += frame;
  if (idle) write(client);
}

void StoreServer::send_to_all(const std::string& frame, int except_rank) {
  for (int rank = 0; rank < world_size_; ++rank)
    if (Client* client = rank == except_rank ? nullptr : of_rank(rank)) send(*client, frame);
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
  clients_.erase(at);  // closes the socket, which also takes it out of the epoll set
  for (auto& [key, waiters] : waiting_)
    std::erase_if(waiters, [fd](const auto& w) { return w->fd == fd; });
  if (rank < 0 || fd_of_rank_[rank] != fd) return;
  fd_of_rank_[rank] = -1;
  --here_;
  if (!complete_) {
    if (failure_.empty())
      fail_meeting(concat("rank ", rank, " (", who, ") ended while the ranks were meeting"),
                   {rank});
    return;
  }
  ++gone_;
  const auto text = left_[rank] ? concat("rank ", rank, " (", who, ") has left the job")
                                : concat("rank ", rank, " (", who,
                                         ") ended without a goodbye (killed, crashed, or cut off)");
  send_to_all(Writer(Frame::lost)
                  .number(std::int32_t{rank})
                  .number(static_cast<std::uint8_t>(left_[rank]))
                  .text(text)
                  .take());
  // Whoever asked about its position need not wait for it.
  for (const auto& [number, asker] : questions_)
    if (const auto client = clients_.find(asker.first); client != clients_.end())
      send(*client->second, Writer(Frame::answer, asker.second)
                                .number(std::int32_t{rank})
                                .number(std::uint8_t{0})
                                .number(std::uint64_t{0})
                                .text("")
                                .take());
}

void StoreServer::refuse(Client& client, const std::string& text, const std::vector<int>& ranks) {
  client.closing = true;
  send(client, Writer(Frame::refused).text(text).numbers(ranks).take());
}

void StoreServer::fail_meeting(const std::string& text, const std::vector<int>& ranks) {
  failure_ = text;
  failure_ranks_ = ranks;
  deadline_ = Deadline::max();
  for (int rank = 0; rank < world_size_; ++rank)
    if (Client* client = of_rank(rank)) refuse(*client, text, ranks);
}

void StoreServer::check_deadline() {
  if (complete_ || !failure_.empty() || Clock::now() < deadline_) return;
  std::vector<int> missing;
  for (int rank = 0; rank < world_size_; ++rank)
    if (fd_of_rank_[rank] < 0) missing.push_back(rank);
  fail_meeting(concat(missing.size() == 1 ? "rank " : "ranks ",
                      missing.size() == 1 ? std::to_string(missing[0]) : list(missing), " of ",
                      world_size_, " did not come to the rendezvous within ", shortest_.count(),
                      " ms; check that all of them were started, with this address and port"),
               missing);
}

void StoreServer::greet(Client& client, Reader& in) {
  const auto rank = in.number<std::int32_t>();
  const auto world = in.number<std::int32_t>();
  const std::chrono::milliseconds limit(in.number<std::int64_t>());
  client.who = in.text();
  const auto job = in.text();
  if (job != job_)
    return refuse(client, concat("this store serves the job '", job_, "', and rank ", rank,
                                 " belongs to '", job, "'; give each job a port of its own"));
  if (!failure_.empty()) return refuse(client, failure_, failure_ranks_);
  if (world != world_size_) {
    const auto text =
        concat("rank ", rank, " (", client.who, ") says that the world size is ", world,
               ", rank 0 says ", world_size_, "; start all ranks with the same number");
    refuse(client, text, {rank});
    if (!complete_) fail_meeting(text, {rank});
    return;
  }
  if (rank < 0 || rank >= world_size_)
    return refuse(client, concat("rank ", rank, " is not in a world of ", world_size_), {rank});
  // its goodbye may stand in a queue of its own
  if (Client* before = complete_ ? of_rank(rank) : nullptr) read(*before);
  // a later meeting of the same job, and this store is about to end
  if (complete_ && left_[rank]) {
    client.closing = true;
    return send(client, Writer(Frame::retry).take());
  }
  if (complete_ || fd_of_rank_[rank] >= 0) {
    const Client* first = of_rank(rank);
    const auto text = concat("two processes say that they are rank ", rank, ": ",
                             first ? first->who : "one that has ended", ", and ", client.who,
                             "; give each process its own rank");
    refuse(client, text, {rank});
    if (!complete_) fail_meeting(text, {rank});
    return;
  }
  client.rank = rank;
  fd_of_rank_[rank] = client.socket.fd();
  if (Clock::now() + limit < deadline_) {
    deadline_ = Clock::now() + limit;
    shortest_ = limit;
  }
  if (++here_ == world_size_) {
    complete_ = true;
    deadline_ = Deadline::max();
    send_to_all(Writer(Frame::ready).take());
  }
}

bool StoreServer::settle(Waiter& waiter) {
  while (waiter.known < waiter.keys.size() && values_.count(waiter.keys[waiter.known]))
    ++waiter.known;
  return waiter.known == waiter.keys.size();
}

void StoreServer::answer_waiter(const Waiter& waiter) {
  const auto at = clients_.find(waiter.fd);
  if (at == clients_.end()) return;
  Writer out(Frame::reply, waiter.call);
  if (waiter.values)
    for (const auto& key : waiter.keys) out.text(values_[key]);
  send(*at->second, out.take());
}

void StoreServer::stored(const std::string& key) {
  const auto at = waiting_.find(key);
  if (at == waiting_.end()) return;
  const auto waiters = std::move(at->second);
  waiting_.erase(at);
  for (const auto& waiter : waiters) {
    if (settle(*waiter))
      answer_waiter(*waiter);
    else
      waiting_[waiter->keys[waiter->known]].push_back(waiter);
  }
}

void StoreServer::serve(Client& client, Reader& in) {
  if (client.rank < 0 && in.kind != Frame::hello)
    throw std::out_of_range("a call before the hello");
  Writer reply(Frame::reply, in.call);
  switch (in.kind) {
    case Frame::hello:
      if (client.rank >= 0) throw std::out_of_range("a second hello");
      return greet(client, in);
    case Frame::set: {
      std::vector<std::string> keys;
      for (auto n = in.number<std::uint32_t>(); n > 0; --n) {
        keys.emplace_back(in.text());
        values_[keys.back()] = in.text();
      }
      send(client, reply.take());
      for (const auto& key : keys) stored(key);
      return;
    }
    case Frame::get:
    case Frame::wait: {
      auto waiter = std::make_shared<Waiter>(
          Waiter{client.socket.fd(), in.call, in.kind == Frame::get, texts(in), 0});
      if (settle(*waiter))
        answer_waiter(*waiter);
      else
        waiting_[waiter->keys[waiter->known]].push_back(waiter);
      return;
    }
    case Frame::add: {
      const std::string key(in.text());
      auto& value = values_[key];
      std::int64_t sum = in.number<std::int64_t>();
      if (!value.empty()) sum += std::strtoll(value.c_str(), nullptr, 10);
      value = std::to_string(sum);
      send(client, reply.number(sum).take());
      return stored(key);
    }
    case Frame::compare: {  // as c10d::Store::compareSet
      const std::string key(in.text());
      const std::string expected(in.text()), desired(in.text());
      const auto at = values_.find(key);
      if (at == values_.end() ? expected.empty() : at->second == expected) {
        values_[key] = desired;
        send(client, reply.text(desired).take());
        return stored(key);
      }
      send(client, reply.text(at == values_.end() ? expected : at->second).take());
      return;
    }
    case Frame::remove:
      send(client,
           reply.number(static_cast<std::int64_t>(values_.erase(std::string(in.text())))).take());
      return;
    case Frame::check: {
      const auto keys = texts(in);
      const bool all = std::all_of(keys.begin(), keys.end(),
                                   [this](const auto& key) { return values_.count(key) > 0; });
      send(client, reply.number(std::int64_t{all}).take());
      return;
    }
    case Frame::count:
      send(client, reply.number(static_cast<std::int64_t>(values_.size())).take());
      return;
    case Frame::append: {
      const std::string key(in.text());
      values_[key] += in.text();
      send(client, reply.take());
      return stored(key);
    }
    case Frame::cancel: {
      const auto same = [&](const auto& w) {
        return w->fd == client.socket.fd() && w->call == in.call;
      };
      for (auto& [key, waiters] : waiting_) std::erase_if(waiters, same);
      std::erase_if(questions_, [&](const auto& q) {
        return q.second == std::pair(client.socket.fd(), in.call);
      });
      return;
    }
    case Frame::bye:
      left_[client.rank] = true;
      broken_.push_back(client.socket.fd());
      return;
    case Frame::poison: {
      const std::string group(in.text());
      const auto members = in.numbers<std::vector<int>>();
      const auto lost = in.numbers<std::vector<int>>();
      const auto timed_out = in.number<std::uint8_t>();
      const auto frame = Writer(Frame::poisoned)
                             .text(group)
                             .numbers(lost)
                             .number(timed_out)
                             .text(in.text())
                             .take();
      for (const int member : members)
        if (Client* other = member == client.rank ? nullptr : of_rank(member)) send(*other, frame);
      return;
    }
    case Frame::ask: {
      const std::string group(in.text());
      const auto number = next_question_++;
      questions_[number] = {client.socket.fd(), in.call};
      send(client, reply.take());
      const auto frame = Writer(Frame::question, number).text(group).take();
      for (const int member : in.numbers<std::vector<int>>()) {
        if (Client* other = of_rank(member))
          send(*other, frame);
        else
          send(client, Writer(Frame::answer, in.call)
                           .number(std::int32_t{member})
                           .number(std::uint8_t{0})
                           .number(std::uint64_t{0})
                           .text("")
                           .take());
      }
      return;
    }
    case Frame::position: {
      const auto at = questions_.find(in.call);
      if (at == questions_.end()) return;
      const auto asker = clients_.find(at->second.first);
      if (asker == clients_.end()) return;
      const auto begun = in.number<std::uint64_t>();
      send(*asker->second, Writer(Frame::answer, at->second.second)
                               .number(std::int32_t{client.rank})
                               .number(std::uint8_t{1})
                               .number(begun)
                               .text(in.text())
                               .take());
      return;
    }
    default:
      throw std::out_of_range("a frame that only the server sends");
  }
}

}  // namespace tessera::detail
