// A step of a pipeline equals one process: loss, outputs and every gradient, over drawn schedules,
// placements, skips and micro-batches.

#include <gtest/gtest.h>

#include "pipeline_support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/pipeline/stage.h"
#include "tessera/schedule/passes.h"

namespace tessera {
namespace {

using test::Case;
using test::OwnStages;

void zero(const OwnStages& own) {
  for (const auto& [s, stage] : own.by_number) stage->zero_grad();
}

TEST(Pipeline, StepsEqualOneProcess) {
  test::Draw draw(7);
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const int ranks = draw.between(1, 4);
    Case c = test::draw_case(draw, ranks, seed);
    const bool keep = draw.chance(50), everywhere = draw.chance(70), dynamic = draw.chance(20);
    const auto first = test::one_process(c, 0), second = test::one_process(c, 1),
               both = test::one_process(c, 0, 2);
    SCOPED_TRACE(concat("case ", seed, ", ", ranks, " ranks, ", c.text()));
    test::on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped({{"pipe", ranks}}));
      OwnStages own(c, mesh.coordinate()[0]);
      Pipeline pipeline(mesh, "pipe", c.schedule, own.stages, test::mean_of,
                        {.skips = c.skips,
                         .keep_outputs = keep,
                         .loss_everywhere = everywhere,
                         .dynamic_shapes = dynamic});
      const bool last = own.by_number.contains(c.stages() - 1);
      // Shapes that are new, and shapes that are known.
      const auto result = pipeline.step(c.batch(0));
      EXPECT_LE(test::gradient_error(own.by_number, first), 1e-11);
      if (everywhere || last) {
        EXPECT_NEAR(result.loss, first.loss, 1e-12 * std::abs(first.loss));
      } else {
        EXPECT_TRUE(std::isnan(result.loss));
      }
      EXPECT_EQ(result.outputs.empty(), !(keep && last));
      if (keep && last) {
        EXPECT_LE(test::difference(result.outputs[0], at::cat(first.outputs)), 1e-12);
      }
      zero(own);
      pipeline.step(c.batch(1));
      EXPECT_LE(test::gradient_error(own.by_number, second), 1e-11);
      EXPECT_EQ(pipeline.steps(), 2u);
      zero(own);
      pipeline.step(c.batch(0));
      pipeline.step(c.batch(1));
      EXPECT_LE(test::gradient_error(own.by_number, both), 1e-11);
      const auto seen = pipeline.evaluate(c.batch(0));
      EXPECT_EQ(seen.outputs.empty(), !last);
      if (last) {
        EXPECT_LE(test::difference(seen.outputs[0], at::cat(first.outputs)), 1e-12);
        EXPECT_NEAR(seen.loss, first.loss, 1e-12 * std::abs(first.loss));
      }
    });
  }
}

// Counts what a step asks of it; says that it sums.
struct Counting : GradientSync {
  bool syncing() const override { return on; }
  void set_syncing(bool now) override { on = now; }
  void reduce() override { ++reductions; }
  std::optional<double> scale(const at::Tensor&) const override { return 1.0; }
  bool on = true;
  int reductions = 0;
};

TEST(Pipeline, ReducesOnceAStepAndKeepsToNoSync) {
  test::Draw draw(3);
  for (int i = 0; i < 6; ++i) {
    Case c = test::draw_case(draw, 2, 500 + static_cast<std::uint64_t>(i));
    test::on_threads(2, [&](DistributedManager& manager) {
      OwnStages own(c, manager.rank());
      std::vector<std::shared_ptr<Counting>> syncs;
      for (const auto& [s, stage] : own.by_number) {
        syncs.push_back(std::make_shared<Counting>());
        attach_gradient_sync(stage->parameters(), syncs.back());
      }
      Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", c.schedule, own.stages, test::mean_of,
                        {.skips = c.skips});
      {
        std::vector<NoSync> scopes;
        for (const auto& [s, stage] : own.by_number) scopes.emplace_back(stage->parameters());
        pipeline.step(c.batch());
      }
      for (const auto& sync : syncs) EXPECT_EQ(sync->reductions, 0);
      pipeline.step(c.batch());
      for (const auto& sync : syncs) {
        EXPECT_EQ(sync->reductions, 1);
        EXPECT_TRUE(sync->on);
      }
    });
  }
}

