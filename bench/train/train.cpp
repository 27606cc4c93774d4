// What the trainer adds to a step, beside the bare loop that computes the same parameters: forward,
// backward, Adam, clipping by norm; one rank.
//
//   bench_train [--out FILE] [--only PATTERN] [--steps N]
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>
#include <vector>

#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/nn/clip.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

using namespace tessera;

namespace {

using Clock = std::chrono::steady_clock;

torch::nn::Sequential network(int width) {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(16, width), torch::nn::Tanh(),
                               torch::nn::Linear(width, width), torch::nn::Tanh(),
                               torch::nn::Linear(width, 4));
}

class Bench : public Task {
 public:
  explicit Bench(int width) : net(network(width)) {}
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {std::make_shared<torch::optim::Adam>(net->parameters(), 1e-3)};
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override {
    return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
  }
  torch::nn::Sequential net;
};

}  // namespace

int main(int count, char** arguments) {
  bench::Output output;
  std::int64_t steps = 200;
  CLI::App app("The trainer beside a bare loop");
  bench::add_output(app, output);
  app.add_option("--steps", steps);
  CLI11_PARSE(app, count, arguments);
  at::set_num_threads(1);
  bench::Report report("train", output);
  report.meta("steps", steps);
  for (const int width : {16, 128}) {
    const std::string name = concat("a step, width ", width);
    if (!report.wants(name)) continue;
    const MicroBatch batch = make_batch({at::rand({32, 16}), at::rand({32, 4})});
    const auto source = batches_of([&](std::uint64_t, std::uint64_t i) {
      return static_cast<std::int64_t>(i) < steps ? std::optional(batch) : std::nullopt;
    });
    TrainerOptions options;
    options.strategy = std::make_shared<SingleDevice>();
    options.session.clip.max_norm = 1;
    const auto ours = [&] {
      Bench task(width);
      struct Watch : Callback {
        std::string name() const override { return "watch"; }
        void on_fit_start(Trainer&) override { began = Clock::now(); }
        void on_epoch_end(Trainer&) override { ended = Clock::now(); }
        Clock::time_point began, ended;
      };
      const auto watch = std::make_shared<Watch>();
      options.callbacks = {watch};
      Trainer(options).fit(task, source);
      return std::chrono::duration<double>(watch->ended - watch->began).count() /
             static_cast<double>(steps);
    };
    const auto bare = [&] {
      auto net = network(width);
      torch::optim::Adam adam(net->parameters(), 1e-3);
      const auto parameters = net->parameters();
      const auto began = Clock::now();
      for (std::int64_t i = 0; i < steps; ++i) {
        const at::Tensor loss = torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
        loss.backward();
        clip_gradients(parameters, Group(), {.max_norm = 1});
        adam.step();
        adam.zero_grad();
      }
      return std::chrono::duration<double>(Clock::now() - began).count() /
             static_cast<double>(steps);
    };
    const bench::Pairs pairs = bench::alternate(31, ours, bare);
    std::vector<double> added;
    for (const auto& [mine, theirs] : pairs) added.push_back((mine - theirs) * 1e6);
    bench::Record record;
    record.name = name;
    record.metric = "added";
    record.value = bench::median(added);
    record.unit = "us";
    record.reference = "a bare loop";
    double theirs = 0;
    for (const auto& pair : pairs) theirs += pair.second * 1e6 / static_cast<double>(pairs.size());
    record.reference_value = theirs;
    record.limit = 20;
    record.holds = record.value <= 20;
    report.add(record);
  }
  return report.finish();
}
