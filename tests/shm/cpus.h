#pragma once
// The CPUs that a process of a test runs on.

#include <sched.h>

#include <cerrno>
#include <cstddef>
#include <system_error>
#include <vector>

namespace tessera::shm::testing {

/// The first CPUs that this process may run on, `most` of them.
inline std::vector<int> allowed_cpus(std::size_t most = CPU_SETSIZE) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0)
    throw std::system_error(errno, std::generic_category(), "sched_getaffinity");
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < most; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  return cpus;
}

/// Lets this process run on these alone.
inline void run_on(const std::vector<int>& cpus) {
  cpu_set_t chosen;
  CPU_ZERO(&chosen);
  for (const int cpu : cpus) CPU_SET(cpu, &chosen);
  ::sched_setaffinity(0, sizeof chosen, &chosen);
}

}  // namespace tessera::shm::testing