// Two pipelines of two ranks with different numbers of rows, gradients averaged or summed.
TEST(Pipeline, BesideDataParallelEqualsOneProcess) {
  test::Draw draw(11);
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Case c = test::draw_case(draw, 2, 900 + seed), other = c;
    for (auto& rows : other.rows) rows = draw.between(0, 3);
    const ReduceOp op = draw.chance(50) ? ReduceOp::avg : ReduceOp::sum;
    // One process has the micro-batches of both.
    Case joined = c;
    joined.rows.insert(joined.rows.end(), other.rows.begin(), other.rows.end());
    const auto expected = test::one_process(joined);
    const PipelineBatch all = joined.batch();
    test::on_threads(4, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped({{"data", 2}, {"pipe", 2}}));
      const bool second = mesh.coordinate()[0] == 1;
      OwnStages own(c, mesh.coordinate()[1]);
      std::vector<std::unique_ptr<DistributedDataParallel<std::shared_ptr<test::DrawnStage>>>> ddp;
      for (const auto& [s, stage] : own.by_number)
        ddp.push_back(std::make_unique<DistributedDataParallel<std::shared_ptr<test::DrawnStage>>>(
            stage, mesh.group("data"), DistributedDataParallelOptions{.reduction = op}));
      Pipeline pipeline(mesh, "pipe", c.schedule, own.stages, test::mean_of, {.skips = c.skips});
      const std::size_t at = second ? c.rows.size() : 0;
      PipelineBatch mine;
      for (std::size_t k = 0; k < c.rows.size(); ++k) {
        mine.inputs.push_back(all.inputs[at + k]);
        mine.targets.push_back(all.targets[at + k]);
      }
      const auto result = pipeline.step(mine);
      EXPECT_NEAR(result.loss, expected.loss, 1e-12 * std::abs(expected.loss));
      EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
      // Without a reduction of the first of two steps the sum of both is reduced.
      zero(own);
      {
        std::vector<NoSync> scopes;
        for (const auto& [s, stage] : own.by_number) scopes.emplace_back(stage->parameters());
        pipeline.step(mine);
      }
      pipeline.step(mine);
      for (const auto& [s, stage] : own.by_number) {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& p : stage->parameters())
          if (p.grad().defined()) p.mutable_grad().mul_(0.5);
      }
      EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
    });
  }
}

TEST(Pipeline, NeedsToKnowHowGradientsComeTogether) {
  Case c;
  c.schedule = schedule_1f1b(2, 2);
  c.plain = {1, 1};
  c.marks = c.recompute = {false, false};
  c.rows = {2, 2};
  test::on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh(test::mapped({{"data", 2}, {"pipe", 2}}));
    OwnStages own(c, mesh.coordinate()[1]);
    Pipeline pipeline(mesh, "pipe", c.schedule, own.stages, test::mean_of);
    EXPECT_THROW(pipeline.step(c.batch()), GradientError);
    // A mean over ranks that share their samples would be too small.
    auto wrapped = c.make(mesh.coordinate()[1]);
    DistributedDataParallel<std::shared_ptr<test::DrawnStage>> ddp(wrapped, mesh.group("data"));
    Pipeline mixed(mesh, "pipe", c.schedule, {make_stage(wrapped)}, test::mean_of,
                   {.sample_axes = std::vector<std::string>{}});
    EXPECT_THROW(mixed.step(c.batch()), GradientError);
    // Ranks that share their samples have the gradients of one.
    Pipeline shared(mesh, "pipe", c.schedule, own.stages, test::mean_of,
                    {.sample_axes = std::vector<std::string>{}});
    const auto result = shared.step(c.batch());
    const auto expected = test::one_process(c);
    EXPECT_NEAR(result.loss, expected.loss, 1e-12 * std::abs(expected.loss));
    EXPECT_EQ(result.weight, 4);
    EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
  });
}

