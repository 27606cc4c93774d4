// Stages whose parameters are sharded over the ranks beside them: by fully_shard(), by a
// tensor-parallel plan, with sharded tensors crossing from stage to stage. Everything equals one
// process.

#include <gtest/gtest.h>

#include <map>

#include "pipeline_support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/ops/attention/packed.h"

namespace tessera {
namespace {

torch::nn::Sequential sharded_net(int stage) {
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 5));
  net->to(torch::kDouble);
  test::fill(*net, 40 + static_cast<std::uint64_t>(stage));
  return net;
}

at::Tensor squared(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& targets) {
  return torch::mse_loss(outputs[0], targets[0]);
}

// ---- fully sharded ----

// Calls of this rank in a step.
struct Calls {
  std::map<std::string, int> gathers;
  int scatters = 0;
  bool operator==(const Calls&) const = default;
};

Calls calls_of(const std::vector<CommEvent>& events) {
  Calls calls;
  for (const CommEvent& event : events) {
    if (event.name.starts_with("gather of unit")) ++calls.gathers[event.name];
    calls.scatters += event.operation == "reduce_scatter" ? 1 : 0;
  }
  return calls;
}

// Loss and gradients are those of one process, in three steps. Returns the calls of the last one.
Calls run_sharded(DistributedManager& manager, const PipelineSchedule& schedule,
                  const PipelineOptions& options = {}) {
  const int stages = schedule.stages(), micro_batches = schedule.micro_batches;
  test::seed(9);
  const at::Tensor x = test::randn({4 * micro_batches, 5}, at::kDouble),
                   y = test::randn({4 * micro_batches, 5}, at::kDouble);
  at::Tensor out = x;
  std::vector<torch::nn::Sequential> whole;
  for (int s = 0; s < stages; ++s) {
    whole.push_back(sharded_net(s));
    out = whole.back()->forward(out);
  }
  const at::Tensor expected = torch::mse_loss(out, y);
  expected.backward();

  const auto mesh = manager.mesh(test::mapped({{"data", 2}, {"pipe", 2}}));
  const auto shards = stage_mesh(mesh, "pipe");
  std::map<int, torch::nn::Sequential> mine;
  std::vector<std::shared_ptr<PipelineStage>> own;
  for (const int s : schedule.stages_of(mesh.coordinate()[1])) {
    auto net = sharded_net(s);
    fully_shard(*net, shards, {.coalesce_bytes = 0});
    own.push_back(make_stage(net.ptr(),
                             [=](const std::vector<at::Tensor>& in) mutable {
                               return std::vector<at::Tensor>{
                                   to_local(net->forward(from_local(in[0], shards, {Shard(0)})))};
                             },
                             {.gather = gather_parameters, .release = release_parameters}));
    mine.emplace(s, net);
  }
  Pipeline pipeline(mesh, "pipe", schedule, own, squared, options);
  // Of each micro-batch of four rows one data rank has three, the other one.
  PipelineBatch batch = split_batch({x}, {y}, micro_batches);
  const bool first = mesh.coordinate()[0] == 0;
  for (auto* lists : {&batch.inputs, &batch.targets}) {
    for (auto& list : *lists) list[0] = first ? list[0].narrow(0, 0, 3) : list[0].narrow(0, 3, 1);
  }
  const PipelineCosts costs = pipeline.measure(batch, 1);
  EXPECT_EQ(costs.stages.size(), static_cast<std::size_t>(stages));
  Calls calls;
  for (int step = 0; step < 3; ++step) {
    for (auto& [s, net] : mine) net->zero_grad();
    {
      const CommTraceScope trace(manager);
      const auto result = pipeline.step(batch);
      EXPECT_NEAR(result.loss, expected.item<double>(), 1e-12);
      calls = calls_of(trace->events());
    }
    for (auto& [s, net] : mine) {
      const auto parameters = net->parameters(), references = whole[s]->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_LE(test::difference(parameters[i].grad(), references[i].grad(), 1e-6), 1e-11)
            << "stage " << s << ", parameter " << i;
      }
    }
  }
  return calls;
}

