#pragma once
// Hdf5Source: the numeric datasets of an HDF5 file, by hyperslab.

#include <memory>

#include "tessera/data/sources/source.h"

namespace tessera {

/// An HDF5 file, opened for reading. A variable is a dataset of integers or floating-point numbers,
/// named by its path ("group/u"); variables() are sorted. Dims are named dim0, dim1, ... Other
/// datasets (text, compounds, enumerations) are not listed. 16-bit floats are read as float32;
/// unsigned integers as the next wider signed type, and unsigned 64-bit values above 2^63 - 1 throw
/// FileError.
///
/// HDF5 has no conventions for missing values or scales, so that ReadOptions::decode and missing
/// have no effect (NetcdfSource reads netCDF-4 files, which are HDF5 files that have them).
///
/// Threads: one mutex of the process guards every call into the HDF5 library, NetcdfSource's
/// included; reads of several threads are serialised.
///
/// If Tessera was built without HDF5 the constructor throws NotAvailable.
class Hdf5Source : public detail::ListedSource {
 public:
  /// Throws FileError if the file cannot be opened or is no HDF5 file.
  explicit Hdf5Source(const std::string& path);
  ~Hdf5Source() override;

 protected:
  at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                      const ReadOptions& options) const override;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

}  // namespace tessera
