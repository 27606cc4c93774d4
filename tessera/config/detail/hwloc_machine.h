#pragma once
// The one place that calls hwloc; a build without it has hwloc_absent.cpp instead.

#include <string>

#include "tessera/config/internal/hwloc_topology.h"

namespace tessera::detail {

/// "gpu", "package", "numa" or "core".
const char* name_of(HostDevice device);

/// The topology of one host: as the XML says, or, where it is null, of this machine.
Topology hwloc_machine(const std::string* xml, HostDevice device, const std::string& name,
                       const std::string& source);

}  // namespace tessera::detail
