#include "tessera/partition/permutation.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::uint64_t finalise(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

std::uint64_t keyed_random(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  constexpr std::uint64_t golden = 0x9e3779b97f4a7c15ull;
  return finalise(finalise(finalise(seed + golden) + stream + golden) + counter + golden);
}

double keyed_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return static_cast<double>(keyed_random(seed, stream, counter) >> 11) * 0x1p-53;
}

KeyedPermutation::KeyedPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream) : size_(size) {
  if (size > 1ull << 63) throw InvalidArgument(concat("a permutation of ", size, " numbers; at most 2^63"));
  int bits = 8;  // smaller networks have too few round functions to reach all orders; walking past 2^8 is cheap
  while (bits < 63 && (1ull << bits) < size) ++bits;
  low_bits_ = bits / 2;
  low_mask_ = (1ull << low_bits_) - 1;
  high_mask_ = (1ull << (bits - low_bits_)) - 1;
  rounds_ = bits <= 16 ? kMaxRounds : bits <= 32 ? 8 : 6;  // narrow halves mix little a round
  keys_.fill(0);
  for (int r = 0; r < rounds_; ++r) keys_[r] = keyed_random(seed, stream, static_cast<std::uint64_t>(r));
}

}  // namespace tessera
