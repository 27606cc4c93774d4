#include "training.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace relief {

namespace {

// Columns are whole on every rank: no communication.
at::Tensor trained_on(const at::Tensor& field) { return field.narrow(3, 0, field.size(3) / 3 * 2); }
at::Tensor held_out(const at::Tensor& field) {
  return field.narrow(3, field.size(3) / 3 * 2, field.size(3) - field.size(3) / 3 * 2);
}

}  // namespace

ReliefNet train(const Field& field, const TrainingOptions& options,
                const std::function<void(std::int64_t step, double loss)>& watch) {
  torch::manual_seed(options.seed);
  ReliefNet network(options.network);
  network->to(field.fine().scalar_type());
  tessera::distribute_module(*network, field.mesh());
  torch::optim::Adam optimizer(network->parameters(),
                               torch::optim::AdamOptions(options.learning_rate));
  at::Tensor coarse;
  {
    const torch::NoGradGuard no_grad;
    coarse = network->coarsen(field.fine());
  }
  const at::Tensor truth = trained_on(field.fine());
  for (std::int64_t step = 0; step < options.steps; ++step) {
    for (auto& group : optimizer.param_groups())
      group.options().set_lr(options.learning_rate * 0.5 *
                             (1 + std::cos(std::numbers::pi * static_cast<double>(step) /
                                           static_cast<double>(options.steps))));
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(trained_on(network(coarse)), truth);
    loss.backward();
    optimizer.step();
    watch(step, 1e6 * loss.item<double>());
  }
  return network;
}

Score score(ReliefNet& network, const Field& field) {
  const torch::NoGradGuard no_grad;
  // Area goes with the cosine of the latitude; rows of a rank need no other's.
  const tessera::Interval own = field.cut().interval(field.mesh().coordinate()[0]);
  const at::Tensor weight = (at::arange(own.begin, own.end, at::kDouble) /
                             static_cast<double>(field.rows() - 1) * std::numbers::pi)
                                .sin()
                                .view({1, 1, -1, 1});
  const at::Tensor coarse = network->coarsen(field.fine());
  const auto rms = [&](const at::Tensor& drawn) {
    const at::Tensor squares =
        (tessera::to_local(held_out(drawn)) - tessera::to_local(held_out(field.fine())))
            .to(at::kDouble)
            .square();
    const at::Tensor sums =
        at::stack({(squares * weight).sum(), weight.sum() * static_cast<double>(squares.size(3))});
    field.mesh().group("domain").all_reduce(sums);
    return 1000 * std::sqrt((sums[0] / sums[1]).item<double>());
  };
  return {rms(network->interpolate(coarse)), rms(network(coarse))};
}

std::vector<at::Tensor> look(ReliefNet& network, const Field& field, std::int64_t row,
                             std::int64_t column, std::int64_t rows, std::int64_t columns) {
  const torch::NoGradGuard no_grad;
  const auto window = [](const at::Tensor& t, std::int64_t y, std::int64_t x, std::int64_t h,
                         std::int64_t w) {
    return 1000 * tessera::full_tensor(t.narrow(2, y, h).narrow(3, x, w)).squeeze(0).squeeze(0);
  };
  const auto fine = [&](const at::Tensor& t) { return window(t, row, column, rows, columns); };
  const at::Tensor coarse = network->coarsen(field.fine());
  const at::Tensor seen =
      window(coarse, row / factor, column / factor, rows / factor, columns / factor);
  return {seen.repeat_interleave(factor, 0).repeat_interleave(factor, 1),
          fine(network->interpolate(coarse)), fine(network(coarse)), fine(field.fine())};
}

}  // namespace relief
