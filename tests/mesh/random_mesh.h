#pragma once
// Generated meshes: any number of axes, sizes from 1, and tables that are row-major, permuted,
// dense subsets or full of gaps.

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

inline int pick(std::mt19937& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
}

template <class T>
void shuffle(std::vector<T>& items, std::mt19937& random) {
  for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
}

inline std::vector<Axis> random_axes(std::mt19937& random, int max_dims, int max_size,
                                     int max_ranks) {
  std::vector<Axis> axes;
  int n = 1;
  for (int d = pick(random, 0, max_dims); d > 0; --d) {
    const int size = pick(random, 1, max_size);
    if (n * size > max_ranks) continue;
    n *= size;
    axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), size});
  }
  return axes;
}

inline Mesh random_mesh(std::mt19937& random, int max_dims = 5, int max_size = 5,
                        int max_ranks = 96) {
  auto axes = random_axes(random, max_dims, max_size, max_ranks);
  int n = 1;
  for (const Axis& axis : axes) n *= axis.size;
  const int kind = pick(random, 0, 3);
  if (kind == 0) return Mesh(std::move(axes));
  std::vector<int> world(kind == 1 ? n : kind == 2 ? 2 * n : 50 * n + 200);
  std::iota(world.begin(), world.end(), kind == 2 ? 7 : 0);
  shuffle(world, random);
  world.resize(n);
  return Mesh(std::move(axes), std::move(world));
}

}  // namespace tessera
