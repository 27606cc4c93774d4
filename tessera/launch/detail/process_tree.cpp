#include "tessera/launch/detail/process_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tessera/base/number.h"

namespace tessera::detail {
namespace {

// The children of every process that /proc shows.
std::multimap<pid_t, pid_t> process_table() {
  std::multimap<pid_t, pid_t> table;
  DIR* dir = opendir("/proc");
  if (!dir) return table;
  while (const dirent* entry = readdir(dir)) {
    if (!is_digit(entry->d_name[0])) continue;
    char path[300];
    std::snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    char text[1024];
    const ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) continue;
    text[size] = 0;
    // "pid (name) state ppid ...": the name may hold anything, so look for the last parenthesis.
    const char* end = std::strrchr(text, ')');
    int parent = 0;
    if (end && std::sscanf(end + 1, " %*c %d", &parent) == 1)
      table.insert({parent, static_cast<pid_t>(std::atoi(entry->d_name))});
  }
  closedir(dir);
  return table;
}

}  // namespace

std::vector<pid_t> descendants(pid_t root) {
  const auto table = process_table();
  std::vector<pid_t> found{root};
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto [first, last] = table.equal_range(found[i]);
    for (auto it = first; it != last; ++it) found.push_back(it->second);
  }
  found.erase(found.begin());
  return found;
}

std::vector<pid_t> children(pid_t root) {
  const auto table = process_table();
  std::vector<pid_t> found;
  const auto [first, last] = table.equal_range(root);
  for (auto it = first; it != last; ++it) found.push_back(it->second);
  return found;
}

int signal_descendants(pid_t root, int signal) {
  const std::vector<pid_t> all = descendants(root);
  for (pid_t pid : all) kill(pid, signal);
  return static_cast<int>(all.size());
}

}  // namespace tessera::detail