TEST(PipelineSharded, FullyShardedStagesAreGatheredAndReducedOnceAStep) {
  for (const auto make : {&schedule_1f1b, &schedule_zero_bubble_h1, &schedule_zero_bubble_v}) {
    test::on_threads(4, [&](DistributedManager& manager) {
      const auto schedule = make(2, 5);
      const auto few = run_sharded(manager, make(2, 2)), many = run_sharded(manager, schedule);
      EXPECT_EQ(few, many);
      // Two units of each stage hold parameters; a rank's stages name them alike.
      const int held = schedule.stages() / 2;
      int gathers = 0;
      for (const auto& [name, count] : many.gathers) {
        EXPECT_EQ(count, held) << name;
        gathers += count;
      }
      EXPECT_EQ(gathers, 2 * held);
      EXPECT_EQ(many.scatters, 2 * held);
    });
  }
}

TEST(PipelineSharded, OneGatheredStageAtATimeIsRightToo) {
  test::on_threads(4, [&](DistributedManager& manager) {
    const auto calls = run_sharded(manager, schedule_interleaved(2, 2, 4), {.gathered_at_once = 1});
    int gathers = 0;
    for (const auto& [name, count] : calls.gathers) gathers += count;
    EXPECT_GT(gathers, 4);
    EXPECT_EQ(calls.scatters, 4);
  });
}

// ---- sharded tensors that cross ----

// A block with a tensor-parallel pair of layers; takes the tensors that come, and gives `skips`
// besides its output.
struct Block : torch::nn::Module {
  Block(int in, int skips) : in(in), skips(skips) {
    up = register_module("up", torch::nn::Linear(5, 7));
    down = register_module("down", torch::nn::Linear(7, 5));
    norm = register_module("norm", torch::nn::LayerNorm(std::vector<std::int64_t>{5}));
    to(torch::kDouble);
  }
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& x) {
    at::Tensor sum = x[0];
    for (int i = 1; i < in; ++i) sum = sum + x[static_cast<std::size_t>(i)];
    const at::Tensor y = sum + down(at::gelu(up(norm(sum))));
    std::vector<at::Tensor> out{y};
    for (int i = 0; i < skips; ++i) out.push_back(y.tanh());
    return out;
  }
  int in, skips;
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

struct Crossing {
  PipelineSchedule schedule;
  std::vector<PipelineSkip> skips;
  /// Of the samples, and of the layers.
  int data = 1, tensor = 1;
  bool sequence = false, recompute = false;

  std::shared_ptr<Block> make(int s) const {
    int in = 1, out = 0;
    for (const PipelineSkip& skip : skips) in += skip.to == s, out += skip.from == s;
    auto block = std::make_shared<Block>(in, out);
    test::fill(*block, 60 + static_cast<std::uint64_t>(s));
    return block;
  }
};

// Rows of a micro-batch of one of the data ranks: ragged, and with empty ones where there are two.
std::int64_t rows_of(int ranks, int data, int k) {
  return ranks == 1 ? 1 + k % 3 : (2 * data + k) % 3;
}

void run_crossing(DistributedManager& manager, const Crossing& c) {
  const int stages = c.schedule.stages(), micro_batches = c.schedule.micro_batches;
  test::seed(31);
  std::vector<std::vector<at::Tensor>> x(static_cast<std::size_t>(micro_batches)), y = x;
  std::vector<at::Tensor> all_x, all_y;
  for (int k = 0; k < micro_batches; ++k) {
    for (int d = 0; d < c.data; ++d) {
      x[k].push_back(test::randn({rows_of(c.data, d, k), 3, 5}, at::kDouble));
      y[k].push_back(test::randn({rows_of(c.data, d, k), 3, 5}, at::kDouble));
      all_x.push_back(x[k].back()), all_y.push_back(y[k].back());
    }
  }
  // One process.
  std::vector<std::shared_ptr<Block>> whole;
  std::vector<at::Tensor> now{at::cat(all_x)}, skipped(c.skips.size());
  for (int s = 0; s < stages; ++s) {
    whole.push_back(c.make(s));
    for (std::size_t i = 0; i < c.skips.size(); ++i)
      if (c.skips[i].to == s) now.push_back(skipped[i]);
    const auto out = whole.back()->forward(now);
    std::size_t next = 1;
    for (std::size_t i = 0; i < c.skips.size(); ++i)
      if (c.skips[i].from == s) skipped[i] = out[next++];
    now = {out[0]};
  }
  const at::Tensor expected = torch::mse_loss(now[0], at::cat(all_y));
  expected.backward();

  const auto mesh = manager.mesh(
      test::mapped({{"pipe", c.schedule.ranks()}, {"data", c.data}, {"tensor", c.tensor}}));
  const auto stage = stage_mesh(mesh, "pipe");
  const int here = mesh.coordinate()[0], data = mesh.coordinate()[1];
  std::map<int, std::shared_ptr<Block>> mine;
  std::vector<std::shared_ptr<PipelineStage>> own;
  for (const int s : c.schedule.stages_of(here)) {
    mine[s] = c.make(s);
    TensorParallelOptions how;
    if (c.sequence) how.sequence_dim = 1;
    tensor_parallel(*mine[s], stage, {{"up", column()}, {"down", row()}}, how);
    own.push_back(make_stage(mine[s], {.recompute = c.recompute}));
  }
  Pipeline pipeline(mesh, "pipe", c.schedule, own, squared,
                    {.skips = c.skips, .sample_axes = std::vector<std::string>()});
  for (int step = 0; step < 2; ++step) {
    PipelineBatch batch;
    for (int k = 0; k < micro_batches; ++k) {
      batch.inputs.push_back({x[k][static_cast<std::size_t>(data)]});
      batch.targets.push_back({y[k][static_cast<std::size_t>(data)]});
    }
    batch = shard_batch(std::move(batch), stage, {Shard(0), Replicate()},
                        c.schedule.placement.front() == here, c.schedule.placement.back() == here);
    for (auto& [s, block] : mine) block->zero_grad();
    const auto result = pipeline.step(batch);
    EXPECT_NEAR(result.loss, expected.item<double>(), 1e-12);
    for (auto& [s, block] : mine) {
      const auto parameters = block->parameters(), references = whole[s]->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_LE(test::difference(parameters[i].grad(), references[i].grad(), 1e-6), 1e-11)
            << "stage " << s << ", parameter " << i << ", step " << step;
      }
    }
    EXPECT_NEAR(pipeline.evaluate(batch).loss, expected.item<double>(), 1e-12);
  }
}

