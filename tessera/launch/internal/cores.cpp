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

// The smallest quota on the way from this process' control group to the root, in CPUs.
double control_group_quota() {
  double least = 0;
  const auto consider = [&](double quota, double period) {
    if (quota > 0 && period > 0 && (least == 0 || quota / period < least)) least = quota / period;
  };
  for (const std::string& folder : control_group_folders("cpu")) {
    std::ifstream limit(folder + "/cpu.max");
    std::string quota, period;  // "max" is no number, and no limit
    if (limit >> quota >> period)
      consider(parse_real(quota).value_or(0), parse_real(period).value_or(0));
    consider(number_in(folder + "/cpu.cfs_quota_us"), number_in(folder + "/cpu.cfs_period_us"));
  }
  return least;
}

}  // namespace

std::vector<std::string> control_group_folders(const std::string& controller) {
  std::vector<std::string> folders;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = concat(",", line.substr(first + 1, second - first - 1), ",");
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(concat(",", controller, ",")) == std::string::npos) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      folders.push_back(root + path);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return folders;
}

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
