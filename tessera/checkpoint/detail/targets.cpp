#include "tessera/checkpoint/detail/targets.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/checkpoint/storage/detail/saved_checkpoint.h"
#include "tessera/launch/internal/cores.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera::detail {
namespace {

// More readers of one disk gain nothing, and copies alone are bound by the memory.
constexpr int kMostThreads = 4;

// True if the target's memory takes the bytes of the file as they are.
bool takes_bytes(const Want& want) {
  const at::Tensor& t = want.into;
  return t.defined() && t.numel() == volume(want.box) && t.device().is_cpu() &&
         t.layout() == at::kStrided && t.is_contiguous() && t.scalar_type() == want.dtype &&
         !t.is_conj() && !t.is_neg() && !t.is_inference();
}

// From the first element's byte to behind the last one's; nothing where no memory of the host is.
std::pair<const char*, const char*> memory_of(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_cpu() || t.layout() != at::kStrided || t.numel() == 0)
    return {nullptr, nullptr};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const auto* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + static_cast<std::size_t>(last + 1) * t.element_size()};
}

void stage_what_shares_memory(const std::vector<Want>& wants, std::vector<bool>& straight) {
  std::vector<std::size_t> order;
  std::vector<std::pair<const char*, const char*>> memory;
  for (std::size_t i = 0; i < wants.size(); ++i) {
    memory.push_back(memory_of(wants[i].into));
    if (memory.back().first) order.push_back(i);
  }
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return memory[a] < memory[b]; });
  for (std::size_t first = 0; first < order.size();) {
    const char* end = memory[order[first]].second;
    std::size_t after = first + 1;
    for (; after < order.size() && memory[order[after]].first < end; ++after)
      end = std::max(end, memory[order[after]].second);
    if (after - first > 1)
      for (std::size_t i = first; i < after; ++i) straight[order[i]] = false;
    first = after;
  }
}

}  // namespace

std::string write_fault(const at::Tensor& t) {
  if (t.layout() != at::kStrided) return "is not dense";
  if (t.numel() > 0 && at::has_internal_overlap(t) == at::MemOverlap::Yes)
    return "has elements that share memory, as expand() makes them";
  if (t.is_inference() && !c10::InferenceMode::is_enabled())
    return "was made in inference mode, and is written to in inference mode alone";
  return {};
}

at::Tensor staging_for(const Want& want) { return at::empty(shape_of(want.box), want.dtype); }

std::vector<bool> read_straight(const std::vector<Want>& wants, const LoadOptions& options) {
  std::vector<bool> all(wants.size(), false);
  std::uint64_t room = options.all_or_nothing ? options.staging_bytes : 0;
  for (std::size_t i = 0; i < wants.size(); ++i) {
    const Want& want = wants[i];
    if (!takes_bytes(want)) continue;
    const auto uses = SavedCheckpoint::uses(*want.entry, want.box);
    if (options.all_or_nothing &&
        std::ranges::any_of(uses, [](const auto& use) { return !use.whole; }))
      continue;
    if (room > 0 && want.into.nbytes() <= room) {
      room -= want.into.nbytes();
      continue;
    }
    all[i] = true;
    // Memory of its own where it was shared until the first write: now, while nothing has changed.
    want.into.mutable_data_ptr();
  }
  stage_what_shares_memory(wants, all);
  return all;
}

int threads_of_rank(int asked, int ranks) {
  if (asked < 0)
    throw InvalidArgument("LoadOptions::threads is ", asked, "; 0 leaves the choice open");
  return asked > 0 ? asked : std::min(kMostThreads, threads_per_rank(cpu_budget().usable(), ranks));
}

void spread(int threads, std::size_t count,
            const std::function<void(std::size_t i, std::size_t worker)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto run = [&](std::size_t worker) {
    try {
      for (std::size_t i = next++; i < count; i = next++) work(i, worker);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!thrown) thrown = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const std::size_t most = std::min(static_cast<std::size_t>(std::max(threads, 1)), count);
  others.reserve(most);
  try {
    while (others.size() + 1 < most) others.emplace_back(run, others.size() + 1);
  } catch (const std::exception&) {
    // The system has no more threads, or no memory for one: those that are there do the work.
  }
  run(0);
  for (std::thread& other : others) other.join();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace tessera::detail
