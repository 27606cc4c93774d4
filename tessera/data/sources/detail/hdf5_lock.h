#pragma once
// The lock of the HDF5 library, and of netCDF above it: they keep process-wide state without a
// lock, so one lock guards the whole process.

#include <mutex>

namespace tessera::detail {

inline std::mutex& hdf5_library() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace tessera::detail
