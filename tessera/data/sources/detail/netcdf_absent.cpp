// NetcdfSource in a build without netCDF: its constructor says how to get it.
#include "tessera/data/sources/netcdf_source.h"

namespace tessera {

namespace {

[[noreturn]] void refuse_netcdf() {
  throw NotAvailable(
      "this Tessera was built without netCDF, so NetcdfSource cannot read files: install the "
      "netCDF C library (Debian: libnetcdf-dev) and configure "
      "again");
}

}  // namespace

struct NetcdfSource::File {};

NetcdfSource::NetcdfSource(const std::string& path) : ListedSource(path, "") { refuse_netcdf(); }
NetcdfSource::~NetcdfSource() = default;
const std::map<std::string, Attribute>& NetcdfSource::attributes() const { refuse_netcdf(); }
at::Tensor NetcdfSource::read_box(const VariableInfo&, const Hyperslab&, const ReadOptions&) const {
  refuse_netcdf();
}

}  // namespace tessera