TEST(PipelineSharded, ShardedTensorsCrossStages) {
  const auto run = [](const Crossing& c) {
    SCOPED_TRACE(concat(c.schedule.name, ", data ", c.data, ", tensor ", c.tensor,
                        c.sequence ? ", along the sequence" : "",
                        c.recompute ? ", recomputing" : ""));
    test::on_threads(c.schedule.ranks() * c.data * c.tensor,
                     [&](DistributedManager& manager) { run_crossing(manager, c); });
  };
  for (const bool sequence : {false, true}) {
    run({schedule_1f1b(2, 3), {}, 1, 2, sequence});
    run({schedule_zero_bubble_h1(2, 4), {}, 1, 2, sequence});
    run({schedule_zero_bubble_v(2, 3), {{0, 3}}, 1, 2, sequence});
  }
  run({schedule_zero_bubble_h1(2, 4), {}, 2, 1});
  run({schedule_interleaved(2, 2, 4), {{0, 3}, {0, 2}}, 2, 1});
  run({schedule_1f1b(3, 3), {{0, 2}}, 1, 1});
  run({schedule_1f1b(2, 3), {}, 2, 1, false, true});
}

// ---- packed documents ----

// Attention with its heads over the axis `tensor` and its tokens over `context`; the documents'
// lengths cross the stages beside what they hold.
struct PackedBlock : torch::nn::Module {
  PackedBlock() {
    for (const char* name : {"q", "k", "v", "out"}) register_module(name, torch::nn::Linear(8, 8));
    to(torch::kDouble);
  }
  at::Tensor apply(const char* name, const at::Tensor& x) {
    return named_children()[name]->as<torch::nn::Linear>()->forward(x);
  }
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& in) {
    const auto heads = [&](const char* name) {
      return apply(name, in[0]).view({1, in[0].size(1), 4, 2}).transpose(1, 2);
    };
    const at::Tensor lengths = is_sharded(in[1]) ? to_local(in[1]) : in[1];
    const auto* first = lengths.const_data_ptr<std::int64_t>();
    const at::Tensor y = packed_attention(heads("q"), heads("k"), heads("v"),
                                          {{first, first + lengths.numel()}}, {.causal = true});
    return {in[0] + apply("out", y.transpose(1, 2).reshape(in[0].sizes())), in[1]};
  }
};

