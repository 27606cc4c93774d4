#include "tessera/config/internal/hwloc_topology.h"

#include <utility>

#include "tessera/base/text.h"
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

}  // namespace

const char* detail::name_of(HostDevice device) {
  for (const auto& [text, known] : kDevices)
    if (known == device) return text;
  return "?";
}

HostDevice host_device_from(const std::string& name) {
  for (const auto& [text, device] : kDevices)
    if (name == text) return device;
  throw ConfigFileError(
      concat("there is no kind of device '", name, "'; choose gpu, package, numa or core"));
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

Topology replicate_host(const Topology& one, const std::vector<std::string>& names) {
  if (one.hosts.size() != 1)
    throw MappingError(
        concat("a topology of one host is to be repeated, but it has ", one.hosts.size()));
  Topology many = one;
  many.hosts.assign(names.size(), one.hosts.front());
  for (std::size_t h = 0; h < names.size(); ++h) many.hosts[h].name = names[h];
  many.check();
  return many;
}

}  // namespace tessera
