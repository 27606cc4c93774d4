// A solver's own loop: the heat equation on rows that are spread unevenly, one halo exchange a
// step. The rows stay where the solver has them; the exchange is differentiable.
//
//   tessera run -n 3 -- example_07_solver_halo
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

/// One explicit step on rows that have one more row on either side; columns are periodic.
at::Tensor step(const at::Tensor& with_halo) {
  const auto inside = with_halo.slice(0, 1, -1);
  const auto above = with_halo.slice(0, 0, -2), below = with_halo.slice(0, 2);
  const auto sides = inside.roll(1, 1) + inside.roll(-1, 1);
  return inside + 0.2 * (above + below + sides - 4 * inside);
}

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const int ranks = manager.world_size();
  const auto mesh = manager.mesh({{"rows", ranks}});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  auto whole = torch::randn({4 * ranks, 9});

  // Rank r owns 2 r + 1 rows of the n^2 = 1 + 3 + ... rows; the last one takes what is left.
  std::vector<std::int64_t> rows;
  std::int64_t left = 4 * ranks;
  for (int r = 0; r < ranks; ++r) {
    rows.push_back(r + 1 == ranks ? left : std::min<std::int64_t>(2 * r + 1, left));
    left -= rows.back();
  }
  const auto placement = std::vector<tessera::Placement>{tessera::Shard(0)};
  auto mine = tessera::to_local(tessera::distribute_tensor(whole, mesh, placement, {{0, rows}}));

  for (int i = 0; i < 10; ++i) {
    // One row of each neighbour; the first and the last row meet zeros.
    const auto field = tessera::from_local(mine, mesh, placement, {{0, rows}});
    mine = step(tessera::halo_exchange(field, {{0, {1, 1, tessera::Edge::zero}}}));
    whole = step(torch::constant_pad_nd(whole, {0, 0, 1, 1}));
  }
  const auto result = tessera::from_local(mine, mesh, placement, {{0, rows}});
  const double apart = (tessera::full_tensor(result) - whole).abs().max().item<double>();
  std::printf("rank %d: %ld rows, apart by %.1e\n", manager.rank(), static_cast<long>(mine.size(0)),
              apart);
  return apart < 1e-12 ? 0 : 1;
}
