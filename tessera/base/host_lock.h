#pragma once
// HostLock: the lock of an interpreter that the program runs in. An operator on sharded tensors
// waits for other ranks, and so does the destructor of what was started. If these are threads of
// one process and the caller holds the interpreter's lock, they could not run: the lock is released
// meanwhile.

#include <atomic>

namespace tessera {

struct HostLock {
  /// Releases the lock if this thread holds it; returns what acquire() needs, or nullptr if it did
  /// not.
  void* (*release)();
  void (*acquire)(void*);
};

/// Sets the lock of the whole process, which is its interpreter's. `lock` must outlive every use of
/// groups and sharded tensors.
void set_host_lock(const HostLock* lock);

namespace detail {

std::atomic<const HostLock*>& host_lock();

/// Releases the lock while it lives, if this thread holds it.
class WithoutHostLock {
 public:
  WithoutHostLock()
      : lock_(host_lock().load(std::memory_order_acquire)),
        held_(lock_ ? lock_->release() : nullptr) {}
  ~WithoutHostLock() {
    if (held_) lock_->acquire(held_);
  }
  WithoutHostLock(const WithoutHostLock&) = delete;
  WithoutHostLock& operator=(const WithoutHostLock&) = delete;

 private:
  const HostLock* const lock_;
  void* const held_;
};

}  // namespace detail

}  // namespace tessera
