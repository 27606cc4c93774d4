#pragma once
// Blocks of one size that live at a time, counted at libtorch's CPU allocator.

#include <c10/core/CPUAllocator.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>
#include <string>
#include <utility>

namespace tessera::test {

/// Counts in the whole process while it lives: ranks that are threads share it. Blocks of the size
/// that is watched must not outlive it.
class SizeCounter final : public at::Allocator {
 public:
  SizeCounter() : under_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 255); }
  ~SizeCounter() override { c10::SetCPUAllocator(under_, 255); }
  SizeCounter(const SizeCounter&) = delete;
  SizeCounter& operator=(const SizeCounter&) = delete;

  at::DataPtr allocate(std::size_t n) override {
    at::DataPtr from = under_->allocate(n);
    if (n != watched) return from;
    void* data = from.get();
    const std::lock_guard lock(mutex_);
    held_.push_front({std::move(from), this, {}, 0, {}});
    Held& held = held_.front();
    held.at = held_.begin();
    held.depth = ::backtrace(held.frames.data(), static_cast<int>(held.frames.size()));
    live = static_cast<int>(held_.size());
    most = std::max(most.load(), live.load());
    return {data, &held, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }

  /// Where one of the blocks that live was made.
  std::string who() {
    const std::lock_guard lock(mutex_);
    if (held_.empty()) return "";
    const Held& held = held_.front();
    char** const names = ::backtrace_symbols(held.frames.data(), held.depth);
    std::string text;
    for (int i = 1; names && i < held.depth; ++i) text += std::string(names[i]) + "\n";
    std::free(names);
    return text;
  }

  std::atomic<std::size_t> watched = ~std::size_t{0};
  std::atomic<int> live = 0, most = 0;

 private:
  struct Held {
    at::DataPtr data;
    SizeCounter* of;
    std::array<void*, 24> frames;
    int depth;
    std::list<Held>::iterator at;
  };
  static void release(void* context) {
    auto* const held = static_cast<Held*>(context);
    SizeCounter& of = *held->of;
    at::DataPtr data;  // goes when nothing is locked
    const std::lock_guard lock(of.mutex_);
    data = std::move(held->data);
    of.held_.erase(held->at);
    of.live = static_cast<int>(of.held_.size());
  }

  at::Allocator* const under_;
  std::mutex mutex_;
  std::list<Held> held_;
};

}  // namespace tessera::test
