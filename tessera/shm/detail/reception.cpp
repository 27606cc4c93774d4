#include "tessera/shm/detail/reception.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/text.h"

namespace tessera::shm::detail {
namespace {

/// More than the ranks themselves: those who came first and are still silent are sent away.
constexpr std::size_t kMostSilent = 64;
/// Between two looks at those who are in.
constexpr int kMostAtOnce = 256;
/// How often the thread looks whether it is still needed.
constexpr std::chrono::milliseconds kLookAround(20);

}  // namespace

Reception::Reception(const Listener& listener, std::string secret, int size, Deadline deadline)
    : listener_(listener),
      secret_(std::move(secret)),
      deadline_(deadline),
      admitted_(static_cast<std::size_t>(size)),
      expected_(static_cast<std::size_t>(size), true) {
  expected_[0] = false;
  if (complete()) return;
  // The program's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] {
      try {
        run();
      } catch (...) {
        error_ = std::current_exception();
      }
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Reception::~Reception() {
  {
    const std::lock_guard lock(mutex_);
    expected_.assign(expected_.size(), false);
  }
  if (thread_.joinable()) thread_.join();
}

std::vector<Hello> Reception::close(std::vector<bool> expected) {
  {
    const std::lock_guard lock(mutex_);
    expected_ = std::move(expected);
  }
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
  return std::move(admitted_);
}

bool Reception::complete() {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < expected_.size(); ++r)
    if (expected_[r] && !admitted_[r].socket) return false;
  return true;
}

void Reception::run() {
  while (!complete() && time_left(deadline_).count() > 0) {
    std::vector<pollfd> polls{{listener_.socket.get(), POLLIN, 0}};
    for (const auto& visitor : visitors_) polls.push_back({visitor.socket.get(), POLLIN, 0});
    ::poll(polls.data(), polls.size(),
           poll_milliseconds(std::min(deadline_, deadline_after(kLookAround))));
    std::erase_if(visitors_, [&](Hello& visitor) { return !read(visitor); });
    accept_all();
  }
}

void Reception::accept_all() {
  for (int left = kMostAtOnce; left > 0; --left) {
    Descriptor socket = accept_from(listener_.socket);
    if (!socket) return;
    if (user_of(socket) != ::geteuid()) continue;
    if (visitors_.size() >= admitted_.size() + kMostSilent) visitors_.erase(visitors_.begin());
    visitors_.push_back({std::move(socket), ""});
    if (!read(visitors_.back())) visitors_.pop_back();
  }
}

bool Reception::read(Hello& visitor) {
  constexpr std::size_t kHead = sizeof(TextHead);
  for (;;) {
    TextHead head{};
    if (visitor.text.size() >= kHead) {
      std::memcpy(head.data(), visitor.text.data(), kHead);
      if (head[0] < secret_.size() || head[0] > kMostText || head[1] != 0) return false;
      if (visitor.text.size() == kHead + head[0]) return admit(visitor);
    }
    const std::size_t wanted = kHead + head[0] - visitor.text.size();
    std::string part(wanted, '\0');
    // Without room for descriptors: the kernel drops those that come with it.
    const ssize_t n = ::recv(visitor.socket.get(), part.data(), part.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return true;
    if (n <= 0) return false;
    visitor.text.append(part, 0, static_cast<std::size_t>(n));
    const std::size_t known = std::min(visitor.text.size(), kHead + secret_.size());
    if (known > kHead && visitor.text.compare(kHead, known - kHead, secret_, 0, known - kHead) != 0)
      return false;
  }
}

bool Reception::admit(Hello& visitor) {
  visitor.text.erase(0, sizeof(TextHead) + secret_.size());
  std::size_t rank = 0;
  TextReader(visitor.text) >> rank;
  if (rank > 0 && rank < admitted_.size() && !admitted_[rank].socket)
    admitted_[rank] = std::move(visitor);
  return false;
}

}  // namespace tessera::shm::detail
