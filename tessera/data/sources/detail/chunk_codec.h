#pragma once
// Compressors of Zarr's chunks, by the names of its specifications.

#include <string>

#include "tessera/base/error.h"

namespace tessera::detail {

/// A compressor that ZarrSource can read, in this build or another one.
bool is_chunk_codec(const std::string& name);

/// Decompresses `packed` into all `size` bytes at `out`; false for what is damaged, or of another
/// size. Throws NotAvailable, naming `whose` chunks, where this build has no library for it.
bool decompress_chunk(const std::string& codec, std::string& packed, void* out, std::size_t size,
                      const std::string& whose);

}  // namespace tessera::detail
