#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "report.h"
#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/launch/detail/run_scope.h"
#include "tessera/launch/internal/cores.h"

namespace tessera::app {
namespace {

std::string gigabytes(double bytes) {
  return fixed(bytes / (1024.0 * 1024.0 * 1024.0), 1) + " GiB";
}

double limit(decltype(RLIMIT_NOFILE) what) {
  rlimit value{};
  getrlimit(what, &value);
  return value.rlim_cur == RLIM_INFINITY ? -1 : static_cast<double>(value.rlim_cur);
}

std::string shown(double value) {
  return value < 0 ? "unlimited" : concat(static_cast<unsigned long long>(value));
}

void addresses(Report& report) {
  ifaddrs* all = nullptr;
  std::vector<std::string> found;
  bool other = false;
  if (getifaddrs(&all) == 0) {
    for (const ifaddrs* a = all; a; a = a->ifa_next) {
      if (!a->ifa_addr || !(a->ifa_flags & IFF_UP)) continue;
      const int family = a->ifa_addr->sa_family;
      if (family != AF_INET && family != AF_INET6) continue;
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(a->ifa_addr);
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(a->ifa_addr);
      char text[INET6_ADDRSTRLEN] = {};
      inet_ntop(family,
                family == AF_INET ? static_cast<const void*>(&v4->sin_addr) : &v6->sin6_addr, text,
                sizeof text);
      // A link-local address means nothing without the interface, which another host cannot know.
      const bool local = family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
      found.push_back(concat(a->ifa_name, " ", text, local ? " (link-local)" : ""));
      other = other || (!(a->ifa_flags & IFF_LOOPBACK) && !local);
    }
    freeifaddrs(all);
  }
  report.line("addresses", list(found));
  if (!other)
    report.advice("no network address but loopback: ranks on other hosts cannot reach this one");
}

}  // namespace

void report_machine(Report& report) {
  report.section("This machine");
  utsname system{};
  uname(&system);
  report.line("host", system.nodename);
  report.line("system", concat(system.sysname, " ", system.release, " ", system.machine));

  const CpuBudget budget = cpu_budget();
  report.line("cores",
              concat(budget.usable(), " usable (affinity ", list(budget.cpus, 16),
                     budget.quota > 0 ? concat(", control group limit ", budget.quota) : "", ")"));
  if (budget.quota > 0 && budget.quota < static_cast<double>(budget.cpus.size())) {
    report.advice(concat("the control group allows ", budget.quota, " CPUs' worth of time on ",
                         budget.cpus.size(), " CPUs: more threads than that wait for each other"));
  }
  const double page = static_cast<double>(sysconf(_SC_PAGESIZE));
  report.line("memory",
              concat(gigabytes(page * static_cast<double>(sysconf(_SC_PHYS_PAGES))), ", ",
                     gigabytes(page * static_cast<double>(sysconf(_SC_AVPHYS_PAGES))), " free"));

  const double locked = limit(RLIMIT_MEMLOCK);
  report.line("locked memory", concat(shown(locked), locked < 0 ? "" : " bytes"));
  if (locked >= 0 && locked < 64.0 * 1024 * 1024) {
    report.advice(
        "RDMA networks (InfiniBand, RoCE) register memory and will fail: ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity for the batch daemon");
  }
  const double files = limit(RLIMIT_NOFILE);
  report.line("open files", shown(files));
  if (files >= 0 && files < 4096)
    report.advice("every peer takes descriptors: ulimit -n 65536 before running hundreds of ranks");
  struct statvfs shm{};
  if (statvfs("/dev/shm", &shm) == 0) {
    const double free = static_cast<double>(shm.f_bavail) * static_cast<double>(shm.f_frsize);
    report.line("/dev/shm", concat(gigabytes(static_cast<double>(shm.f_blocks) *
                                             static_cast<double>(shm.f_frsize)),
                                   ", ", gigabytes(free), " free"));
    if (free < 64.0 * 1024 * 1024)
      report.advice(
          "MPI and NCCL share memory there: in a container, run it with --shm-size=1g or "
          "--ipc=host");
  } else {
    report.line("/dev/shm", "absent");
    report.advice("MPI and NCCL share memory there: mount a tmpfs on /dev/shm");
  }
  addresses(report);
  try {
    const detail::ReservedPort port;
    report.line("free port", concat(port.address(), " ", port.port()));
  } catch (const Error& error) {
    report.problem(concat(error.what(), ": ranks on this host cannot meet"));
  }
}

}  // namespace tessera::app
