#include "tessera/launch/internal/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <locale>
#include <set>
#include <string>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

int number_in(const std::string& path) {
  std::ifstream in(path);
  in.imbue(std::locale::classic());
  int value = 0;
  return in >> value ? value : 0;
}

std::vector<int> affinity() {
  // The kernel refuses a mask smaller than its own, so grow until it fits.
  for (int size = 1024; size <= 1 << 20; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    const std::size_t bytes = CPU_ALLOC_SIZE(size);
    CPU_ZERO_S(bytes, set);
    std::vector<int> cpus;
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; ok && cpu < size; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (ok) return cpus;
  }
  return {0};
}

double quota_of(double quota, double period) {
  return quota > 0 && period > 0 ? quota / period : 0;
}

// The smallest quota on the way from this process' control group to the root; a container often
// sees its own group as the root.
double control_group_quota() {
  std::ifstream in("/proc/self/cgroup");
  double least = 0;
  auto consider = [&](double value) {
    if (value > 0 && (least == 0 || value < least)) least = value;
  };
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = concat(",", line.substr(first + 1, second - first - 1), ",");
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      if (unified) {
        std::ifstream limit("/sys/fs/cgroup" + path + "/cpu.max");
        std::string quota, period;
        if (limit >> quota >> period && quota != "max")
          consider(quota_of(parse_real(quota).value_or(0), parse_real(period).value_or(0)));
      } else {
        const std::string folder = "/sys/fs/cgroup/cpu" + path;
        consider(quota_of(number_in(folder + "/cpu.cfs_quota_us"),
                          number_in(folder + "/cpu.cfs_period_us")));
      }
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace

int CpuBudget::usable() const {
  int count = std::max<int>(1, static_cast<int>(cpus.size()));
  if (quota > 0) count = std::min(count, std::max(1, static_cast<int>(std::ceil(quota))));
  return count;
}

CpuBudget cpu_budget() {
  std::set<std::tuple<int, int, int>> places;  // package, core, number
  for (const int cpu : affinity()) {
    const std::string folder = concat("/sys/devices/system/cpu/cpu", cpu, "/topology/");
    places.emplace(number_in(folder + "physical_package_id"), number_in(folder + "core_id"), cpu);
  }
  CpuBudget budget;
  for (const auto& [package, core, cpu] : places) budget.cpus.push_back(cpu);
  budget.quota = control_group_quota();
  return budget;
}

int threads_per_rank(int usable, int ranks) {
  if (ranks < 1) throw InvalidArgument("threads_per_rank: ", ranks, " ranks; at least 1 is needed");
  return std::max(1, usable / ranks);
}

std::vector<std::vector<int>> share_cpus(const std::vector<int>& cpus, int ranks) {
  if (ranks < 1) throw InvalidArgument("share_cpus: ", ranks, " ranks; at least 1 is needed");
  if (cpus.empty())
    throw InvalidArgument("share_cpus: no CPU to share; give the CPU numbers of cpu_budget()");
  std::vector<std::vector<int>> shares(ranks);
  const std::size_t n = cpus.size();
  for (int r = 0; r < ranks; ++r)
    if (n < static_cast<std::size_t>(ranks))
      shares[r] = {cpus[r % n]};
    else
      shares[r].assign(cpus.begin() + n * r / ranks, cpus.begin() + n * (r + 1) / ranks);
  return shares;
}

}  // namespace tessera
