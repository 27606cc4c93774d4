// Stages with buffers, batch statistics, complex activations, masks and sparse gradients: what a
// pipeline makes of them equals one process.

#include <gtest/gtest.h>

#include "pipeline_support.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

struct Part {
  std::shared_ptr<torch::nn::Module> module;
  StageFunction forward;
};

double mean_weight(const std::vector<double>& weights) {
  double sum = 0;
  for (const double w : weights) sum += w;
  return sum;
}

/// Two steps of a pipeline with the parts, one stage a rank, and of one process: loss, gradients
/// and buffers.
void compare_parts(const PipelineSchedule& schedule, const std::function<Part(int)>& make,
                   const PipelineLoss& loss, const PipelineBatch& batch,
                   const StageOptions& options = {}) {
  const int stages = schedule.stages();
  std::vector<Part> alone;
  for (int s = 0; s < stages; ++s) {
    alone.push_back(make(s));
    test::fill(*alone.back().module, 60 + static_cast<std::uint64_t>(s));
  }
  double expected = 0;
  for (int step = 0; step < 2; ++step) {
    expected = 0;
    for (std::size_t k = 0; k < batch.inputs.size(); ++k) {
      std::vector<at::Tensor> now = batch.inputs[k];
      for (Part& part : alone) now = part.forward(now);
      if (batch.weights[k] == 0) continue;
      const at::Tensor one =
          loss(now, batch.targets[k]) * (batch.weights[k] / mean_weight(batch.weights));
      one.backward();
      expected += one.item<double>();
    }
  }
  test::on_threads(schedule.ranks(), [&](DistributedManager& manager) {
    const auto mesh = manager.mesh(test::mapped({{"pipe", schedule.ranks()}}));
    std::map<int, Part> mine;
    std::vector<std::shared_ptr<PipelineStage>> own;
    for (const int s : schedule.stages_of(mesh.coordinate()[0])) {
      const Part part = make(s);
      test::fill(*part.module, 60 + static_cast<std::uint64_t>(s));
      mine.emplace(s, part);
      own.push_back(make_stage(part.module, part.forward, options));
    }
    Pipeline pipeline(mesh, "pipe", schedule, own, loss);
    pipeline.step(batch);
    EXPECT_NEAR(pipeline.step(batch).loss, expected, 1e-12 * std::abs(expected));
    for (const auto& [s, part] : mine) {
      const auto got = part.module->named_parameters(), right = alone[s].module->named_parameters();
      for (const auto& p : got) {
        const at::Tensor grad = right[p.key()].grad();
        ASSERT_EQ(p.value().grad().defined(), grad.defined()) << s << p.key();
        if (!grad.defined()) continue;
        EXPECT_LE(test::difference(p.value().grad().to_dense(), grad.to_dense(), 1e-6), 1e-11)
            << "stage " << s << ", " << p.key();
      }
      const auto buffers = part.module->buffers(), references = alone[s].module->buffers();
      for (std::size_t i = 0; i < buffers.size(); ++i)
        EXPECT_LE(test::difference(buffers[i], references[i]), 1e-12) << s << ", buffer " << i;
    }
  });
}

PipelineBatch rows(int micro_batches, std::int64_t each, std::int64_t columns) {
  test::seed(31);
  PipelineBatch batch;
  for (int k = 0; k < micro_batches; ++k) {
    batch.inputs.push_back({test::randn({each + k % 2, columns}, at::kDouble)});
    batch.targets.push_back({test::randn({each + k % 2, columns}, at::kDouble)});
    batch.weights.push_back(static_cast<double>(each + k % 2));
  }
  return batch;
}

at::Tensor mse(const std::vector<at::Tensor>& y, const std::vector<at::Tensor>& t) {
  return torch::mse_loss(y[0], t[0]);
}

