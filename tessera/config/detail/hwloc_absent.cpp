// A build without hwloc: what needs it says how to get it.
#include "tessera/base/error.h"
#include "tessera/config/detail/hwloc_machine.h"

namespace tessera::detail {

Topology hwloc_machine(const std::string*, HostDevice, const std::string&,
                       const std::string& source) {
  throw NotAvailable(source,
                     ": this Tessera was built without hwloc, so it cannot read a host's "
                     "devices: describe them in a topology file, or build with hwloc "
                     "(Debian: libhwloc-dev)");
}

}  // namespace tessera::detail
