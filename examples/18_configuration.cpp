// A training out of a configuration file: strategy, mesh, limits, checkpoints and logs, beside the
// keys of the program itself. The parameters are those of one process that has all samples.
//
//   tessera run -n 2 -- example_18_configuration --config run.yaml --set trainer.max_steps=50
//   example_18_configuration --keys           all keys, as a table
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tessera/config/settings.h"
#include "tessera/tessera.h"
#include "tessera/train/run_settings.h"

struct Regression : tessera::Task {
  explicit Regression(std::int64_t width) {
    torch::manual_seed(0);
    net = torch::nn::Sequential(torch::nn::Linear(4, width), torch::nn::Tanh(),
                                torch::nn::Linear(width, 1));
    net->to(torch::kDouble);
  }
  tessera::NamedModules modules() override { return {{"net", net.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::Adam>(net->parameters(), 0.01)};
  }
  at::Tensor training_step(const tessera::MicroBatch& batch, tessera::Step&) override {
    return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
  }
  torch::nn::Sequential net{nullptr};
};

// Eight batches in an epoch: the rows of the ranks from `first` up to `last`.
std::shared_ptr<tessera::BatchSource> batches_of_ranks(int first, int last) {
  return tessera::batches_of(
      [=](std::uint64_t, std::uint64_t index) -> std::optional<tessera::MicroBatch> {
        if (index == 8) return std::nullopt;
        std::vector<at::Tensor> rows;
        for (int rank = first; rank < last; ++rank) {
          torch::manual_seed(10 * rank + index);
          rows.push_back(torch::randn({16 + rank, 4}, torch::kDouble));
        }
        const at::Tensor x = at::cat(rows);
        return tessera::make_batch({x, x.sum(1, true).sin()});
      });
}

int main(int argc, char** argv) try {
  tessera::RunSettings run;
  std::int64_t width = 16;
  tessera::Settings settings;
  settings.add("model.width", width, "Features of the hidden layer.");
  run.add_to(settings);
  const std::vector<std::string> others = settings.read_arguments(argc, argv);
  if (others == std::vector<std::string>{"--keys"}) {
    std::printf("%s", settings.table().c_str());
    return 0;
  }

  auto manager = tessera::DistributedManager::initialize();
  const int rank = manager.rank(), ranks = manager.world_size();
  Regression task(width), alone(width);
  const auto result = tessera::Trainer(run.make(manager, settings.resolved()))
                          .fit(task, batches_of_ranks(rank, rank + 1));
  tessera::TrainerOptions one = run.trainer;
  one.checkpoint = {};
  one.progress.show = false;
  tessera::Trainer(one).fit(alone, batches_of_ranks(0, ranks));
  double apart = 0;
  for (std::size_t i = 0; i < task.net->parameters().size(); ++i) {
    const auto difference = task.net->parameters()[i] - alone.net->parameters()[i];
    apart = std::max(apart, difference.abs().max().item<double>());
  }
  std::printf("rank %d of %d: %ld steps of %ld features, apart from one process by %.1e\n", rank,
              ranks, static_cast<long>(result.steps), static_cast<long>(width), apart);
  return apart < 1e-10 ? 0 : 1;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
