#pragma once
// The lock of the HDF5 library, and of netCDF above it: they keep process-wide state without a
// lock, so one lock guards the whole process.

#include <mutex>

namespace tessera::detail {

std::mutex& hdf5_library();

}  // namespace tessera::detail
