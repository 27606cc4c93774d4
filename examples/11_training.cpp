// A trainer: ranks with batches of different sizes and numbers, accumulation, clipping, validation.
// The parameters are those of one process that has all samples.
//
//   tessera run -n 3 -- example_11_training
//   example_11_training 3                     starts its three ranks itself
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

#include "tessera/launch/local_run.h"
#include "tessera/tessera.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

using tessera::MicroBatch;
using tessera::Step;

// What is trained, and how a loss comes about: the mean over the batch's rows.
struct Regression : tessera::Task {
  Regression() {
    torch::manual_seed(0);
    net =
        torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
    net->to(torch::kDouble);
  }
  tessera::NamedModules modules() override { return {{"net", net.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::Adam>(net->parameters(), 0.01)};
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override {
    return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
  }
  void validation_step(const MicroBatch& batch, Step& step) override {
    step.log("loss", torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]));
  }
  torch::nn::Sequential net{nullptr};
};

// Rank r has r + 4 batches of up to four rows, some of none.
std::vector<MicroBatch> batches_of_rank(int rank) {
  std::vector<MicroBatch> all;
  for (int i = 0; i < rank + 4; ++i) {
    torch::manual_seed(100 * rank + i);
    const auto x = torch::randn({(rank + i + 1) % 5, 4}, torch::kDouble);
    all.push_back(tessera::make_batch({x, x.sum(1, true).sin()}));
  }
  return all;
}

int main(int argc, char** argv) {
  const int wanted = argc > 1 ? std::atoi(argv[1]) : 1;
  if (const auto status = tessera::start_local_ranks(wanted, argc, argv)) return *status;
  auto manager = tessera::DistributedManager::initialize();
  const int rank = manager.rank(), ranks = manager.world_size();

  tessera::TrainerOptions options;
  options.max_epochs = 3;
  options.accumulate = 2;
  options.session.clip.max_norm = 0.5;
  options.uneven = tessera::UnevenData::weight_zero;

  Regression task;
  options.strategy = std::make_shared<tessera::DDPStrategy>(manager);
  const auto mine = batches_of_rank(rank);
  const auto result =
      tessera::Trainer(options).fit(task, tessera::batches_of(mine), tessera::batches_of(mine));

  // One process: each batch has the rows of all ranks that have one.
  std::vector<MicroBatch> joined;
  for (int i = 0; i < ranks + 3; ++i) {
    std::vector<at::Tensor> x, y;
    for (int r = 0; r < ranks; ++r) {
      if (i >= r + 4) continue;
      const MicroBatch one = batches_of_rank(r)[static_cast<std::size_t>(i)];
      x.push_back(one.tensors[0]), y.push_back(one.tensors[1]);
    }
    joined.push_back(tessera::make_batch({at::cat(x), at::cat(y)}));
  }
  Regression alone;
  options.strategy = nullptr;
  const auto expected = tessera::Trainer(options).fit(alone, tessera::batches_of(joined),
                                                      tessera::batches_of(joined));

  double apart = std::abs(result.metrics.at("val/loss") - expected.metrics.at("val/loss"));
  for (std::size_t i = 0; i < task.net->parameters().size(); ++i) {
    const auto difference = task.net->parameters()[i] - alone.net->parameters()[i];
    apart = std::max(apart, difference.abs().max().item<double>());
  }
  std::printf("rank %d of %d: %ld steps, validation loss %.6f, apart from one process by %.1e\n",
              rank, ranks, static_cast<long>(result.steps), result.metrics.at("val/loss"), apart);
  return apart < 1e-10 ? 0 : 1;
}
