#include "tessera/shm/detail/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>

#include "tessera/base/text.h"
#include "tessera/launch/internal/cores.h"
#include "tessera/shm/types.h"

namespace tessera::shm::detail {
namespace {

constexpr std::size_t kClaimBytes = std::size_t{64} << 20;
constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

/// The number after `key` in a file of "key number" lines, or the first number if the key is empty.
std::optional<std::uint64_t> number_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) != 0) continue;
    TextReader rest(line.substr(key.size()));
    std::uint64_t number = 0;
    if (rest >> number) return number;
    return std::nullopt;  // "max": there is no limit.
  }
  return std::nullopt;
}

/// Lowers `available` to what a control group has left, if the folder has these files of one; its
/// file cache is counted as free.
void lower_to_group(std::uint64_t& available, const std::string& folder, const char* limit_file,
                    const char* usage_file, const char* cache) {
  const auto limit = number_in(folder + limit_file, ""), usage = number_in(folder + usage_file, "");
  if (!limit || !usage) return;
  const auto files = number_in(folder + "/memory.stat", cache).value_or(0);
  const auto shared = number_in(folder + "/memory.stat", "shmem ").value_or(0);
  const std::uint64_t used = *usage - std::min(*usage, files - std::min(files, shared));
  available = std::min(available, *limit - std::min(*limit, used));
}

/// Bytes that could be allocated now without the kernel ending some process for it.
std::uint64_t available_memory() {
  const auto kilobytes = number_in("/proc/meminfo", "MemAvailable:");
  std::uint64_t available = kilobytes ? *kilobytes * 1024 : ~std::uint64_t{0};
  for (const std::string& folder : control_group_folders("memory")) {
    lower_to_group(available, folder, "/memory.max", "/memory.current", "file ");
    lower_to_group(available, folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "cache ");
  }
  return available;
}

[[noreturn]] void refuse_memory(Cause cause, const char* call, std::size_t bytes,
                                const char* what_to_do) {
  const int error = errno;
  throw SetupError(cause, concat("shm: ", call, " of ", bytes, " bytes of shared memory: ",
                                 std::strerror(error), "; ", what_to_do));
}

/// Such pages have no limit of their own: claiming more than there is would end processes.
void require_available(std::size_t bytes) {
  if (const std::uint64_t available = available_memory(); bytes > available)
    throw SetupError(
        Cause::no_memory,
        concat("shm: ", bytes, " bytes of shared memory are asked for, and ", available,
               " are available on this host or to this control group: ask for less (Options: "
               "arena_bytes)"));
}

}  // namespace

Descriptor make_memory(std::size_t bytes) {
  require_available(bytes);
  // If a file grows beyond this limit the kernel ends the process by a signal.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < bytes)
    throw SetupError(
        Cause::no_memory,
        concat("shm: ", bytes,
               " bytes of shared memory are asked for, and this process may make files of ",
               limit.rlim_cur, " bytes at most: raise the limit (ulimit -f), or ask for less"));
  Descriptor file(::memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file)
    refuse_memory(Cause::not_permitted, "memfd_create", bytes,
                  "Linux 3.17 or newer is needed, and a seccomp filter may forbid it");
  if (::fchmod(file.get(), 0600) != 0)
    refuse_memory(Cause::not_permitted, "fchmod", bytes, "the kernel forbids it");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    refuse_memory(Cause::no_memory, "ftruncate", bytes, "ask for less");
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0)
    refuse_memory(Cause::not_permitted, "sealing", bytes, "the kernel forbids it");
  return file;
}

Mapping::Mapping(const Descriptor& file, std::size_t bytes) : bytes_(bytes) {
  struct stat status{};
  if (::fstat(file.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != bytes)
    throw SetupError(
        Cause::disagreement,
        concat("shm: the shared memory has ", status.st_size, " bytes and not ", bytes,
               ": the ranks were given different options, or come from different builds"));
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw SetupError(
        Cause::disagreement,
        "shm: the shared memory is not sealed: the process that made it could truncate "
        "it");
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (address == MAP_FAILED)
    refuse_memory(Cause::no_memory, "mmap", bytes,
                  "the address space of this process may be limited (ulimit -v)");
  data_ = static_cast<std::byte*>(address);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

void claim(const Descriptor& file, std::size_t offset, std::size_t bytes) {
  // In blocks: other ranks of the control group claim theirs at the same time.
  for (std::size_t at = 0; at < bytes; at += kClaimBytes) {
    require_available(bytes - at);
    int error = 0;
    do {
      error = ::posix_fallocate(file.get(), static_cast<off_t>(offset + at),
                                static_cast<off_t>(std::min(bytes - at, kClaimBytes)));
    } while (error == EINTR);
    if (error == 0) continue;
    errno = error;
    refuse_memory(
        Cause::no_memory, "claiming", bytes,
        "ask for less (Options: arena_bytes, slot_bytes), or give the ranks' control group "
        "more memory");
  }
}

}  // namespace tessera::shm::detail