void run_packed(DistributedManager& manager, const PipelineSchedule& schedule, int tensor) {
  const std::vector<std::vector<std::int64_t>> lengths{{3, 8, 1}, {12}, {1, 1, 0, 10}, {6, 2, 4}};
  const auto mesh =
      manager.mesh(test::mapped({{"pipe", schedule.ranks()}, {"context", 2}, {"tensor", tensor}}));
  const auto stage = stage_mesh(mesh, "pipe");
  std::vector<std::shared_ptr<PackedBlock>> whole;
  std::map<int, std::shared_ptr<PackedBlock>> mine;
  std::vector<std::shared_ptr<PipelineStage>> own;
  const auto make = [](int s) {
    auto block = std::make_shared<PackedBlock>();
    test::fill(*block, 80 + static_cast<std::uint64_t>(s));
    return block;
  };
  for (int s = 0; s < schedule.stages(); ++s) whole.push_back(make(s));
  for (const int s : schedule.stages_of(mesh.coordinate()[0])) {
    mine[s] = make(s);
    tensor_parallel(*mine[s], stage,
                    {{"q", column(4)}, {"k", column(4)}, {"v", column(4)}, {"out", row(4)}});
    own.push_back(make_stage(mine[s]));
  }
  Pipeline pipeline(mesh, "pipe", schedule, own, squared,
                    {.sample_axes = std::vector<std::string>()});
  PipelineBatch batch;
  double expected = 0;
  for (const auto& documents : lengths) {
    test::seed(90 + batch.inputs.size());
    const std::vector<std::int64_t> shape{1, 12, 8};
    const at::Tensor x = test::randn(shape, at::kDouble), y = test::randn(shape, at::kDouble),
                     of = at::tensor(documents, at::kLong);
    std::vector<at::Tensor> now{x, of};
    for (const auto& block : whole) now = block->forward(now);
    const at::Tensor loss = torch::mse_loss(now[0], y) / static_cast<double>(lengths.size());
    loss.backward();
    expected += loss.item<double>();
    // The cut is another one for each micro-batch.
    const auto cut = cut_documents({documents}, 2, {.causal = true, .token_cost = 2});
    const ShardSpec lies(stage, shape, {Shard(1), Replicate()}, {{1, cut.sizes}});
    batch.inputs.push_back({distribute_tensor(x, lies), of});
    batch.targets.push_back({distribute_tensor(y, lies)});
  }
  for (int step = 0; step < 2; ++step) {
    for (auto& [s, block] : mine) block->zero_grad();
    EXPECT_NEAR(pipeline.step(batch).loss, expected, 1e-12);
    for (auto& [s, block] : mine) {
      const auto parameters = block->parameters(), references = whole[s]->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        // That of the bias of the keys is 0 to round-off.
        EXPECT_LE(test::difference(parameters[i].grad(), references[i].grad(), 1e-3), 1e-11)
            << "stage " << s << ", parameter " << i << ", step " << step;
    }
  }
}

TEST(PipelineSharded, PackedDocumentsOverTokensAndHeadsInAStage) {
  for (const int tensor : {1, 2}) {
    test::on_threads(4 * tensor, [&](DistributedManager& manager) {
      run_packed(manager, schedule_1f1b(2, 4), tensor);
      run_packed(manager, schedule_zero_bubble_v(2, 4), tensor);
    });
  }
}

TEST(PipelineSharded, ATensorOfAnotherMeshIsRefused) {
  test::on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}, {"data", 1}});
    // Of the pipeline's own axis.
    const auto wrong = manager.mesh({{"pipe", 2}});
    torch::nn::Linear net(3, 3);
    const auto stage = make_stage(net.ptr(), [&](const std::vector<at::Tensor>& x) {
      const at::Tensor y = net(x[0]);
      return std::vector<at::Tensor>{
          manager.rank() == 0 ? from_local(y, ShardSpec::replicated(wrong, y.sizes().vec())) : y};
    });
    Pipeline pipeline(mesh, "pipe", schedule_1f1b(2, 2), {stage}, squared,
                      {.sample_axes = std::vector<std::string>()});
    const at::Tensor x = at::ones({4, 3});
    EXPECT_THROW(stage_mesh(wrong, "pipe"), InvalidArgument);
    EXPECT_THROW(split_batch({from_local(x, stage_mesh(mesh, "pipe"), {Shard(0)})}, {}, 2),
                 InvalidArgument);
    try {
      pipeline.step(split_batch({x}, {x}, 2));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("stage_mesh(mesh, \"pipe\")"), std::string::npos)
          << e.what();
      EXPECT_NE(std::string(e.what()).find("0F0 (stage 0, micro-batch 0)"), std::string::npos)
          << e.what();
    }
    manager.world().barrier();
  });
}

