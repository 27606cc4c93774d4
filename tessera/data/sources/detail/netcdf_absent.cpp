// NetcdfSource in a build without netCDF: its constructor says how to get it, and nothing else is
// called.
#include "tessera/data/sources/netcdf_source.h"

namespace tessera {

struct NetcdfSource::File {};

NetcdfSource::NetcdfSource(const std::string& path) : ListedSource(path, "") {
  throw NotAvailable(
      "this Tessera was built without netCDF, so NetcdfSource cannot read files: install the "
      "netCDF C library (Debian: libnetcdf-dev) and configure again");
}
NetcdfSource::~NetcdfSource() = default;
at::Tensor NetcdfSource::read_box(const VariableInfo&, const Hyperslab&, const ReadOptions&) const {
  return {};
}

}  // namespace tessera
