// Data-parallel training: every rank draws its own samples, and the gradient is the mean over all.
//
//   tessera run -n 3 -- example_01_quickstart      or torchrun, mpirun, srun, or no launcher at all
//
// The replicas stay equal, and the loss falls below 0.1 on any number of ranks.
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

int main() {
  // Who am I, and where are the others? The launch environment says it.
  auto manager = tessera::DistributedManager::initialize();
  torch::manual_seed(manager.rank());

  // An ordinary module. Parameters and buffers are broadcast from rank 0.
  torch::nn::Sequential net(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  tessera::DistributedDataParallel ddp(net, manager.world());
  torch::optim::Adam optimizer(net->parameters(), 1e-2);

  double last = 0;
  for (int step = 0; step < 150; ++step) {
    const auto input = torch::randn({64, 8});
    const auto target = input.sum(1, true).mul(0.5).sin();
    const auto loss = ddp.mean_loss(torch::mse_loss(ddp(input), target), input.size(0));
    optimizer.zero_grad();
    loss.backward();  // gradients are reduced in buckets while it runs
    optimizer.step();
    last = loss.item<double>();
    if (manager.rank() == 0 && step % 50 == 0) std::printf("step %d: loss %.4f\n", step, last);
  }

  // Every rank holds the same network still: the largest difference from the mean is zero.
  const auto mine = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
  auto mean = mine.clone();
  manager.world().all_reduce(mean, tessera::ReduceOp::avg);
  const double apart = (mine - mean).abs().max().item<double>();
  if (manager.rank() == 0) std::printf("loss %.4f, replicas apart by %g\n", last, apart);
  return last < 0.1 && apart < 1e-6 ? 0 : 1;
}