// Tables that are multiplied in, and running statistics, whose second forward must not count.
TEST(PipelineModules, BuffersAreThoseOfOneProcess) {
  const auto make = [](int s) -> Part {
    struct Net : torch::nn::Module {
      Net() {
        linear = register_module("linear", torch::nn::Linear(4, 4));
        norm = register_module("norm", torch::nn::BatchNorm1d(4));
        table = register_buffer("table", torch::arange(4) + 1.0);
        calls = register_buffer("calls", torch::zeros({1}));
        to(torch::kDouble);
      }
      torch::nn::Linear linear{nullptr};
      torch::nn::BatchNorm1d norm{nullptr};
      at::Tensor table, calls;
    };
    const auto net = std::make_shared<Net>();
    return {net, [net, s](const std::vector<at::Tensor>& x) {
              net->calls.add_(1);
              const at::Tensor h = torch::tanh(net->linear(x[0]) * net->table);
              return std::vector<at::Tensor>{s % 2 ? net->norm(h) : net->norm(h) * net->table};
            }};
  };
  for (const bool recompute : {false, true}) {
    compare_parts(schedule_1f1b(2, 3), make, mse, rows(3, 3, 4), {.recompute = recompute});
    compare_parts(schedule_zero_bubble_h1(3, 4), make, mse, rows(4, 2, 4),
                  {.recompute = recompute});
  }
}

TEST(PipelineModules, ComplexActivationsCarryGradients) {
  const auto make = [](int s) -> Part {
    torch::nn::Linear net(4, 4);
    net->to(torch::kDouble);
    return {net.ptr(), [net, s](const std::vector<at::Tensor>& x) mutable {
              if (s == 0) return std::vector<at::Tensor>{torch::fft_rfft(net(x[0]))};
              return std::vector<at::Tensor>{net(torch::fft_irfft(x[0] * 2.0, 4))};
            }};
  };
  for (const bool recompute : {false, true})
    compare_parts(schedule_zero_bubble_h1(2, 3), make, mse, rows(3, 2, 4),
                  {.recompute = recompute});
}

// A micro-batch that counts nothing has a loss of 0 / 0 over its mask.
TEST(PipelineModules, AMicroBatchOfWeightZeroAddsNothing) {
  const auto make = [](int) -> Part {
    torch::nn::Linear net(4, 4);
    net->to(torch::kDouble);
    return {net.ptr(), [net](const std::vector<at::Tensor>& x) mutable {
              return std::vector<at::Tensor>{torch::tanh(net(x[0]))};
            }};
  };
  PipelineBatch batch = rows(3, 2, 4);
  for (auto& targets : batch.targets) targets.push_back(at::ones_like(targets[0]));
  batch.targets[1][1].zero_();
  batch.weights = {8, 0, 8};
  const PipelineLoss masked = [](const auto& y, const auto& t) {
    return ((y[0] - t[0]).square() * t[1]).sum() / t[1].sum();
  };
  for (const bool recompute : {false, true}) {
    compare_parts(schedule_1f1b(2, 3), make, masked, batch, {.recompute = recompute});
    compare_parts(schedule_zero_bubble_h1(2, 3), make, masked, batch, {.recompute = recompute});
  }
}

// Micro-batches of other lengths: outputs that cannot be joined are given one by one.
TEST(PipelineModules, OutputsOfOtherShapesAreKeptApart) {
  test::on_threads(2, [&](DistributedManager& manager) {
    torch::nn::Conv1d net(torch::nn::Conv1dOptions(2, 2, 3));
    net->to(torch::kDouble);
    Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", schedule_1f1b(2, 2), {make_stage(net)},
                      [](const auto& y, const auto&) { return y[0].square().mean(); },
                      {.keep_outputs = true});
    PipelineBatch batch;
    for (const std::int64_t length : {8, 11}) {
      batch.inputs.push_back({at::ones({1, 2, length}, at::kDouble)});
      batch.targets.push_back({at::ones({1}, at::kDouble)});
    }
    for (const auto& result : {pipeline.step(batch), pipeline.evaluate(batch)}) {
      if (manager.rank() == 0) {
        EXPECT_TRUE(result.micro_batches.empty());
        continue;
      }
      ASSERT_EQ(result.outputs.size(), 1u);
      EXPECT_FALSE(result.outputs[0].defined());
      ASSERT_EQ(result.micro_batches.size(), 2u);
      EXPECT_EQ(result.micro_batches[1][0].size(2), 7);
    }
    EXPECT_EQ(pipeline.steps(), 1u);
  });
}

