#include "training.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

namespace winds {

at::Tensor squared_error(const at::Tensor& forecast, const at::Tensor& target,
                         const at::Tensor& sigma) {
  return ((forecast - target) * sigma).square().mean();
}

namespace {

class Training : public tessera::Task {
 public:
  Training(WindNet network, const WindsData& data, const TrainingOptions& options)
      : network_(std::move(network)),
        options_(options),
        steps_(options.epochs * data.steps_per_epoch()) {
    const std::vector<tessera::Placement> replicated(data.mesh().mesh().dims());
    sigma_ = tessera::distribute_tensor(data.statistics().sigma.to(data.dtype()), data.mesh(),
                                        replicated);
  }
  tessera::NamedModules modules() override { return {{"network", network_.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::AdamW>(
        network_->parameters(),
        torch::optim::AdamWOptions(options_.learning_rate).weight_decay(options_.weight_decay))};
  }
  std::vector<tessera::LearningRateSchedule> schedules() override {
    return {{[all = static_cast<double>(steps_)](std::int64_t step, std::int64_t) {
      const double done = static_cast<double>(step) / all;
      return std::min(1.0, static_cast<double>(step + 1) / 10) * 0.5 *
             (1 + std::cos(std::numbers::pi * done));
    }}};
  }
  at::Tensor training_step(const tessera::MicroBatch& batch, tessera::Step&) override {
    return squared_error(network_(batch.tensors[0]), batch.tensors[1], sigma_);
  }
  std::int64_t steps() const { return steps_; }

 private:
  WindNet network_;
  const TrainingOptions& options_;
  std::int64_t steps_;
  at::Tensor sigma_;
};

class Watch : public tessera::Callback {
 public:
  Watch(std::int64_t steps, const std::function<void(const Step&)>& watch)
      : steps_(steps), watch_(watch) {}
  std::string name() const override { return "watch"; }
  void on_step_end(tessera::Trainer& trainer, const tessera::StepResult& result) override {
    watch_({trainer.epoch(), trainer.step() - 1, steps_, result.loss});
  }

 private:
  std::int64_t steps_;
  const std::function<void(const Step&)>& watch_;
};

}  // namespace

WindNet train(const WindsData& data, const TrainingOptions& options,
              const std::function<void(const Step&)>& watch) {
  torch::manual_seed(options.seed);
  NetworkOptions shape = options.network;
  shape.input = data.channels();
  WindNet network(shape), average(shape);
  network->to(data.dtype());
  average->to(data.dtype());
  tessera::distribute_module(*average, data.mesh());

  const auto loader = data.loader(options.seed);
  const auto batches = tessera::batches_of(*loader, [&](const tessera::LoadedBatch& loaded) {
    const Samples samples = data.samples_of(loaded);
    tessera::MicroBatch batch;
    batch.tensors = {samples.input, samples.target};
    batch.rows = batch.real = loaded.real;
    return batch;
  });
  Training task(network, data, options);
  const auto mean = std::make_shared<tessera::Ema>([](std::int64_t step) {
    return std::min(0.98, static_cast<double>(step - 1) / static_cast<double>(step + 9));
  });
  tessera::TrainerOptions how;
  // Every rank has all weights. Gradients come out of backward summed over the mesh.
  how.strategy = std::make_shared<tessera::MeshStrategy>(
      data.mesh(), tessera::NamedPlacements{},
      std::vector<tessera::Placement>{tessera::Shard(0), tessera::Shard(2)});
  how.max_epochs = options.epochs;
  how.callbacks = {mean, std::make_shared<Watch>(task.steps(), watch)};
  how.checkpoint.folder = options.checkpoint;
  how.session.signals = !options.checkpoint.empty();  // to save; without a folder they end it
  if (!options.checkpoint.empty()) {
    how.checkpoint.resume = true;
    how.callbacks.push_back(std::make_shared<tessera::CheckpointCallback>(
        tessera::CheckpointCallbackOptions{.every_epochs = 1}));
  }
  const auto done = tessera::Trainer(how).fit(task, batches);
  if (done.stop != tessera::Stop::none)
    throw tessera::Error(tessera::concat("stopped by ", tessera::to_string(done.stop), " after ",
                                         done.steps, " steps; start it again to go on"));

  const torch::NoGradGuard no_grad;
  for (const auto& item : average->named_parameters())
    at::Tensor(item.value()).copy_(mean->average().at("network." + item.key()));
  return average;
}

at::Tensor forecast(WindNet& network, const WindsData& data, Months months) {
  const torch::NoGradGuard no_grad;
  return data.to_winds(tessera::to_local(network->forward(data.forecast_input(months).input)),
                       data.own(months));
}

}  // namespace winds
