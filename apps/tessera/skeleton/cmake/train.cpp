// Trains a network on any number of ranks, as run.yaml says: README.md has the commands.
#include <torch/torch.h>

#include <cstdio>

#include "tessera/config/settings.h"
#include "tessera/tessera.h"
#include "tessera/train/run_settings.h"

// What is trained, and how a loss comes about: a mean over the batch's rows.
struct Training : tessera::Task {
  explicit Training(std::int64_t width)
      : net(torch::nn::Linear(8, width), torch::nn::Tanh(), torch::nn::Linear(width, 1)) {}
  tessera::NamedModules modules() override { return {{"net", net.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::AdamW>(net->parameters(), 1e-2)};
  }
  at::Tensor training_step(const tessera::MicroBatch& batch, tessera::Step&) override {
    return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
  }
  void validation_step(const tessera::MicroBatch& batch, tessera::Step& step) override {
    step.log("loss", torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]));
  }
  torch::nn::Sequential net;
};

// Your data: each rank gives its own rows, any number of them.
std::shared_ptr<tessera::BatchSource> batches(int rank, int first, int count) {
  std::vector<tessera::MicroBatch> all;
  for (int i = first; i < first + count; ++i) {
    torch::manual_seed(1000 * rank + i);
    const at::Tensor x = torch::randn({32, 8});
    all.push_back(tessera::make_batch({x, x.sum(1, true).sin()}));
  }
  return tessera::batches_of(all);
}

int main(int argc, char** argv) try {
  tessera::RunSettings run;
  std::int64_t width = 32;
  tessera::Settings settings;
  run.add_to(settings);
  settings.add("model.width", width, "Features of the hidden layer.");
  settings.read_arguments(argc, argv);

  const auto manager = tessera::DistributedManager::initialize();
  torch::manual_seed(0);
  Training task(width);
  const auto result =
      tessera::Trainer(run.make(manager, settings.resolved()))
          .fit(task, batches(manager.rank(), 0, 16), batches(manager.rank(), 16, 4));
  if (manager.rank() == 0) std::printf("validation loss %.4f\n", result.metrics.at("val/loss"));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
