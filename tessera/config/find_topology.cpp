#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/config/internal/hwloc_topology.h"
#include "tessera/config/topology_file.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

// This host's inside, if one kind of device stands for its ranks.
std::optional<Topology> inside_of_host(int ranks) {
  for (const HostDevice device :
       {HostDevice::gpu, HostDevice::package, HostDevice::numa, HostDevice::core}) {
    try {
      Topology one = live_hwloc_topology(device, "host0");
      if (one.hosts.front().devices == ranks) return one;
    } catch (const NotAvailable&) {  // none of this kind, or no hwloc
    }
  }
  return std::nullopt;
}

}  // namespace

Topology find_topology(const TopologySources& sources) {
  if (!sources.file.empty()) {
    Topology given = read_topology(sources.file);
    const int ranks = detect_launch(sources.environment).world_size;
    if (const int slots = given.slots(); slots != ranks)
      throw MappingError(concat(sources.file, " has ", slots, " slots, and the job ", ranks,
                                " ranks: measure it again (tessera bench topology), or leave the "
                                "file out"));
    return given;
  }
  Topology found = topology_of(sources.environment);
  const auto& hosts = found.hosts;
  const int each = hosts.front().devices;
  if (each > 1 && std::all_of(hosts.begin(), hosts.end(),
                              [&](const Host& host) { return host.devices == each; })) {
    std::vector<std::string> names;
    for (const Host& host : hosts) names.push_back(host.name);
    if (const auto one = inside_of_host(each)) found = replicate_host(*one, names);
  }
  std::error_code absent;
  if (found.hosts.size() > 1 && std::filesystem::exists(sources.slurm, absent))
    found = read_slurm_topology(sources.slurm, std::move(found));
  return found;
}

}  // namespace tessera
