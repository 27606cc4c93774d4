#pragma once
// Bytes that each rank holds at libtorch's CPU allocator, where ranks are threads.

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace tessera::test {

/// Counts, while one of them lives, what each thread allocates that has called count_as(), until it
/// is freed, by whichever thread.
class ByteCounter {
 public:
  ByteCounter() : before_(c10::GetCPUAllocator()) {
    Allocator& all = allocator();
    all.under = before_;
    c10::SetCPUAllocator(&all, 255);
  }
  ~ByteCounter() { c10::SetCPUAllocator(before_, 255); }
  ByteCounter(const ByteCounter&) = delete;
  ByteCounter& operator=(const ByteCounter&) = delete;

  /// What this thread allocates from now on is this rank's; -1: nobody's.
  static void count_as(int rank) { mine() = rank; }
  std::int64_t live(int rank) const {
    const std::lock_guard lock(allocator().mutex);
    return allocator().of[rank].live;
  }
  /// The most since the last call of restart().
  std::int64_t most(int rank) const {
    const std::lock_guard lock(allocator().mutex);
    return allocator().of[rank].most;
  }
  void restart(int rank) const {
    const std::lock_guard lock(allocator().mutex);
    allocator().of[rank].most = allocator().of[rank].live;
  }

 private:
  struct Bytes {
    std::int64_t live = 0, most = 0;
  };
  // Context and data are one pointer, as raw_allocate() needs it.
  struct Allocator final : at::Allocator {
    at::DataPtr allocate(std::size_t n) override {
      at::DataPtr from = under->allocate(n);
      void* const data = from.get();
      const int rank = mine();
      if (!data) return from;
      if (rank >= 0) {
        const std::lock_guard lock(mutex);
        blocks[data] = {rank, static_cast<std::int64_t>(n)};
        Bytes& b = of[rank];
        b.live += static_cast<std::int64_t>(n);
        b.most = std::max(b.most, b.live);
      }
      from.release_context();
      return {data, data, &release, at::kCPU};
    }
    at::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, std::size_t n) const override {
      default_copy_data(to, from, n);
    }
    static void release(void* data) {
      Allocator& all = allocator();
      {
        const std::lock_guard lock(all.mutex);
        if (const auto at = all.blocks.find(data); at != all.blocks.end()) {
          all.of[at->second.rank].live -= at->second.bytes;
          all.blocks.erase(at);
        }
      }
      all.under->raw_deleter()(data);
    }
    struct Block {
      int rank;
      std::int64_t bytes;
    };
    at::Allocator* under = nullptr;
    std::mutex mutex;
    std::unordered_map<void*, Block> blocks;
    std::unordered_map<int, Bytes> of;
  };
  // Outlives every tensor.
  static Allocator& allocator() {
    static Allocator* const all = new Allocator;
    return *all;
  }
  static int& mine() {
    static thread_local int rank = -1;
    return rank;
  }

  at::Allocator* const before_;
};

}  // namespace tessera::test
