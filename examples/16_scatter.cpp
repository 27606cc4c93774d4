// One rank of each domain group reads samples with named fields, and the others get their rows of
// them; a field that one rank alone has is scattered. Compared with one process.
//
//   tessera run -n 4 -- example_16_scatter        # any number of ranks
#include <torch/torch.h>

#include <cstdio>

#include "tessera/data/shard_batch.h"
#include "tessera/tessera.h"

using namespace tessera;

// 6 samples: two maps of 9 x 4 and the month, nested as a dictionary would be.
Fields samples() {
  const auto map = [](double phase) {
    return torch::sin(torch::arange(6 * 9 * 4, torch::kFloat64) + phase).view({6, 9, 4});
  };
  return {{"inputs/wind", map(0)}, {"inputs/about/month", torch::arange(6)}, {"target", map(1)}};
}

// The wind along the rows, where neighbours share a row, and the month as a factor.
at::Tensor smoothed(const at::Tensor& wind, const at::Tensor& month) {
  const auto mean = torch::avg_pool1d(wind.transpose(1, 2), 3, 1, 1).transpose(1, 2);
  return mean * (1 + month).view({-1, 1, 1});
}

int main() {
  auto manager = DistributedManager::initialize();
  const int domain = manager.world_size() % 2 == 0 ? 2 : 1;
  const auto mesh = manager.mesh({{"data", manager.world_size() / domain}, {"domain", domain}});
  set_policies(manager, {.redistribution = Policy::error});  // nothing is gathered unseen

  const auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 6, .seed = 1}, BatchSchedule(4));
  const auto loader_of = [&](BatchMapping mapping, int process) {
    const auto data = std::make_shared<TensorDataset>(samples());
    return std::make_unique<Loader>(std::vector<std::shared_ptr<const Dataset>>{data}, order,
                                    std::move(mapping), process);
  };
  std::unique_ptr<Loader> loader;  // of one rank of each domain group
  if (reads_for_others(mesh, {"data"}))
    loader = loader_of(batch_mapping(mesh.mesh(), {"data"}), manager.rank());
  const auto whole = loader_of(BatchMapping({1}, {0}, {0}), 0);

  double apart = 0;
  const auto compare = [&](const at::Tensor& sharded, const at::Tensor& expected) {
    apart = std::max(apart, (full_tensor(sharded) - expected).abs().max().item<double>());
  };
  for (int step = 0; step < 4; ++step) {
    const auto batch =
        scatter_batch(loader ? std::optional(loader->next()) : std::nullopt, mesh, {"data"},
                      {{.field = "inputs/wind", .dims = {{"domain", 1}}},
                       {.field = "target", .dims = {{"domain", 1}}}});
    const Fields inputs = batch.fields().under("inputs");
    const auto y = smoothed(inputs.at("wind"), inputs.at("about/month"));
    const auto all = whole->next();
    const auto expected = smoothed(all.field("inputs/wind"), all.field("inputs/about/month"));
    compare(y, expected);
    compare((y - batch.field("target")).square().mean(),
            (expected - all.field("target")).square().mean());
  }

  // The first rank alone has this; rows in shards of any sizes, some of them empty.
  std::vector<std::int64_t> rows(static_cast<std::size_t>(manager.world_size()), 0);
  rows.front() = 5;
  rows.back() += 4;
  const auto line = manager.mesh({{"all", manager.world_size()}});
  const auto field = samples().at("target")[0];
  const auto mine =
      scatter(manager.rank() == 0 ? field : at::Tensor(), line, {Shard(0)}, {{0, rows}});
  compare(mine, field);
  compare(mine.square().sum(0), field.square().sum(0));
  if (manager.rank() == 0)
    std::printf("data %d x domain %d, rows [%d, ...]: as on one process: %s\n",
                mesh.mesh().size("data"), domain, static_cast<int>(rows.front()),
                apart < 1e-12 ? "yes" : "no");
  return apart < 1e-12 ? 0 : 1;
}
