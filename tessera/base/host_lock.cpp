#include "tessera/base/host_lock.h"

namespace tessera {

std::atomic<const HostLock*>& detail::host_lock() {
  // Process-wide, because an interpreter is.
  static std::atomic<const HostLock*> lock = nullptr;
  return lock;
}

void set_host_lock(const HostLock* lock) { detail::host_lock() = lock; }

}  // namespace tessera
