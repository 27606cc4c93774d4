#pragma once
// NetcdfSource: the numeric variables of a netCDF file (classic, 64-bit offset, netCDF-4), by
// hyperslab.

#include <memory>

#include "tessera/data/sources/source.h"

namespace tessera {

/// A netCDF file, opened for reading. Its variables are those of the root group; text and
/// user-defined types are not listed and cannot be read.
///
/// Decoding follows the CF conventions: a stored value that equals _FillValue (or, if the file has
/// none, the library's default fill, for types wider than a byte) or missing_value, or is outside
/// valid_range / valid_min / valid_max, is missing; other values are stored * scale_factor +
/// add_offset, computed in float64. Decoding a variable marked `_Unsigned = "true"` is refused.
/// Unsigned 64-bit values above 2^63 - 1 throw FileError.
///
/// Threads: the netCDF library is not thread safe, also not between two files, so one mutex of the
/// process guards every call into it; reads of several threads are serialised. Code that calls the
/// library beside Tessera from other threads must not do so at the same time.
///
/// If Tessera was built without netCDF the constructor throws NotAvailable.
class NetcdfSource : public detail::ListedSource {
 public:
  /// Throws FileError if the file cannot be opened or is no netCDF file.
  explicit NetcdfSource(const std::string& path);
  ~NetcdfSource() override;

  /// The global attributes of the file.
  const std::map<std::string, Attribute>& attributes() const { return attributes_; }

 protected:
  at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                      const ReadOptions& options) const override;

 private:
  struct File;
  std::unique_ptr<File> file_;
  std::map<std::string, Attribute> attributes_;
};

}  // namespace tessera
