#include "tessera/shm/detail/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tessera/base/text.h"

namespace tessera::shm::detail {

namespace {

/// The beginning of a small file of /proc; empty if it cannot be read.
std::string contents(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[2048];
  const ssize_t n = file ? ::read(file.get(), text, sizeof text) : -1;
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : std::string();
}

}  // namespace

pid_t process_of(int pidfd) {
  const std::string text = contents(concat("/proc/self/fdinfo/", pidfd));
  const auto at = text.find("\nPid:");
  if (at == std::string::npos) return 0;
  const long number = std::strtol(text.c_str() + at + 5, nullptr, 10);
  return number > 0 ? static_cast<pid_t>(number) : 0;
}

Liveness::Liveness(std::vector<Descriptor> processes)
    : processes_(std::move(processes)), gone_(processes_.size(), false) {
  for (const auto& process : processes_)
    numbers_.push_back(process ? process_of(process.get()) : own_);
}

bool Liveness::look() {
  std::vector<pollfd> polls;
  for (std::size_t r = 0; r < processes_.size(); ++r)
    polls.push_back({gone_[r] ? -1 : processes_[r].get(), POLLIN, 0});
  if (polls.empty() || ::poll(polls.data(), polls.size(), 0) <= 0) return false;
  for (std::size_t r = 0; r < polls.size(); ++r)
    if ((polls[r].revents & (POLLIN | POLLHUP)) != 0) gone_[r] = true;
  return true;
}

const char* Liveness::state(int rank) const {
  const pid_t number = process(rank);
  if (gone(rank)) return "has ended";
  if (number <= 0) return "is alive";
  // "42 (name) T ...": the name may hold anything, so the last parenthesis counts.
  const std::string text = contents(concat("/proc/", number, "/stat"));
  const auto at = text.rfind(") ");
  if (at == std::string::npos || at + 2 >= text.size()) return "is alive";
  return std::strchr("Tt", text[at + 2]) != nullptr ? "is stopped" : "is alive";
}

}  // namespace tessera::shm::detail
