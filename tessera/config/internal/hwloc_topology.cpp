#include "tessera/config/internal/hwloc_topology.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/config/detail/document.h"
#include "tessera/config/detail/hwloc_machine.h"
#include "tessera/config/errors.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

constexpr std::pair<const char*, HostDevice> kDevices[] = {{"gpu", HostDevice::gpu},
                                                           {"package", HostDevice::package},
                                                           {"numa", HostDevice::numa},
                                                           {"core", HostDevice::core}};

/// A host of `ranks` devices, each of which is an equal share of the devices of `one`. Two are as
/// near as their first devices.
Topology shared_host(const Topology& one, int ranks) {
  const Host& whole = one.hosts.front();
  if (whole.devices < ranks)
    throw NotAvailable("this host has ", whole.devices, " cores and neither ", ranks,
                       " GPUs, packages nor NUMA nodes, so it is not known which of its ", ranks,
                       " ranks are near each other");
  const auto first = [&](int rank) {
    return static_cast<int>(static_cast<long long>(rank) * whole.devices / ranks);
  };
  std::map<std::pair<int, int>, int> classes;
  for (const DeviceLink& link : whole.links) classes[std::minmax(link.a, link.b)] = link.link_class;
  Topology shared = one;
  Host& host = shared.hosts.front();
  host.devices = ranks;
  host.links.clear();
  host.rail.clear();
  for (int b = 0; b < ranks; ++b) {
    if (!whole.rail.empty()) host.rail.push_back(whole.rail[first(b)]);
    for (int a = 0; a < b; ++a)
      if (const auto at = classes.find({first(a), first(b)}); at != classes.end())
        host.links.push_back({a, b, at->second});
  }
  return shared;
}

}  // namespace

const char* detail::name_of(HostDevice device) {
  for (const auto& [text, known] : kDevices)
    if (known == device) return text;
  return "?";
}

HostDevice host_device_from(const std::string& name) {
  for (const auto& [text, device] : kDevices)
    if (name == text) return device;
  throw ConfigFileError("there is no kind of device '", name,
                        "'; choose gpu, package, numa or core");
}

Topology parse_hwloc_topology(const std::string& xml, HostDevice device, const std::string& name,
                              const std::string& source) {
  return detail::hwloc_machine(&xml, device, name, source);
}

Topology read_hwloc_topology(const std::string& path, HostDevice device, const std::string& name) {
  return parse_hwloc_topology(detail::read_text(path), device, name, path);
}

Topology live_hwloc_topology(HostDevice device, const std::string& name) {
  return detail::hwloc_machine(nullptr, device, name, "this machine");
}

Topology live_host_of(int ranks, const std::string& name) {
  for (const HostDevice device : {HostDevice::gpu, HostDevice::package, HostDevice::numa}) {
    try {
      Topology one = live_hwloc_topology(device, name);
      if (one.hosts.front().devices == ranks) return one;
    } catch (const NotAvailable&) {  // none of this kind; or no hwloc, which the cores say
    }
  }
  return shared_host(live_hwloc_topology(HostDevice::core, name), ranks);
}

Topology replicate_host(const Topology& one, const std::vector<std::string>& names) {
  if (one.hosts.size() != 1)
    throw MappingError("a topology of one host is to be repeated, but it has ", one.hosts.size());
  Topology many = one;
  many.hosts.assign(names.size(), one.hosts.front());
  for (std::size_t h = 0; h < names.size(); ++h) many.hosts[h].name = names[h];
  many.check();
  return many;
}

}  // namespace tessera
