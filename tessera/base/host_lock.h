#pragma once
// HostLock: the lock of an interpreter that the program runs in. An operator on sharded tensors
// waits for other ranks, and so does the destructor of what was started. If these are threads of
// one process and the caller holds the interpreter's lock, they could not run: the lock is released
// meanwhile. And errors that an interpreter is to get by their class.

#include <atomic>

#include "tessera/base/error.h"
#include "tessera/base/pinned.h"

namespace tessera {

struct HostLock {
  /// Releases the lock if this thread holds it; returns what acquire() needs, or nullptr if it did
  /// not.
  void* (*release)();
  void (*acquire)(void*);
  /// Throws the same error as a class that the interpreter knows too; returns where it knows none.
  void (*raise)(const Error&);
};

/// Sets the lock of the whole process, which is its interpreter's. `lock` must outlive every use of
/// groups and sharded tensors.
void set_host_lock(const HostLock* lock);

namespace detail {

std::atomic<const HostLock*>& host_lock();

/// Releases the lock while it lives, if this thread holds it.
class WithoutHostLock : Pinned {
 public:
  WithoutHostLock()
      : lock_(host_lock().load(std::memory_order_acquire)),
        held_(lock_ ? lock_->release() : nullptr) {}
  ~WithoutHostLock() {
    if (held_) lock_->acquire(held_);
  }

 private:
  const HostLock* const lock_;
  void* const held_;
};

/// Runs `body`, whose errors the interpreter gets by their class.
template <class Body>
void raising(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (const HostLock* lock = host_lock().load(std::memory_order_acquire)) lock->raise(error);
    throw;
  }
}

}  // namespace detail

}  // namespace tessera
