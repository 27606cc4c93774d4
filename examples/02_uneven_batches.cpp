// Ranks with different numbers of samples, one of them with none: the gradient is that of one
// process which holds all samples.
//
//   tessera run -n 3 -- example_02_uneven_batches
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const int rank = manager.rank(), ranks = manager.world_size();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::GELU(), torch::nn::Linear(16, 2));

  // All samples, to compare with; rank r takes 5 r of them, so that rank 0 of several has none.
  const std::int64_t total = ranks == 1 ? 7 : 5 * ranks * (ranks - 1) / 2;
  const auto inputs = torch::randn({total, 4}), targets = torch::randn({total, 2});
  const std::int64_t begin = 5 * rank * (rank - 1) / 2, count = ranks == 1 ? total : 5 * rank;
  const auto input = inputs.narrow(0, begin, count), target = targets.narrow(0, begin, count);

  // What one process computes.
  torch::mse_loss(net->forward(inputs), targets).backward();
  std::vector<at::Tensor> expected;
  for (auto& p : net->parameters()) expected.push_back(p.grad().clone());
  net->zero_grad();

  // The mean over this rank's samples, weighted by their number. A rank without samples takes part
  // all the same: it says so with a count of zero.
  tessera::DistributedDataParallel ddp(net, manager.world());
  const auto squares = (ddp(input) - target).square();
  const auto mine = count > 0 ? squares.mean() : squares.sum();
  const auto loss = ddp.mean_loss(mine, static_cast<double>(count));
  loss.backward();

  double apart = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto difference = net->parameters()[i].grad() - expected[i];
    apart = std::max(apart, difference.abs().max().item<double>());
  }
  std::printf("rank %d: %ld of %ld samples, loss %.6f, gradients apart by %.1e\n", rank,
              static_cast<long>(count), static_cast<long>(total), loss.item<double>(), apart);
  return apart < 1e-12 ? 0 : 1;
}
