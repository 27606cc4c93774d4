#pragma once
// What the metadata of a Zarr array says, in format 2 and 3.

#include <c10/core/Scalar.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/data/sources/source.h"

namespace tessera::detail {

struct ZarrArray {
  /// `stored` is the dtype that holds every value of `file_type`.
  VariableInfo info = {};
  /// The folder of its chunks.
  std::string folder = {};
  std::vector<std::int64_t> chunk = {};
  /// The dtype of the bytes in a chunk.
  at::ScalarType file_type = at::kFloat;
  /// Bytes of an element come most significant first.
  bool big_endian = false;
  /// The first dim of a chunk is the innermost one.
  bool column_major = false;
  /// What a chunk holds that is not there.
  std::optional<at::Scalar> fill = {};
  /// The stored number of an element without a value, by the CF conventions.
  std::optional<at::Scalar> missing = {};
  /// Why `missing` cannot be told, so that values are not decoded; empty: it can.
  std::string unmarked = {};
  /// Empty: chunks are not compressed.
  std::string compressor = {};
  /// Why chunks cannot be read: what is done to them that is not known here; empty: nothing.
  std::string refused = {};
  /// Name of a chunk: prefix, then its place in the grid with separators.
  std::string prefix = {}, separator = {};

  std::string chunk_path(const std::vector<std::int64_t>& place) const;
};

/// The arrays below `folder` whose numbers a tensor can hold, sorted by name. Throws FileError.
std::vector<ZarrArray> zarr_arrays(const std::string& folder);

}  // namespace tessera::detail
