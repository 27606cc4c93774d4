// Hdf5Source in a build without HDF5: its constructor says how to get it; nothing else is called.
#include "tessera/data/sources/hdf5_source.h"

namespace tessera {

struct Hdf5Source::File {};

Hdf5Source::Hdf5Source(const std::string& path) : ListedSource(path, "") {
  throw NotAvailable(
      "this Tessera was built without HDF5, so Hdf5Source cannot read files: install the HDF5 C "
      "library (Debian: libhdf5-dev) and configure again");
}
Hdf5Source::~Hdf5Source() = default;
at::Tensor Hdf5Source::read_box(const VariableInfo&, const Hyperslab&, const ReadOptions&) const {
  return {};
}

}  // namespace tessera
