#pragma once
// KeyedPermutation: a shuffle without a list. Any index is computed by itself, and inverted.
//
//   KeyedPermutation p(1'000'000, seed, epoch);
//   // every number below a million once, in an order that differs by seed and epoch
//   p(0), p(1), ...
//   p.inverse(p(i)) == i
//
// Method: a Feistel network (Luby and Rackoff 1988) on the smallest power of two that holds the
// size, with cycle walking (Black and Rogaway 2002) for the numbers above it: below two network
// evaluations an index on average. Only unsigned 64-bit arithmetic, so that every compiler and
// platform gives the same numbers.

#include <array>
#include <cstdint>
#include <span>

namespace tessera {

class KeyedPermutation {
 public:
  /// A permutation of [0, size), size <= 2^63. `stream` separates permutations that share a seed
  /// (the epoch, a dataset). Throws InvalidArgument above 2^63.
  KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream = 0);

  std::uint64_t size() const { return size_; }
  /// The image of i, i < size (not checked: this is the inner loop).
  std::uint64_t operator()(std::uint64_t i) const {
    do i = forward(i);
    while (i >= size_);
    return i;
  }
  /// Sets out[k] = (*this)(first + k), all below size. Several networks are evaluated side by side,
  /// so that an index costs a fraction of a single call (benchmark `loader`). Throws
  /// InvalidArgument beyond the size.
  void fill(std::uint64_t first, std::span<std::uint64_t> out) const;
  std::uint64_t inverse(std::uint64_t i) const {
    do i = backward(i);
    while (i >= size_);
    return i;
  }

 private:
  static constexpr int kMaxRounds = 12;
  std::uint64_t mix(std::uint64_t half, int round) const {
    std::uint64_t x = half + keys_[round];
    // an odd constant with well-spread bits; the high half of the product is the mixed one
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x >> 32;
  }
  std::uint64_t forward(std::uint64_t i) const {
    std::uint64_t high = i >> low_bits_, low = i & low_mask_;
    for (int r = 0; r < rounds_; r += 2) {
      high = (high ^ mix(low, r)) & high_mask_;
      low = (low ^ mix(high, r + 1)) & low_mask_;
    }
    return high << low_bits_ | low;
  }
  std::uint64_t backward(std::uint64_t i) const {
    std::uint64_t high = i >> low_bits_, low = i & low_mask_;
    for (int r = rounds_; r > 0; r -= 2) {
      low = (low ^ mix(high, r - 1)) & low_mask_;
      high = (high ^ mix(low, r - 2)) & high_mask_;
    }
    return high << low_bits_ | low;
  }

  std::uint64_t size_;
  int low_bits_, rounds_;
  std::uint64_t low_mask_, high_mask_;
  std::array<std::uint64_t, kMaxRounds> keys_;
};

/// 64 random bits that depend on (seed, stream, counter) alone: SplitMix64's finaliser (Steele,
/// Lea, Flood 2014) over their combination.
class KeyedRandom {
 public:
  explicit KeyedRandom(std::uint64_t seed, std::uint64_t stream = 0);
  std::uint64_t operator()(std::uint64_t counter) const;
  /// The same as a number in [0, 1), a multiple of 2^-53.
  double uniform(std::uint64_t counter) const {
    return static_cast<double>((*this)(counter) >> 11) * 0x1p-53;
  }

 private:
  std::uint64_t key_;
};

/// One number of KeyedRandom(seed, stream).
inline std::uint64_t keyed_random(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return KeyedRandom(seed, stream)(counter);
}
inline double keyed_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return KeyedRandom(seed, stream).uniform(counter);
}

}  // namespace tessera
