#pragma once
// Random partitions, meshes and shardings for property tests. The same seed gives the same cases
// everywhere: only raw engine output is used.

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tessera/partition/sharding.h"

namespace tessera::testing {

class Generator {
 public:
  explicit Generator(std::uint64_t seed) : engine_(seed) {}

  /// Uniform in [low, high].
  std::int64_t number(std::int64_t low, std::int64_t high) {
    // Without signs: the range may be as wide as its type.
    const auto from = static_cast<std::uint64_t>(low);
    return static_cast<std::int64_t>(from +
                                     engine_() % (static_cast<std::uint64_t>(high) - from + 1));
  }
  bool chance(int one_in) { return number(1, one_in) == 1; }

  /// Sizes with zeros among them; the extent follows.
  Partition partition(int parts, std::int64_t largest) {
    std::vector<std::int64_t> sizes(parts);
    for (auto& size : sizes) size = chance(4) ? 0 : number(0, largest);
    return Partition(sizes);
  }
  Partition partition_of(std::int64_t extent, int parts) {
    std::vector<std::int64_t> cuts{0, extent};
    for (int i = 1; i < parts; ++i) cuts.push_back(number(0, extent));
    std::ranges::sort(cuts);
    std::vector<std::int64_t> sizes(parts);
    for (int i = 0; i < parts; ++i) sizes[i] = cuts[i + 1] - cuts[i];
    return Partition(sizes);
  }
  std::vector<int> mesh(int max_axes, int max_positions) {
    std::vector<int> axes;
    int positions = 1;
    for (auto n = number(1, max_axes); n > 0; --n) {
      const auto size = static_cast<int>(number(1, std::min(4, max_positions / positions)));
      axes.push_back(size);
      positions *= size;
    }
    return axes;
  }
  std::vector<int> permutation(int n, int world) {
    std::vector<int> all(world);
    for (int i = 0; i < world; ++i) all[i] = i;
    for (int i = world - 1; i > 0; --i) std::swap(all[i], all[number(0, i)]);
    all.resize(n);
    return all;
  }
  Sharding sharding(const std::vector<std::int64_t>& shape, const std::vector<int>& mesh,
                    std::vector<int> ranks) {
    std::vector<DimSharding> dims(shape.size());
    const auto order = permutation(static_cast<int>(mesh.size()), static_cast<int>(mesh.size()));
    for (int axis : order)
      if (!shape.empty() && !chance(3))
        dims[number(0, static_cast<std::int64_t>(shape.size()) - 1)].axes.push_back(axis);
    for (std::size_t d = 0; d < shape.size(); ++d) {
      int parts = 1;
      for (int axis : dims[d].axes) parts *= mesh[axis];
      if (!dims[d].axes.empty()) dims[d].partition = partition_of(shape[d], parts);
    }
    return Sharding(shape, mesh, std::move(dims), std::move(ranks));
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::testing