// First and last stage share a table whose columns are sharded; the norm counts it once.
TEST(PipelineSharded, TiedShardedWeightsGetTheSumOfTheirGradients) {
  struct Holder : torch::nn::Module {
    explicit Holder(const at::Tensor& t) : table(register_parameter("table", t)) {}
    at::Tensor table;
  };
  test::seed(5);
  const at::Tensor table = test::randn({6, 5}, at::kDouble);
  const at::Tensor words = test::randint(6, {7});
  const auto score = [](const at::Tensor& y, const at::Tensor& w) {
    return torch::log_softmax(y.matmul(w.t()), 1);
  };
  const at::Tensor one = table.clone().requires_grad_();
  torch::nll_loss(score(torch::embedding(one, words).tanh(), one), words).backward();
  test::on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}, {"tensor", 2}});
    const auto stage = stage_mesh(mesh, "pipe");
    const bool first = mesh.coordinate()[0] == 0;
    const auto holder = std::make_shared<Holder>(first ? table.clone() : table + 1);
    distribute_module(*holder, stage, {{"table", {{Shard(1)}}}});
    const auto own = make_stage(holder, [=](const std::vector<at::Tensor>& x) {
      return std::vector<at::Tensor>{first ? torch::embedding(holder->table, x[0]).tanh()
                                           : score(x[0], holder->table)};
    });
    Pipeline pipeline(
        mesh, "pipe", schedule_1f1b(2, 3), {own},
        [](const auto& out, const auto& target) { return torch::nll_loss(out[0], target[0]); },
        {.tied = {{"table", {holder->table}}}, .sample_axes = std::vector<std::string>()});
    EXPECT_LE(test::difference(holder->table, table), 0);
    pipeline.step(
        shard_batch(split_batch({words}, {words}, 3), stage, {Replicate()}, first, !first));
    EXPECT_LE(test::difference(holder->table.grad(), one.grad()), 1e-12);
    EXPECT_EQ(pipeline.repeated_parameters().size(), first ? 0u : 1u);
    const double norm = clip_gradients(
        {holder->table}, manager.world(),
        {.disjoint = mesh.group("pipe"), .elsewhere = pipeline.repeated_parameters()});
    EXPECT_NEAR(norm, one.grad().norm().item<double>(), 1e-12 * norm);
  });
}

// A gradient over a divisor of the caller's, of several steps.
TEST(PipelineSharded, StepsWithADivisorAddUp) {
  test::on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}});
    test::seed(8);
    const at::Tensor x = test::randn({7, 5}, at::kDouble), y = test::randn({7, 5}, at::kDouble);
    auto first = sharded_net(0), second = sharded_net(1);
    torch::mse_loss(second->forward(first->forward(x)), y).backward();
    auto net = sharded_net(manager.rank());
    Pipeline pipeline(mesh, "pipe", schedule_1f1b(2, 2), {make_stage(net)}, squared);
    // Each forward has a scope of its own, and no backward runs in one.
    int open = 0, opened = 0;
    const auto scope = [&]() -> std::shared_ptr<void> {
      ++open, ++opened;
      return {nullptr, [&](void*) { --open; }};
    };
    net->parameters()[0].register_hook([&](const at::Tensor&) { EXPECT_EQ(open, 0); });
    const auto step = [&](std::int64_t begin, std::int64_t rows) {
      pipeline.step(split_batch({x.narrow(0, begin, rows)}, {y.narrow(0, begin, rows)}, 2),
                    {.divisor = 7.0, .forward_scope = scope});
    };
    step(0, 5);
    step(5, 2);
    step(0, 0);
    EXPECT_EQ(opened, 6);
    const auto expected = (manager.rank() == 0 ? first : second)->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(test::difference(net->parameters()[i].grad(), expected[i].grad()), 1e-11);
    EXPECT_THROW(
        pipeline.step(split_batch({x}, {y}, 2), {.divisor = manager.rank() == 0 ? 7.0 : 0.0}),
        InvalidArgument);
  });
}

TEST(PipelineSharded, RefusesDivisorsThatDiffer) {
  test::on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}});
    test::seed(8);
    const at::Tensor x = test::randn({4, 5}, at::kDouble);
    auto net = sharded_net(manager.rank());
    Pipeline pipeline(mesh, "pipe", schedule_1f1b(2, 2), {make_stage(net)}, squared);
    const auto batch = split_batch({x}, {x}, 2);
    EXPECT_THROW(pipeline.step(batch, {manager.rank() == 0 ? 7.0 : 8.0}), InvalidArgument);
    pipeline.step(batch, {7.0});
  });
}

}  // namespace
}  // namespace tessera
