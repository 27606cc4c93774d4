#include "tessera/config/detail/hwloc_machine.h"

#include <hwloc.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/config/errors.h"
#include "tessera/mesh/errors.h"

namespace tessera::detail {
namespace {

struct Destroy {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Machine = std::unique_ptr<hwloc_topology, Destroy>;

Machine load(const std::string* xml, const std::string& source) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) throw ConfigFileError(source, ": hwloc cannot be started");
  Machine machine(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  // hwloc counts the terminating zero.
  if (xml &&
      hwloc_topology_set_xmlbuffer(raw, xml->c_str(), static_cast<int>(xml->size()) + 1) != 0)
    throw ConfigFileError(
        source,
        ": is not a topology that hwloc reads (made by lstopo or hwloc_topology_export_xml)");
  if (hwloc_topology_load(raw) != 0) throw ConfigFileError(source, ": hwloc cannot load it");
  return machine;
}

std::vector<hwloc_obj_t> os_devices(hwloc_topology_t machine, hwloc_obj_osdev_type_t kind) {
  std::vector<hwloc_obj_t> found;
  for (hwloc_obj_t at = nullptr; (at = hwloc_get_next_osdev(machine, at));) {
    if (at->attr->osdev.type != kind) continue;
    // A GPU may appear several times (as seen by CUDA, OpenCL, NVML): once per PCI device.
    if (std::ranges::find(found, at->parent, &hwloc_obj::parent) == found.end())
      found.push_back(at);
  }
  return found;
}

std::vector<hwloc_obj_t> devices_of(hwloc_topology_t machine, HostDevice device) {
  std::vector<hwloc_obj_t> found;
  if (device == HostDevice::gpu) {
    // Devices that compute; a display adapter counts only if there is nothing else.
    found = os_devices(machine, HWLOC_OBJ_OSDEV_COPROC);
    if (found.empty()) found = os_devices(machine, HWLOC_OBJ_OSDEV_GPU);
    return found;
  }
  const auto type = device == HostDevice::package ? HWLOC_OBJ_PACKAGE
                    : device == HostDevice::numa  ? HWLOC_OBJ_NUMANODE
                                                  : HWLOC_OBJ_CORE;
  for (hwloc_obj_t at = nullptr; (at = hwloc_get_next_obj_by_type(machine, type, at));)
    found.push_back(at);
  return found;
}

std::vector<hwloc_obj_t> way_up(hwloc_obj_t object) {
  std::vector<hwloc_obj_t> way;
  for (; object; object = object->parent) way.push_back(object);
  return way;
}

/// How many ancestors two objects have in common: the more, the nearer. (hwloc's own common
/// ancestor does not work for I/O objects.)
int nearness(hwloc_obj_t a, hwloc_obj_t b) {
  const auto up_a = way_up(a), up_b = way_up(b);
  int common = 0;
  for (auto x = up_a.rbegin(), y = up_b.rbegin(); x != up_a.rend() && y != up_b.rend() && *x == *y;
       ++x, ++y)
    ++common;
  return common;
}

hwloc_obj_t enclosing(hwloc_obj_t object, hwloc_obj_type_t type) {
  while (object && object->type != type) object = object->parent;
  return object;
}

Topology describe(hwloc_topology_t machine, HostDevice device, const std::string& name,
                  const std::string& source) {
  const auto devices = devices_of(machine, device);
  if (devices.empty()) {
    throw NotAvailable(source, ": has no device of kind '", name_of(device),
                       "'; choose another of gpu, package, numa, core");
  }
  Topology topology;
  topology.device_links = {{"far", 2e-6, 20e9, false}, {"near", 1e-6, 50e9, false}};
  Host host{.name = name, .devices = static_cast<int>(devices.size())};
  const bool many_packages = hwloc_get_nbobjs_by_type(machine, HWLOC_OBJ_PACKAGE) > 1;
  const auto home = [&](hwloc_obj_t object) {
    if (object->type == HWLOC_OBJ_NUMANODE && !many_packages) return object;
    const auto type = many_packages ? HWLOC_OBJ_PACKAGE : HWLOC_OBJ_GROUP;
    hwloc_obj_t at = enclosing(object, type);
    return at ? at : hwloc_get_root_obj(machine);
  };
  bool all_near = true;
  for (int a = 0; a < host.devices; ++a)
    for (int b = 0; b < a; ++b) {
      if (home(devices[a]) == home(devices[b]))
        host.links.push_back({b, a, 1});
      else
        all_near = false;
    }
  if (all_near) {
    host.links.clear();
    host.link_class = 1;
  }
  auto adapters = os_devices(machine, HWLOC_OBJ_OSDEV_OPENFABRICS);
  if (adapters.empty()) adapters = os_devices(machine, HWLOC_OBJ_OSDEV_NETWORK);
  if (adapters.size() > 1) {
    std::vector<int> uses(adapters.size(), 0);
    for (hwloc_obj_t d : devices) {
      std::size_t best = 0;
      for (std::size_t i = 1; i < adapters.size(); ++i) {
        const int now = nearness(d, adapters[i]), before = nearness(d, adapters[best]);
        if (now > before || (now == before && uses[i] < uses[best])) best = i;
      }
      ++uses[best];
      host.rail.push_back(static_cast<int>(best));
    }
  }
  topology.hosts = {std::move(host)};
  topology.check();
  return topology;
}

}  // namespace

Topology hwloc_machine(const std::string* xml, HostDevice device, const std::string& name,
                       const std::string& source) {
  const auto machine = load(xml, source);
  return describe(machine.get(), device, name, source);
}

}  // namespace tessera::detail
