#include "tessera/shm/detail/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tessera/base/text.h"
#include "tessera/shm/detail/layout.h"
#include "tessera/shm/types.h"

namespace tessera::shm::detail {
namespace {

/// The kernel copies less than 2 GiB in one call.
constexpr std::size_t kReadBytes = std::size_t{1} << 30;

/// The beginning of a small file of /proc; empty if it cannot be read.
std::string contents(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[2048];
  const ssize_t n = file ? ::read(file.get(), text, sizeof text) : -1;
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : std::string();
}

/// The number, in this process' namespace, of the process that a pidfd refers to; 0 if it has none.
pid_t number_of(int pidfd) {
  const std::string text = contents(concat("/proc/self/fdinfo/", pidfd));
  const auto at = text.find("\nPid:");
  if (at == std::string::npos) return 0;
  const long number = std::strtol(text.c_str() + at + 5, nullptr, 10);
  return number > 0 ? static_cast<pid_t>(number) : 0;
}

}  // namespace

Identity::Identity(std::uint64_t value) {
  void* page =
      ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED)
    throw SetupError(Cause::no_memory, "shm: no page of memory could be mapped");
  ::madvise(page, kPageBytes, MADV_WIPEONFORK);
  page_ = static_cast<std::uint64_t*>(page);
  *page_ = value;
}

Identity::~Identity() {
  if (page_ != nullptr) ::munmap(page_, kPageBytes);
}

Liveness::Liveness(std::vector<Descriptor> pidfds, std::vector<Probe> probes)
    : processes_(std::move(pidfds)), probes_(std::move(probes)), gone_(processes_.size(), false) {
  for (const auto& process : processes_) numbers_.push_back(number_of(process.get()));
}

bool Liveness::read(int rank, std::byte* to, std::uint64_t address,
                    std::size_t bytes) const noexcept {
  if (own(rank)) {
    if (bytes != 0)
      std::memcpy(to, reinterpret_cast<const void*>(address),  // NOLINT(performance-no-int-to-ptr)
                  bytes);
    return true;
  }
  const Probe& probe = probes_[rank];
  for (;;) {
    const std::size_t part = std::min(bytes, kReadBytes);
    // The probe is read by the same call, so out of the same memory: the number may be that of
    // another process by now, or of another program.
    std::uint64_t value = 0;
    const iovec here[] = {{to, part}, {&value, sizeof value}};
    const iovec there[] = {
        {reinterpret_cast<void*>(address), part},  // NOLINT(performance-no-int-to-ptr)
        {reinterpret_cast<void*>(probe.address),   // NOLINT(performance-no-int-to-ptr)
         sizeof value}};
    const ssize_t n = ::process_vm_readv(process(rank), here, 2, there, 2, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    if (value != probe.value) {
      errno = static_cast<std::size_t>(n) < part ? EFAULT : ESRCH;
      return false;
    }
    if (part == bytes) return true;
    to += part;
    address += part;
    bytes -= part;
  }
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
