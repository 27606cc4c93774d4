// One rank of bench_tensor_parallel in C++. The model and numbers are those of rank.py.

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "side_rank.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using namespace tessera::bench;

int run(const std::string& model) {
  using tessera::column, tessera::row;
  at::set_num_threads(1);
  auto manager = tessera::DistributedManager::initialize({.backend = "gloo"});
  tessera::set_policies(manager, {.redistribution = tessera::Policy::error});
  const bool sequence = model.ends_with("sequence"), small = model.starts_with("small");
  const std::int64_t width = small ? 64 : 256, length = small ? 32 : 128;
  torch::nn::Sequential net;
  for (int i = 0; i < (small ? 4 : 2); ++i) net->push_back(Block(width));
  fill(*net);
  const auto mesh = manager.mesh({{"tensor", manager.world_size()}});
  const std::int64_t heads = width / kHeadSize;
  tessera::TensorParallelOptions options;
  if (sequence) options.sequence_dim = 1;
  tensor_parallel(*net, mesh,
                  {{"*.query", column(heads)},
                   {"*.key", column(heads)},
                   {"*.value", column(heads)},
                   {"*.out", row(heads)},
                   {"*.up", column()},
                   {"*.down", row()}},
                  options);
  const std::vector<tessera::Placement> lies{sequence ? tessera::Shard(1) : tessera::Replicate()};
  const at::Tensor data = tessera::distribute_tensor(pattern({4, length, width}, 0), mesh, lies),
                   target =
                       tessera::distribute_tensor(pattern({4, length, width}, 0.5), mesh, lies);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-3));
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = torch::mse_loss(net->forward(data), target);
    loss.backward();
    optimizer.step();
  };
  serve(step, [&] { return loss.item<double>(); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "small");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_tensor_parallel_rank: %s\n", e.what());
    return 1;
  }
}
