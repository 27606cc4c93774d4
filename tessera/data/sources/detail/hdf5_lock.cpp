#include "tessera/data/sources/detail/hdf5_lock.h"

namespace tessera::detail {

std::mutex& hdf5_library() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace tessera::detail
