#pragma once
// ZarrSource: the numeric arrays of a Zarr folder (formats 2 and 3), by hyperslab.

#include <cstdint>
#include <memory>

#include "tessera/data/sources/source.h"

namespace tessera {

/// A Zarr group with the arrays below it, named by their paths ("group/u") and sorted, or one
/// array, which has the folder's name without ".zarr". Arrays of text, of types of the user's own
/// and of complex numbers are not listed; unsigned integers are read as the next wider signed type,
/// and unsigned 64-bit values above 2^63 - 1 throw FileError. Dims have the names of
/// `dimension_names`, or of the attribute _ARRAY_DIMENSIONS, else dim0, dim1, ...
///
/// Chunks are stored as they are, or compressed by zlib, gzip, zstd or blosc, in either byte order
/// and, in format 2, either order of elements. What else there may be (other compressors, filters,
/// transposed or sharded chunks, checksums) is refused by its name at a read. A chunk that is not
/// there holds the array's fill value, as the format says.
///
/// Values are decoded by the CF conventions as NetcdfSource does it, with the attribute _FillValue
/// (a number, its name, or a double in base64 as xarray writes it; else VariableError); in format
/// 2, where an array has _ARRAY_DIMENSIONS, its fill value is that, as xarray writes it.
///
/// Each chunk that a box touches is read once, and the last ones used are kept, so that samples of
/// one chunk are decompressed once. Reads of several threads overlap. Chunks of a compressor whose
/// library this build lacks throw NotAvailable.
///
/// Source: the specifications of Zarr 2 and 3 (zarr-specs.readthedocs.io).
class ZarrSource : public detail::ListedSource {
 public:
  /// `keep`: bytes of decompressed chunks that are kept. Throws FileError for a folder that is no
  /// Zarr group or array, or whose metadata is damaged.
  explicit ZarrSource(const std::string& path, std::int64_t keep = 64 << 20);
  ~ZarrSource() override;

  /// A chunk has this shape, one size a dim: what begins and ends at multiples of it reads no chunk
  /// that another rank reads.
  const std::vector<std::int64_t>& chunk_shape(const std::string& variable) const;

 protected:
  /// Throws FileError, naming its file, for a chunk that is damaged or cut off, or that is not
  /// there where the array has no fill value; NotAvailable for what is refused.
  at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                      const ReadOptions& options) const override;

 private:
  struct Arrays;
  std::unique_ptr<Arrays> arrays_;
};

}  // namespace tessera
