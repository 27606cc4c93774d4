#pragma once
// One host as hwloc sees it: its devices, which of them are near each other, and the network
// adapter next to each.

#include <string>
#include <vector>

#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// The kind of device that runs one rank.
enum class HostDevice { gpu, package, numa, core };
/// Reads "gpu", "package", "numa" or "core". Throws ConfigFileError with the known names.
HostDevice host_device_from(const std::string& name);

/// A topology of one host. Devices below one package (or NUMA node, if the host has one package)
/// are linked by class "near", the others by "far"; a device's rail is the adapter (InfiniBand,
/// else Ethernet) with the nearest common ancestor; adapters that are equally near are assigned in
/// turn. Latencies and bandwidths are the defaults of the two classes: hwloc does not know them.
/// Throws NotAvailable if there is no such device.
Topology parse_hwloc_topology(const std::string& xml, HostDevice device, const std::string& name,
                              const std::string& source = "hwloc XML");
Topology read_hwloc_topology(const std::string& path, HostDevice device, const std::string& name);
/// The topology of the machine that this process runs on, as far as it may see it.
Topology live_hwloc_topology(HostDevice device, const std::string& name);

/// This host as `ranks` ranks of a job share it: its GPUs, packages or NUMA nodes, the first kind
/// of which there are as many, else equal shares of its cores. Throws NotAvailable without hwloc,
/// and for more ranks than cores.
Topology live_host_of(int ranks, const std::string& name);

/// A topology with one copy of a one-host topology per name.
Topology replicate_host(const Topology& one, const std::vector<std::string>& names);

}  // namespace tessera
