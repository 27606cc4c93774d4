#pragma once
// The descendants of a process, from /proc.

#include <sys/types.h>

#include <vector>

namespace tessera::detail {

/// Every descendant of `root` at this moment, parents before children. Zombies are included: one
/// whose first thread alone has ended still runs. A process whose parent died belongs to its
/// nearest ancestor with PR_SET_CHILD_SUBREAPER, so that below such a root no process escapes by
/// double forks or sessions of its own.
std::vector<pid_t> descendants(pid_t root);

/// The direct children of `root`, zombies included.
std::vector<pid_t> children(pid_t root);

/// Sends `signal` to every descendant of `root`; returns how many there were, or 0 if there is no
/// /proc.
int signal_descendants(pid_t root, int signal);

}  // namespace tessera::detail
