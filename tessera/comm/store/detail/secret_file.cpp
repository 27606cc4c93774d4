#include "tessera/comm/store/detail/secret_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/store.h"
#include "tessera/launch/internal/secret.h"

namespace tessera::detail {
namespace {

// Files that a killed rank 0 left behind are removed by a later one, after this long.
constexpr std::time_t kForgotten = 24 * 60 * 60;

std::string home() {
  if (const char* set = std::getenv("HOME"); set && *set == '/') return set;
  std::vector<char> buffer(16384);
  passwd entry{}, *found = nullptr;
  if (getpwuid_r(geteuid(), &entry, buffer.data(), buffer.size(), &found) == 0 && found &&
      found->pw_dir && *found->pw_dir == '/')
    return found->pw_dir;
  return {};
}

std::vector<std::string> folders(bool other_hosts) {
  std::vector<std::string> all{concat("/tmp/tessera-", std::to_string(geteuid()))};
  if (const auto mine = home(); !mine.empty()) all.push_back(mine + "/.tessera");
  if (other_hosts) std::ranges::reverse(all);
  return all;
}

/// The folder, if it belongs to this user and no other user may change it.
Socket open_folder(const std::string& path, std::string& reason) {
  Socket folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) {
    reason = concat(path, ": ", std::strerror(errno));
    return folder;
  }
  struct stat about{};
  if (::fstat(folder.fd(), &about) == 0 && about.st_uid == geteuid() && (about.st_mode & 022) == 0)
    return folder;
  reason = concat(path, " belongs to another user, or others may write to it");
  return {};
}

void remove_forgotten(const Socket& folder) {
  const int copy = ::fcntl(folder.fd(), F_DUPFD_CLOEXEC, 0);
  DIR* entries = copy < 0 ? nullptr : ::fdopendir(copy);
  if (!entries) {
    if (copy >= 0) ::close(copy);
    return;
  }
  while (const dirent* entry = ::readdir(entries)) {
    struct stat about{};
    if (is_secret_file_name(entry->d_name) &&
        ::fstatat(folder.fd(), entry->d_name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
        std::time(nullptr) - about.st_mtime > kForgotten)
      ::unlinkat(folder.fd(), entry->d_name, 0);
  }
  ::closedir(entries);
}

}  // namespace

SecretFile::SecretFile(bool other_hosts) : name_(new_secret()), secret_(new_secret()) {
  std::string reasons;
  for (const auto& path : folders(other_hosts)) {
    std::string reason;
    ::mkdir(path.c_str(), 0700);
    if (const Socket folder = open_folder(path, reason)) {
      remove_forgotten(folder);
      const Socket out(::openat(folder.fd(), name_.c_str(),
                                O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600));
      const auto size = static_cast<ssize_t>(secret_.size());
      if (out && ::fchmod(out.fd(), 0600) == 0 &&
          ::write(out.fd(), secret_.data(), secret_.size()) == size) {
        folder_ = path;
        return;
      }
      reason = concat(path, ": ", std::strerror(errno));
      ::unlinkat(folder.fd(), name_.c_str(), 0);
    }
    reasons += concat(reasons.empty() ? "" : "; ", reason);
  }
  throw RendezvousError(
      concat("rank 0 has no file to hand the job's secret to the other ranks (", reasons,
             "); set TESSERA_SECRET to the same text on every rank (openssl rand -hex 16)"),
      {0});
}

SecretFile::~SecretFile() {
  const Socket folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder) ::unlinkat(folder.fd(), name_.c_str(), 0);
}

bool is_secret_file_name(std::string_view name) {
  return name.size() == 32 && std::ranges::all_of(name, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::optional<std::string> read_secret_file(const std::string& name) {
  if (!is_secret_file_name(name)) return std::nullopt;
  for (const auto& path : folders(false)) {
    std::string reason;
    const Socket folder = open_folder(path, reason);
    if (!folder) continue;
    // Without O_NONBLOCK, a pipe of that name would hold this process.
    const Socket in(
        ::openat(folder.fd(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat about{};
    if (!in || ::fstat(in.fd(), &about) != 0 || !S_ISREG(about.st_mode) ||
        about.st_uid != geteuid() || (about.st_mode & 077) != 0)
      continue;
    char text[32];
    if (::read(in.fd(), text, sizeof text) == static_cast<ssize_t>(sizeof text))
      return std::string(text, sizeof text);
  }
  return std::nullopt;
}

std::string secret_folders() { return list(folders(false)); }

}  // namespace tessera::detail
