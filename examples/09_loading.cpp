// Loading on a mesh: ranks with the same `data` coordinate get the same samples, others get
// different ones, and the batch becomes one sharded tensor.
//
//   tessera run -n 4 -- example_09_loading
#include <torch/torch.h>

#include <cstdio>

#include "tessera/data/loader.h"
#include "tessera/tessera.h"

int main() {
  using namespace tessera;
  auto manager = DistributedManager::initialize();
  const int model = manager.world_size() % 2 == 0 ? 2 : 1;
  const auto mesh = manager.mesh({{"data", manager.world_size() / model}, {"model", model}});

  // 20 samples in memory; sample i holds the number i. Any Dataset reads its own files.
  const auto values = torch::arange(20, torch::kFloat64).view({20, 1}).expand({20, 3});
  auto dataset = std::make_shared<TensorDataset>(std::vector<at::Tensor>{values.contiguous()});

  // The order is a function of seed and step alone, so that it is the same on any number of ranks.
  auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 20, .seed = 1}, BatchSchedule(5));
  Loader loader({dataset}, order, batch_mapping(mesh.mesh(), {"data"}), manager.rank());

  double seen = 0;
  for (auto& batch : loader.epoch()) {
    // 5 samples over the data axis, any number of ranks; replicated over `model`.
    const at::Tensor x = from_local(batch.tensors[0], mesh, {Shard(0), Replicate()});
    seen += x.select(1, 0).sum().item<double>();
  }
  if (manager.rank() == 0) std::printf("the sum of all samples is %g\n", seen);
  return seen == 190 ? 0 : 1;
}
