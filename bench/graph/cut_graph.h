#pragma once
// The graph of both programs: the ten nearest of points in a square, cut along a curve in two.

#include <ATen/ops/rand.h>
#include <torch/utils.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "tessera/ops/ghosts/neighbor_edges.h"
#include "tessera/partition/partitioners.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::bench {

inline constexpr int kNeighbors = 10;

// The whole graph, the same on both ranks: nodes in the order of their owners, edges by target.
struct CutGraph {
  at::Tensor edges;
  std::vector<std::int64_t> sizes;
  at::Tensor places;
  CutGraph(const DeviceMesh& alone, std::int64_t count) {
    const std::int64_t nodes = count / kNeighbors;
    torch::manual_seed(0);
    const at::Tensor drawn = at::rand({nodes, 2}, at::kDouble);
    const auto order =
        curve_order({drawn.const_data_ptr<double>(), static_cast<std::size_t>(drawn.numel())}, 2);
    places = drawn.index_select(0, torch::tensor(order));
    sizes = {nodes - nodes / 2, nodes / 2};
    std::vector<std::int64_t> ids(static_cast<std::size_t>(nodes));
    std::iota(ids.begin(), ids.end(), std::int64_t{0});
    const OwnedRows all(alone, ids);
    edges = to_local(nearest_edges(all, places, all, places, kNeighbors, {1, 1}).edges);
  }
};

}  // namespace tessera::bench
