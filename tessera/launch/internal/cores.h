#pragma once
// Cores: how many this process may use, and how ranks on one host share them.

#include <string>
#include <vector>

namespace tessera {

/// The CPUs that the operating system lets this process use.
struct CpuBudget {
  /// CPU numbers of the affinity mask, neighbours first: by package, core, number (hardware threads
  /// of a core are adjacent).
  std::vector<int> cpus;
  /// CPU time per time that the control group allows, in CPUs; 0: no such limit.
  double quota = 0;

  /// Number of single-threaded ranks that can run at the same time: cpus.size(), or the quota
  /// rounded up if that is less; at least 1.
  int usable() const;
};

/// The folders with the limits of this process' control groups (version 2, or of version 1 those of
/// `controller`: "cpu", "memory"), each before the one above it. A container often sees its own
/// group as the root.
std::vector<std::string> control_group_folders(const std::string& controller);

/// Reads sched_getaffinity, /sys/devices/system/cpu and the control group (version 1 or 2).
CpuBudget cpu_budget();

/// Threads for each of `ranks` ranks: usable / ranks rounded down, at least 1. Throws
/// InvalidArgument for ranks < 1.
int threads_per_rank(int usable, int ranks);

/// The CPUs of each rank. With at least as many CPUs as ranks: consecutive blocks whose sizes
/// differ by at most one ({0,1,2,3,4} over 2 ranks: {0,1}, {2,3,4}). With fewer: one CPU per rank,
/// rank r on CPU r mod n, so that CPUs are shared. Throws InvalidArgument for ranks < 1 or an empty
/// list.
std::vector<std::vector<int>> share_cpus(const std::vector<int>& cpus, int ranks);

}  // namespace tessera
