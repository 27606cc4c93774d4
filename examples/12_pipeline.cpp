// A pipeline: a network cut into a stage for each rank, first by the usual schedule, then by one
// made for what the stages were measured to take. The parameters are those of one process.
//
//   tessera run -n 3 -- example_12_pipeline
#include <torch/torch.h>

#include <cstdio>
#include <vector>

#include "tessera/tessera.h"

namespace {

torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(16, 16));
    net->push_back(torch::nn::Tanh());
  }
  net->push_back(torch::nn::Linear(16, 1));
  net->to(torch::kDouble);
  return net;
}

// 37 rows: micro-batches of different sizes.
at::Tensor samples(int step) {
  torch::manual_seed(100 + step);
  return torch::randn({37, 16}, torch::kDouble);
}

at::Tensor targets(const at::Tensor& x) { return x.sum(1, true).sin(); }

}  // namespace

int main() {
  auto manager = tessera::DistributedManager::initialize();
  const int rank = manager.rank(), ranks = manager.world_size(), micro_batches = 6;
  const auto mesh = manager.mesh({{"pipe", ranks}});

  // The children in as many stages as there are ranks; this rank keeps its own.
  auto net = make_net();
  const auto cuts = tessera::balanced_cuts(tessera::parameter_costs(net), ranks);
  auto mine = tessera::split_sequential(net, cuts)[static_cast<std::size_t>(rank)];
  const auto stage = tessera::make_stage(mine);
  const tessera::PipelineLoss mse = [](const auto& outputs, const auto& expected) {
    return torch::mse_loss(outputs[0], expected[0]);
  };
  const auto batch = [&](int step) {  // the first rank uses the inputs, the last the targets
    const at::Tensor x = samples(step);
    return tessera::split_batch({x}, {targets(x)}, micro_batches);
  };

  tessera::Pipeline plain(mesh, "pipe", tessera::schedule_1f1b(ranks, micro_batches), {stage}, mse);
  const auto costs = plain.measure(batch(0));  // the same numbers on every rank
  tessera::Pipeline made(mesh, "pipe",
                         tessera::list_schedule(plain.schedule().placement, micro_batches, costs),
                         {stage}, mse);

  torch::optim::SGD optimizer(mine->parameters(), 0.05);
  double loss = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    loss = (step < 10 ? plain : made).step(batch(step)).loss;  // of all 37 rows, on every rank
    optimizer.step();
  }

  // One process.
  auto alone = make_net();
  torch::optim::SGD its_optimizer(alone->parameters(), 0.05);
  double its_loss = 0;
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = samples(step);
    its_optimizer.zero_grad();
    const at::Tensor value = torch::mse_loss(alone->forward(x), targets(x));
    value.backward();
    its_loss = value.item<double>();
    its_optimizer.step();
  }
  double apart = std::abs(loss - its_loss);
  for (const auto& p : mine->named_parameters())
    apart = std::max(apart,
                     (p.value() - alone->named_parameters()[p.key()]).abs().max().item<double>());
  const auto ran = made.timeline();
  std::printf(
      "rank %d of %d: loss %.6f, apart from one process by %.1e, waited %.0f %% of a step\n", rank,
      ranks, loss, apart, 100 * ran.bubble());
  return apart < 1e-10 ? 0 : 1;
}
