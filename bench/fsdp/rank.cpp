// One rank of bench_fsdp in C++. The models and numbers are those of rank.py.

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "counter.h"
#include "side_rank.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using namespace tessera::bench;

// Four layers of 16.
struct SmallImpl : torch::nn::Module {
  SmallImpl() {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(16, 16)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Small);

// "NAME", "NAME memory" (counted, on a batch of a few numbers) or "NAME plain" (not sharded);
// "units shm" communicates in shared memory, all others over Gloo.
struct Model {
  explicit Model(const std::string& name)
      : counted(name.ends_with(" memory")), plain(name.ends_with(" plain")) {
    const std::int64_t batch = counted ? 1 : 4;
    if (name.starts_with("units")) {
      for (int unit = 0; unit < 32; ++unit) net->push_back(Small());
      shape = {batch, 16};
    } else if (name.starts_with("small") || name.starts_with("wide")) {
      const bool small = name.starts_with("small");
      const std::int64_t width = small ? 64 : 256;
      for (int i = 0; i < (small ? 8 : 6); ++i) net->push_back(Block(width));
      shape = {batch, counted ? 8 : 32, width};
    } else {
      throw tessera::InvalidArgument(tessera::concat("no model ", name));
    }
    fill(*net);
  }
  bool counted, plain;
  torch::nn::Sequential net;
  std::vector<std::int64_t> shape;
};

int run(const std::string& backend, const std::string& name) {
  at::set_num_threads(1);
  if (name.ends_with(" memory")) bench_counter_install();
  tessera::ManagerOptions options;
  options.backend = name.starts_with("units shm") ? "shm" : backend;
  auto manager = tessera::DistributedManager::initialize(options);
  Model model(name);
  at::Tensor data = pattern(model.shape, manager.rank()),
             target = pattern(model.shape, manager.rank() + 0.5);
  if (!model.plain) {
    const auto mesh = manager.mesh({{"data", manager.world_size()}});
    tessera::fully_shard(*model.net, mesh);
    data = tessera::from_local(data, mesh, {tessera::Shard(0)});
    target = tessera::from_local(target, mesh, {tessera::Shard(0)});
  }
  torch::optim::SGD optimizer(model.net->parameters(), torch::optim::SGDOptions(1e-3));
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = torch::mse_loss(model.net->forward(data), target);
    loss.backward();
    optimizer.step();
  };
  Peak peak;
  if (model.counted) peak = {bench_counter_restart, bench_counter_bytes};
  serve(step, [&] { return loss.item<double>(); }, peak);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw tessera::InvalidArgument("bench_fsdp_rank BACKEND MODEL");
    return run(argv[1], argv[2]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_fsdp_rank: %s\n", e.what());
    return 1;
  }
}
