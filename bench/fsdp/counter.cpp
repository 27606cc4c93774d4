#include "counter.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <utility>

namespace {

class Counter final : public at::Allocator {
 public:
  explicit Counter(at::Allocator* under) : under_(under) {}
  at::DataPtr allocate(std::size_t n) override {
    at::DataPtr from = under_->allocate(n);
    const auto bytes = static_cast<std::int64_t>(n);
    const std::int64_t now = live += bytes;
    std::int64_t seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    void* data = from.get();
    return {data, new Held{std::move(from), this, bytes}, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }
  std::atomic<std::int64_t> live = 0, most = 0;

 private:
  struct Held {
    at::DataPtr data;
    Counter* of;
    std::int64_t bytes;
  };
  static void release(void* held) {
    auto* h = static_cast<Held*>(held);
    h->of->live -= h->bytes;
    delete h;
  }
  at::Allocator* under_;
};

// Outlives every tensor.
Counter& counter() {
  static Counter* const all = new Counter(c10::GetCPUAllocator());
  return *all;
}

}  // namespace

void bench_counter_install() { c10::SetCPUAllocator(&counter(), 255); }
void bench_counter_restart() { counter().most = counter().live.load(); }
std::int64_t bench_counter_bytes() { return counter().most; }
