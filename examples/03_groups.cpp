// One tree of process groups from YAML, and everything on it: fields sharded over one node, data
// parallelism over a leaf, the loader on the same mesh. Compared with one process.
//
//   tessera run -n 8 -- example_03_groups        # or 4, or 12
//
// Four ranks share each sample, as two by two tiles; the open leaf takes the ranks that are left.
#include <torch/torch.h>

#include <cstdio>

#include "tessera/config/group_config_file.h"
#include "tessera/data/loader.h"
#include "tessera/tessera.h"

using namespace tessera;

constexpr const char* kTree = R"(
name: world
children:
  - name: field
    children:
      - {name: columns, size: 2}   # adjacent ranks
      - {name: rows, size: 2}
  - {name: data}                   # open: what is left of the world
)";

torch::nn::Sequential network() {
  torch::manual_seed(0);
  const auto convolution = [](int in, int out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
  };
  return torch::nn::Sequential(convolution(1, 4), torch::nn::Tanh(), convolution(4, 1));
}

int main() {
  auto manager = DistributedManager::initialize();
  if (manager.world_size() % 4 != 0) {
    if (manager.rank() == 0) std::puts("this example wants a multiple of four ranks");
    return 77;
  }
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  // All ranks compare their trees before any group is made.
  manager.create_process_groups(parse_group_config(kTree, FileFormat::yaml));
  const auto world = manager.mesh("world"), field = manager.mesh("field");
  const Group data = manager.group("data");

  auto net = network(), alone = network();
  distribute_module(*net, field);          // gradients: summed over the tiles of a sample ...
  DistributedDataParallel ddp(net, data);  // ... then averaged over the samples
  torch::optim::SGD ours(net->parameters(), 0.1), theirs(alone->parameters(), 0.1);

  // Each rank has its tile of every sample, of 7 and 5 rows and 3 columns, and reads those of its
  // own samples alone: 12 of each step, over any number of replicas.
  const auto fields = torch::arange(24 * 12 * 6, torch::kFloat64).sin().view({24, 1, 12, 6});
  const int row = manager.group_rank("rows"), column = manager.group_rank("columns");
  const auto tile = fields.narrow(2, row == 0 ? 0 : 7, row == 0 ? 7 : 5).narrow(3, 3 * column, 3);
  const auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 24, .seed = 1}, BatchSchedule(12));
  const auto loader_of = [&](const at::Tensor& t, const std::vector<std::string>& batch_axes) {
    auto dataset = std::make_shared<TensorDataset>(std::vector<at::Tensor>{t.contiguous()});
    return std::make_unique<Loader>(std::vector<std::shared_ptr<const Dataset>>{dataset}, order,
                                    batch_mapping(world.mesh(), batch_axes), manager.rank());
  };
  const auto tiles = loader_of(tile, {"data"}), samples = loader_of(fields, {});
  tiles->require_agreement(manager.world());

  double apart = 0, last = 0;
  for (int step = 0; step < 4; ++step) {
    const auto x = from_local(tiles->next().tensors[0], field, {Shard(2), Shard(3)});
    ours.zero_grad();
    const auto loss = torch::mse_loss(ddp(x), x * 0.5);  // over whole fields of this replica
    loss.backward();
    ours.step();
    const auto whole = samples->next().tensors[0];
    theirs.zero_grad();
    const auto expected = torch::mse_loss(alone->forward(whole), whole * 0.5);
    expected.backward();
    theirs.step();
    auto mean = torch::full({1}, loss.item<double>());
    data.all_reduce(mean, ReduceOp::avg);
    last = expected.item<double>();
    apart = std::max(apart, std::abs(mean.item<double>() - last));
  }
  if (manager.rank() == 0)
    std::printf("%s: loss %.6f, apart from one process by %.0e\n", world.mesh().to_string().c_str(),
                last, apart);
  return apart < 1e-12 ? 0 : 1;
}
