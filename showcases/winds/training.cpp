#include "training.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace winds {

at::Tensor squared_error(const at::Tensor& forecast, const at::Tensor& target,
                         const at::Tensor& sigma) {
  return ((forecast - target) * sigma).square().mean();
}

WindNet train(const WindsData& data, const TrainingOptions& options,
              const std::function<void(const Step&, WindNet& average)>& watch) {
  torch::manual_seed(options.seed);
  NetworkOptions shape = options.network;
  shape.input = data.channels();
  WindNet network(shape), average(shape);
  const auto loader = data.loader(options.seed);
  const at::ScalarType dtype = data.dtype();
  network->to(dtype);
  average->to(dtype);

  // Every rank has all weights. Gradients come out of backward summed over the mesh.
  tessera::distribute_module(*network, data.mesh());
  tessera::distribute_module(*average, data.mesh());
  torch::optim::AdamW optimizer(
      network->parameters(),
      torch::optim::AdamWOptions(options.learning_rate).weight_decay(options.weight_decay));
  const std::vector<tessera::Placement> replicated(data.mesh().layout().dims());
  const at::Tensor sigma =
      tessera::distribute_tensor(data.statistics().sigma.to(dtype), data.mesh(), replicated);
  const std::int64_t steps = options.epochs * data.steps_per_epoch();
  std::int64_t number = 0;
  for (std::int64_t epoch = 0; epoch < options.epochs; ++epoch)
    for (std::int64_t step = 0; step < data.steps_per_epoch(); ++step, ++number) {
      const double done = static_cast<double>(number) / static_cast<double>(steps);
      const double warm = std::min(1.0, static_cast<double>(number + 1) / 10);
      for (auto& parameters : optimizer.param_groups())
        parameters.options().set_lr(options.learning_rate * warm * 0.5 *
                                    (1 + std::cos(std::numbers::pi * done)));

      const Samples batch = data.samples_of(loader->next());
      optimizer.zero_grad();
      const at::Tensor loss = squared_error(network(batch.input), batch.target, sigma);
      loss.backward();
      optimizer.step();

      const torch::NoGradGuard no_grad;
      const double keep =
          std::min(0.98, static_cast<double>(number) / static_cast<double>(number + 10));
      auto from = network->parameters(), to = average->parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].lerp_(from[i], 1 - keep);
      watch({epoch, number, steps, loss.item<double>()}, average);
    }
  return average;
}

at::Tensor forecast(WindNet& network, const WindsData& data, Months months) {
  const torch::NoGradGuard no_grad;
  return data.to_winds(tessera::to_local(network->forward(data.forecast_input(months).input)),
                       data.own(months));
}

}  // namespace winds