// First and last stage share their table, on different ranks, one rank, and as one tensor.
TEST(Pipeline, TiedWeightsGetTheSumOfTheirGradients) {
  for (const bool v : {false, true}) {
    for (const int ranks : {1, 2, 3}) {
      const auto schedule = v ? schedule_gpipe(v_placement(ranks), 3) : schedule_1f1b(ranks, 3);
      const int stages = schedule.stages();
      test::seed(5);
      const at::Tensor table = test::randn({6, 4}, at::kDouble);
      const at::Tensor words = test::randint(6, {7});
      const auto embed = [](const at::Tensor& w, const at::Tensor& i) {
        return torch::embedding(w, i).tanh();
      };
      at::Tensor one = table.clone().requires_grad_();
      for (int step = 0; step < 2; ++step)
        torch::nll_loss(torch::log_softmax(embed(one, words).matmul(one.t()), 1), words).backward();
      test::on_threads(ranks, [&](DistributedManager& manager) {
        const auto mesh = manager.mesh(test::mapped({{"pipe", ranks}}));
        std::map<int, at::Tensor> tables;
        std::vector<std::shared_ptr<PipelineStage>> own;
        for (const int s : schedule.stages_of(mesh.coordinate()[0])) {
          struct Holder : torch::nn::Module {
            explicit Holder(const at::Tensor& t) : table(register_parameter("table", t)) {}
            at::Tensor table;
          };
          const bool ends = s == 0 || s == stages - 1;
          // The second one starts with other values.
          const auto holder = std::make_shared<Holder>(s == 0 ? table.clone() : table + 1);
          if (ends) tables[s] = holder->table;
          own.push_back(make_stage(holder, [=](const std::vector<at::Tensor>& x) {
            at::Tensor y = x[0];
            if (s == 0) y = embed(holder->table, y);
            if (s == stages - 1) y = torch::log_softmax(y.matmul(holder->table.t()), 1);
            return std::vector<at::Tensor>{y};
          }));
        }
        PipelineOptions options;
        for (const auto& [s, t] : tables) options.tied["table"].push_back(t);
        Pipeline pipeline(
            mesh, "pipe", schedule, own,
            [](const auto& out, const auto& target) { return torch::nll_loss(out[0], target[0]); },
            options);
        for (const auto& [s, t] : tables) EXPECT_TRUE(t.equal(table)) << s;
        for (int step = 0; step < 2; ++step) pipeline.step(split_batch({words}, {words}, 3));
        for (const auto& [s, t] : tables) {
          EXPECT_LE(test::difference(t.grad(), one.grad()), 1e-12)
              << ranks << " ranks, stage " << s << (v ? ", V" : "");
        }
      });
    }
  }
}

TEST(Pipeline, SkipsOfAVStayOnTheirRank) {
  // 4 stages on 2 ranks there and back: 0 and 3, 1 and 2 are neighbours at home.
  Case c;
  c.schedule = schedule_zero_bubble_v(2, 3);
  c.skips = {{0, 3}};
  c.plain = {1, 1, 1, 1};
  c.marks = c.recompute = std::vector<bool>(4, false);
  c.rows = {2, 1, 2};
  const auto expected = test::one_process(c);
  test::on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh(test::mapped({{"pipe", 2}}));
    const auto sent = [&](const std::vector<PipelineSkip>& skips) {
      Case with = c;
      with.skips = skips;
      OwnStages own(with, mesh.coordinate()[0]);
      Pipeline pipeline(mesh, "pipe", with.schedule, own.stages, test::mean_of, {.skips = skips});
      pipeline.step(with.batch());
      zero(own);
      const CommTraceScope trace(manager);
      pipeline.step(with.batch());
      if (!skips.empty()) {
        EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
      }
      std::int64_t bytes = 0;
      for (const auto& event : trace->events()) bytes += event.bytes;
      return bytes;
    };
    const auto without = sent({}), with = sent({{0, 3}});
    EXPECT_GT(without, 0);
    EXPECT_EQ(with, without);
  });
}

