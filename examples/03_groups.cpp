// A tree of process groups from YAML: the field is sharded over one leaf, gradients are averaged
// over the other.
//
//   tessera run -n 4 -- example_03_groups
//
// Two ranks share each sample (`domain`); the other leaf is open and takes the ranks that are left.
#include <torch/torch.h>

#include <cstdio>

#include "tessera/config/group_config_file.h"
#include "tessera/tessera.h"

constexpr const char* kTree = R"(
name: world
children:
  - {name: domain, size: 2}
  - {name: data}
)";

int main() {
  auto manager = tessera::DistributedManager::initialize();
  if (manager.world_size() % 2 != 0) {
    if (manager.rank() == 0) std::puts("this example wants an even number of ranks");
    return 77;
  }
  // All ranks compare their trees before any group is made.
  manager.create_process_groups(tessera::parse_group_config(kTree, tessera::FileFormat::yaml));
  const tessera::Group domain = manager.group("domain"), data = manager.group("data");

  // The mesh of this rank's domain group: every tensor on it is spread over these two ranks.
  const auto mesh = manager.mesh(tessera::Mesh({{"domain", domain.size()}}, domain.ranks()));

  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(6, 12), torch::nn::ReLU(), torch::nn::Linear(12, 1));
  tessera::distribute_module(*net, mesh);           // gradients: summed over the domain ...
  tessera::DistributedDataParallel ddp(net, data);  // ... then averaged over the data groups
  torch::optim::SGD optimizer(net->parameters(), 0.1);

  // The rows of one sample, 3 on the first rank of the domain and 5 on the second.
  torch::manual_seed(1 + manager.rank());
  const std::int64_t rows = domain.rank() == 0 ? 3 : 5;
  const auto x = tessera::from_local(torch::randn({rows, 6}), mesh, {tessera::Shard(0)});

  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto loss = (ddp(x) - 1).square().mean();  // over all 8 rows of the domain
    loss.backward();
    optimizer.step();
    last = loss.item<double>();  // every rank of the domain takes part
    if (step == 0) first = last;
  }
  std::printf("rank %d: domain rank %d, data rank %d: loss %.4f -> %.4f\n", manager.rank(),
              domain.rank(), data.rank(), first, last);
  return last < first ? 0 : 1;
}
