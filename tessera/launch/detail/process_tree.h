#pragma once
// The processes below one process, from /proc.

#include <sys/types.h>

#include <vector>

namespace tessera::detail {

/// Every descendant of `root` at this moment, parents before children. Zombies are counted: one
/// whose first thread alone has ended still runs. A
/// process whose parent died belongs to its nearest ancestor with PR_SET_CHILD_SUBREAPER, so below
/// such a root nothing escapes by double forks or sessions of its own.
std::vector<pid_t> descendants(pid_t root);

/// The children of `root` alone, zombies counted.
std::vector<pid_t> children(pid_t root);

/// Sends `signal` to every descendant of `root`; returns how many there were. 0 where there is no
/// /proc.
int signal_descendants(pid_t root, int signal);

}  // namespace tessera::detail