// A sparse gradient on one of the ranks that share a table becomes a dense one on both.
TEST(PipelineModules, ATiedTableMayHaveSparseGradients) {
  const at::Tensor words = at::arange(6) % 5,
                   table = at::arange(15).reshape({5, 3}).to(at::kDouble);
  at::Tensor one = (table * 0.1).requires_grad_();
  torch::nll_loss(torch::log_softmax(torch::embedding(one, words).matmul(one.t()), 1), words)
      .backward();
  test::on_threads(2, [&](DistributedManager& manager) {
    struct Holder : torch::nn::Module {
      explicit Holder(const at::Tensor& t) : table(register_parameter("table", t)) {}
      at::Tensor table;
    };
    const auto holder = std::make_shared<Holder>(table * 0.1);
    const auto mesh = manager.mesh(test::mapped({{"pipe", 2}}));
    const bool first = mesh.coordinate()[0] == 0;
    const auto stage = make_stage(holder, [=](const std::vector<at::Tensor>& x) {
      if (first)
        return std::vector<at::Tensor>{torch::embedding(holder->table, x[0], -1, false, true)};
      return std::vector<at::Tensor>{torch::log_softmax(x[0].matmul(holder->table.t()), 1)};
    });
    Pipeline pipeline(mesh, "pipe", schedule_1f1b(2, 2), {stage},
                      [](const auto& y, const auto& t) { return torch::nll_loss(y[0], t[0]); },
                      {.tied = {{"table", {holder->table}}}});
    pipeline.step(split_batch({words}, {words}, 2));
    EXPECT_LE(test::difference(holder->table.grad(), one.grad(), 1e-6), 1e-12);
  });
}

// The loss of a sharded tensor: every rank that shares the samples reads it, one counts it.
TEST(PipelineModules, ALossOfShardedTensorsCountsOnce) {
  test::on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh(test::mapped({{"domain", 2}, {"pipe", 2}}));
    const auto domain = manager.mesh(mesh.mesh().submesh({"domain"}, manager.rank()));
    torch::nn::Linear net(3, 3);
    net->to(torch::kDouble);
    test::fill(*net, 8);
    const auto stage = make_stage(net);
    Pipeline pipeline(mesh, "pipe", schedule_1f1b(2, 2), {stage},
                      [&](const auto& y, const auto& t) {
                        const auto whole = from_local(y[0], domain, {Shard(0)});
                        const auto right = from_local(t[0], domain, {Shard(0)});
                        return (whole - right).square().mean();
                      },
                      {.sample_axes = std::vector<std::string>{}});
    test::seed(4);
    const at::Tensor x = test::randn({8, 3}, at::kDouble), y = test::randn({8, 3}, at::kDouble);
    PipelineBatch batch = split_batch({x}, {y}, 2);
    for (auto* lists : {&batch.inputs, &batch.targets}) {
      for (auto& list : *lists) list[0] = list[0].narrow(0, 2 * mesh.coordinate()[0], 2);
    }
    const double expected = (net(net(x)) - y).square().mean().item<double>();
    EXPECT_NEAR(pipeline.evaluate(batch).loss, expected, 1e-12);
  });
}

// How long an action takes depends on what was done before it.
TEST(PipelineModules, CostsAreMeasuredInThePipelinesOwnOrder) {
  test::on_threads(2, [](DistributedManager& manager) {
    torch::nn::Linear layer(4, 4);
    const auto order = std::make_shared<std::string>();
    const auto stage = make_stage(layer.ptr(), [layer, order](const auto& inputs) mutable {
      *order += 'F';
      const at::Tensor made = layer->forward(inputs[0]);
      made.register_hook([order](const at::Tensor&) { *order += 'B'; });
      return std::vector<at::Tensor>{made.tanh()};
    });
    Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", schedule_1f1b(2, 4), {stage},
                      [](const auto& o, const auto& t) { return torch::mse_loss(o[0], t[0]); });
    const auto x = torch::randn({8, 4});
    const PipelineCosts costs = pipeline.measure(split_batch({x}, {x}, 4), 1);
    EXPECT_EQ(order->substr(0, 8), manager.rank() == 0 ? "FFBFBFBB" : "FBFBFBFB");
    // Halves of backwards come from a schedule that has them.
    for (const StageCosts& one : costs.stages) {
      EXPECT_GT(one.forward, 0);
      EXPECT_GT(*one.backward, 0);
      EXPECT_GT(one.input_gradient + one.weight_gradient, 0);
    }
  });
}

}  // namespace
}  // namespace tessera
