#pragma once
// The HDF5 library, and netCDF above it, keep process-wide state without a lock, so the lock must
// be as wide.

#include <mutex>

namespace tessera::detail {

std::mutex& hdf5_library();

}  // namespace tessera::detail
