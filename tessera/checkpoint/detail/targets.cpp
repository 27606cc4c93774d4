#include "tessera/checkpoint/detail/targets.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "tessera/checkpoint/storage/detail/saved_checkpoint.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera::detail {

namespace {

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
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return memory[a] < memory[b]; });
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
        std::any_of(uses.begin(), uses.end(), [](const auto& use) { return !use.whole; }))
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

}  // namespace tessera::detail
