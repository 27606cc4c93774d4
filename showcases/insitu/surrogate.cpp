#include "surrogate.h"

#include <optional>

#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/comm/job/mpi_interop.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace insitu {

SurrogateImpl::SurrogateImpl(std::int64_t width) {
  const auto conv = [](std::int64_t in, std::int64_t out, std::int64_t kernel) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                                 .padding(kernel / 2)
                                 .padding_mode(torch::kCircular)
                                 .bias(false));
  };
  linear_ = register_module("linear", conv(fields, fields, 7));
  first_ = register_module("first", conv(fields, width, 5));
  last_ = register_module("last", conv(width, fields, 3));
  const torch::NoGradGuard no_grad;
  linear_->weight.zero_();
  last_->weight.mul_(0.1);
}

at::Tensor SurrogateImpl::forward(const at::Tensor& state) {
  const at::Tensor still =
      torch::tensor({1.0, 0.0, 0.0}, state.scalar_type()).view({1, fields, 1, 1});
  const at::Tensor waves = state - still, scale = waves.square().mean().sqrt();
  const at::Tensor x = waves / scale;
  return state + scale * (linear_(x) + last_(torch::gelu(first_(x))));
}

SolverMesh::SolverMesh(const ShallowWater& solver)
    : manager(tessera::DistributedManager::initialize({.mpi = tessera::mpi_world(solver.comm())})),
      mesh(manager.mesh({{"down", solver.grid()[0]}, {"across", solver.grid()[1]}})) {
  std::int64_t rows = 0, columns = 0;
  for (const auto n : solver.block_rows()) rows += n;
  for (const auto n : solver.block_columns()) columns += n;
  spec =
      tessera::ShardSpec(mesh, {1, fields, rows, columns}, {tessera::Shard(2), tessera::Shard(3)},
                         {{2, solver.block_rows()}, {3, solver.block_columns()}});
}

at::Tensor SolverMesh::view(ShallowWater& solver) const {
  return tessera::from_blob(solver.state(), spec, at::kDouble);
}

Score train_online(ShallowWater& solver, const SolverMesh& on, const Training& training,
                   std::int64_t judged, const std::function<void(std::int64_t, double)>& watch) {
  Score score;
  score.mass_before = solver.mass();
  torch::manual_seed(1);  // the same weights on every rank
  Surrogate network;
  network->to(at::kDouble);
  tessera::distribute_module(*network, on.mesh);
  torch::optim::Adam optimizer(network->parameters(),
                               torch::optim::AdamOptions(training.learning_rate));

  const at::Tensor state = on.view(solver);  // the solver's memory, now and later
  const auto advance = [&] {
    for (std::int64_t i = 0; i < training.steps_a_window; ++i) solver.step();
  };
  // The loop is the solver's; checkpoints are the library's.
  std::optional<tessera::Checkpointer> checkpoints;
  std::int64_t begin = 0;
  const auto everything = [&] {
    tessera::CheckpointState all;
    all.add("network.", *network).add("solver", state);
    return all;
  };
  if (!training.folder.empty()) {
    checkpoints.emplace(on.manager, training.folder, tessera::CheckpointOptions{.keep_last = 2});
    if (const auto latest = checkpoints->to_resume()) {
      const tessera::CheckpointReader saved(on.manager.world(), training.folder, *latest);
      auto all = everything();
      saved.load(all, {.allow_extra = true});  // into the solver's own memory
      tessera::load_optimizer(saved, "adam.", optimizer, *network);
      begin = all.get_integer("windows");
      score.mass_before = solver.mass();
    }
  }
  for (std::int64_t w = begin; w < training.windows; ++w) {
    const at::Tensor before = state.clone();  // the solver is about to overwrite it
    advance();
    double loss_of_window = 0;
    for (std::int64_t u = 0; u < training.updates; ++u) {
      optimizer.zero_grad();
      // What the solver changed is the measure: states hardly differ from window to window.
      const at::Tensor loss =
          torch::mse_loss(network(before), state) / torch::mse_loss(before, state);
      loss.backward();
      optimizer.step();
      loss_of_window = loss.item<double>();
      score.losses.push_back(loss_of_window);
    }
    if (watch) watch(w, loss_of_window);
    if (checkpoints && ((w + 1) % training.save_every == 0 || w + 1 == training.windows)) {
      auto all = everything();
      all.set_integer("windows", w + 1);
      tessera::add_optimizer(all, "adam.", optimizer, *network);
      checkpoints->start_save(tessera::concat("window-", w + 1), all);
    }
  }
  if (checkpoints) checkpoints->wait();

  const auto forecast = [&](const at::Tensor& before) { return network(before); };
  online::judge(score, state, judged, forecast, advance);
  score.mass_after = solver.mass();
  return score;
}

}  // namespace insitu
