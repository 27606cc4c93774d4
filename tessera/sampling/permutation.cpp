#include "tessera/sampling/permutation.h"

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;

std::uint64_t finalise(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

KeyedRandom::KeyedRandom(std::uint64_t seed, std::uint64_t stream)
    : key_(finalise(finalise(seed + kGolden) + stream + kGolden) + kGolden) {}

std::uint64_t KeyedRandom::operator()(std::uint64_t counter) const {
  return finalise(key_ + counter);
}

KeyedPermutation::KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream)
    : size_(size) {
  if (size > 1ull << 63) throw InvalidArgument("a permutation of ", size, " numbers; at most 2^63");
  // smaller networks have too few round functions to reach all orders; cycle walking above 2^8 is
  // cheap
  int bits = 8;
  while (bits < 63 && (1ull << bits) < size) ++bits;
  low_bits_ = bits / 2;
  low_mask_ = (1ull << low_bits_) - 1;
  high_mask_ = (1ull << (bits - low_bits_)) - 1;
  // narrow halves mix little per round; 6 rounds already pass the tests at every width
  rounds_ = bits <= 16 ? kMaxRounds : bits <= 32 ? 8 : 6;
  keys_.fill(0);
  const KeyedRandom random(seed, stream);
  for (int r = 0; r < rounds_; ++r) keys_[r] = random(static_cast<std::uint64_t>(r));
}

void KeyedPermutation::fill(std::uint64_t first, std::span<std::uint64_t> out) const {
  if (out.empty()) return;
  if (first >= size_ || out.size() > size_ - first)
    throw InvalidArgument(out.size(), " indices from ", first, " on of a permutation of ", size_,
                          " numbers");
  // Each lane walks its own cycle and takes the next index when it has arrived: a single network
  // would wait for its multiplications. There are no branches on the values, which cannot be
  // predicted: each turn of a lane writes its element, the last time with the final value.
  constexpr std::size_t kLanes = 4;
  std::size_t next = 0;
  if (out.size() >= 2 * kLanes) {
    std::array<std::uint64_t, kLanes> at{}, high{}, low{};
    std::array<std::size_t, kLanes> slot{};
    for (std::size_t k = 0; k < kLanes; ++k) {
      at[k] = first + next;
      slot[k] = next++;
    }
    while (next + kLanes <= out.size()) {
      for (std::size_t k = 0; k < kLanes; ++k) {
        high[k] = at[k] >> low_bits_;
        low[k] = at[k] & low_mask_;
      }
      for (int r = 0; r < rounds_; r += 2) {
        for (std::size_t k = 0; k < kLanes; ++k) high[k] = (high[k] ^ mix(low[k], r)) & high_mask_;
        for (std::size_t k = 0; k < kLanes; ++k)
          low[k] = (low[k] ^ mix(high[k], r + 1)) & low_mask_;
      }
      for (std::size_t k = 0; k < kLanes; ++k) {
        const std::uint64_t value = high[k] << low_bits_ | low[k];
        const std::uint64_t arrived = value < size_, mask = 0 - arrived;
        out[slot[k]] = value;
        at[k] = ((first + next) & mask) | (value & ~mask);
        slot[k] = (next & mask) | (slot[k] & ~mask);
        next += arrived;
      }
    }
    for (const std::size_t k : slot) out[k] = (*this)(first + k);  // those still in progress
  }
  for (; next < out.size(); ++next) out[next] = (*this)(first + next);
}

}  // namespace tessera
