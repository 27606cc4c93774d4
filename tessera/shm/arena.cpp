#include "tessera/shm/group.h"

#include <algorithm>
#include <cstdint>

namespace tessera::shm {
namespace {
constexpr std::size_t kAlignment = 64;
}  // namespace

Arena::Arena(std::shared_ptr<const void> keep, std::byte* begin, std::size_t bytes)
    : keep_(std::move(keep)), begin_(begin), bytes_(bytes) {
  if (bytes_ > 0) free_[0] = bytes_;
}

std::byte* Arena::try_allocate(std::size_t bytes) {
  if (bytes > bytes_) return nullptr;
  const std::size_t wanted =
      std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  const std::lock_guard lock(mutex_);
  // The tightest fit leaves the large blocks for large requests.
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at)
    if (at->second >= wanted && (best == free_.end() || at->second < best->second)) best = at;
  if (best == free_.end()) return nullptr;
  const auto [offset, size] = *best;
  free_.erase(best);
  if (size > wanted) free_[offset + wanted] = size - wanted;
  taken_[offset] = wanted;
  return begin_ + offset;
}

std::byte* Arena::allocate(std::size_t bytes) {
  if (std::byte* data = try_allocate(bytes)) return data;
  throw ArenaFull("shm: ", bytes, " bytes are asked of an arena of ", bytes_, " bytes, of which ",
                  used(), " are taken and ", largest_free(),
                  " are free in one piece: give the group a larger one "
                  "(Options::arena_bytes), or free what is not needed");
}

void Arena::deallocate(std::byte* data) {
  if (data == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto taken =
      contains(data) ? taken_.find(static_cast<std::size_t>(data - begin_)) : taken_.end();
  if (taken == taken_.end())
    throw InvalidArgument(
        "shm: an arena is given back what it did not give out, or gives no longer");
  auto [offset, size] = *taken;
  taken_.erase(taken);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + size) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_[offset] = size;
}

bool Arena::contains(const void* data) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(begin_);
  return at < bytes_;
}

std::size_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [offset, size] : taken_) sum += size;
  return sum;
}

std::size_t Arena::largest_free() const {
  const std::lock_guard lock(mutex_);
  std::size_t most = 0;
  for (const auto& [offset, size] : free_) most = std::max(most, size);
  return most;
}

}  // namespace tessera::shm