// Parameters that come and go: gathered once a step, whatever the number of micro-batches.
TEST(Pipeline, GathersFullyShardedStagesOnceAStep) {
  struct Sharded : PipelineStage {
    explicit Sharded(std::shared_ptr<test::DrawnStage> of) : inner(std::move(of)) {}
    std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) override {
      EXPECT_TRUE(here);
      return inner->forward(inputs);
    }
    std::vector<at::Tensor> parameters() const override { return inner->parameters(); }
    bool sharded() const override { return true; }
    void gather() override { here = true, ++gathers; }
    void release() override { here = false; }
    std::shared_ptr<test::DrawnStage> inner;
    bool here = false;
    int gathers = 0;
  };
  Case c;
  c.schedule = schedule_interleaved(2, 2, 4);
  c.plain = {1, 1, 1, 1};
  c.marks = c.recompute = std::vector<bool>(4, false);
  c.rows = {2, 1, 2, 3};
  const auto expected = test::one_process(c);
  for (const int at_once : {0, 1}) {
    test::on_threads(2, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped({{"pipe", 2}}));
      OwnStages own(c, mesh.coordinate()[0]);
      std::vector<std::shared_ptr<Sharded>> sharded;
      std::vector<std::shared_ptr<PipelineStage>> stages;
      for (const auto& [s, stage] : own.by_number) {
        sharded.push_back(std::make_shared<Sharded>(stage));
        stages.push_back(sharded.back());
      }
      Pipeline pipeline(mesh, "pipe", c.schedule, stages, test::mean_of,
                        {.gathered_at_once = at_once});
      pipeline.step(c.batch());
      EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
      for (const auto& stage : sharded) {
        EXPECT_FALSE(stage->here);
        if (at_once == 0) {
          EXPECT_EQ(stage->gathers, 1);
        } else {
          EXPECT_GT(stage->gathers, 1);
        }
      }
    });
  }
}

TEST(Cuts, DivideASequential) {
  EXPECT_EQ(balanced_cuts({1, 1, 4, 1, 1}, 3), (std::vector<int>{2, 3}));
  EXPECT_EQ(balanced_cuts({1, 1, 1, 1}, 2), (std::vector<int>{2}));
  EXPECT_EQ(balanced_cuts({5}, 1), std::vector<int>{});
  EXPECT_THROW(balanced_cuts({1, 1}, 3), InvalidArgument);
  EXPECT_THROW(balanced_cuts({1, -1}, 1), InvalidArgument);
  // Against all cuts there are.
  test::Draw draw(2);
  for (int i = 0; i < 50; ++i) {
    std::vector<double> costs(static_cast<std::size_t>(draw.between(3, 8)));
    for (double& c : costs) c = draw.below(6);
    const auto largest = [&](const std::vector<int>& cuts) {
      double worst = 0;
      int begin = 0;
      std::vector<int> ends = cuts;
      ends.push_back(static_cast<int>(costs.size()));
      for (const int end : ends) {
        double sum = 0;
        for (int j = begin; j < end; ++j) sum += costs[j];
        worst = std::max(worst, sum);
        begin = end;
      }
      return worst;
    };
    double best = 1e9;
    for (int a = 1; a < static_cast<int>(costs.size()); ++a) {
      for (int b = a + 1; b < static_cast<int>(costs.size()); ++b)
        best = std::min(best, largest({a, b}));
    }
    EXPECT_EQ(largest(balanced_cuts(costs, 3)), best);
  }

  torch::nn::Sequential net({{"in", torch::nn::AnyModule(torch::nn::Linear(3, 4))},
                             {"act", torch::nn::AnyModule(torch::nn::Tanh())},
                             {"out", torch::nn::AnyModule(torch::nn::Linear(4, 2))}});
  const auto x = at::rand({2, 3});
  for (const auto& parts : {split_sequential(net, std::vector<int>{1}),
                            split_sequential(net, std::vector<std::string>{"out"}),
                            split_sequential(net, balanced_cuts(parameter_costs(net), 3))}) {
    at::Tensor y = x;
    for (auto part : parts) y = part->forward(y);
    EXPECT_TRUE(y.equal(net->forward(x)));
  }
  EXPECT_THROW(split_sequential(net, std::vector<int>{2, 2}), InvalidArgument);
  EXPECT_THROW(split_sequential(net, std::vector<int>{3}), InvalidArgument);
  EXPECT_THROW(split_sequential(net, std::vector<std::string>{"none"}), InvalidArgument);
}

}  // namespace
}  // namespace tessera
