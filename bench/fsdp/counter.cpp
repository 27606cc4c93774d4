#include "counter.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

// Of the data pointer alone, as raw_allocate() needs it: sizes are kept beside.
class Counter final : public at::Allocator {
 public:
  explicit Counter(at::Allocator* under) : under_(under) {}
  at::DataPtr allocate(std::size_t n) override {
    at::DataPtr from = under_->allocate(n);
    void* data = from.get();
    if (!data) return from;
    {
      const std::lock_guard lock(mutex_);
      sizes_[data] = static_cast<std::int64_t>(n);
      live_ += static_cast<std::int64_t>(n);
      most_ = std::max(most_, live_);
    }
    from.release_context();
    return {data, data, &release, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }
  void restart() {
    const std::lock_guard lock(mutex_);
    most_ = live_;
  }
  std::int64_t most() {
    const std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  static void release(void* data);

  at::Allocator* under_;
  std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> sizes_;
  std::int64_t live_ = 0, most_ = 0;
};

// Outlives every tensor.
Counter& counter() {
  static Counter* const all = new Counter(c10::GetCPUAllocator());
  return *all;
}

void Counter::release(void* data) {
  Counter& all = counter();
  {
    const std::lock_guard lock(all.mutex_);
    if (const auto at = all.sizes_.find(data); at != all.sizes_.end()) {
      all.live_ -= at->second;
      all.sizes_.erase(at);
    }
  }
  all.under_->raw_deleter()(data);
}

}  // namespace

void bench_counter_install() { c10::SetCPUAllocator(&counter(), 255); }
void bench_counter_restart() { counter().restart(); }
std::int64_t bench_counter_bytes() { return counter().most(); }
