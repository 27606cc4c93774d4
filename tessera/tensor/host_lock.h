#pragma once
// HostLock: the lock of a language that the program is written in. An operator on sharded tensors
// waits for other ranks. Where these are threads of one process and the caller holds an
// interpreter's lock, they could not run: it is let go in the meantime.

#include <atomic>

namespace tessera {

struct HostLock {
  /// Lets the lock go if this thread holds it; returns what take() needs, nullptr if it did not.
  void* (*let_go)();
  void (*take)(void*);
};

/// For the whole process, as the interpreter is, and for good: `lock` must outlive every use of
/// sharded tensors.
void set_host_lock(const HostLock* lock);

namespace detail {

std::atomic<const HostLock*>& host_lock();

/// While it lives this thread does not hold the lock.
class WithoutHostLock {
 public:
  WithoutHostLock()
      : lock_(host_lock().load(std::memory_order_acquire)),
        held_(lock_ ? lock_->let_go() : nullptr) {}
  ~WithoutHostLock() {
    if (held_) lock_->take(held_);
  }
  WithoutHostLock(const WithoutHostLock&) = delete;
  WithoutHostLock& operator=(const WithoutHostLock&) = delete;

 private:
  const HostLock* const lock_;
  void* const held_;
};

}  // namespace detail

}  // namespace tessera
