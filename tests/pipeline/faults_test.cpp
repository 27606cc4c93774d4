// What goes wrong on one rank ends the step on all, with the action in the message, and the next
// step works.

#include <gtest/gtest.h>

#include <chrono>

#include "pipeline_support.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/validate.h"

namespace tessera {
namespace {

using test::Case;
using test::OwnStages;

Case chain(const PipelineSchedule& schedule, std::uint64_t seed = 3) {
  Case c;
  c.schedule = schedule;
  c.ranks = schedule.ranks();
  c.seed = seed;
  c.plain.assign(static_cast<std::size_t>(schedule.stages()), 1);
  c.marks.assign(static_cast<std::size_t>(schedule.stages()), false);
  c.recompute = c.marks;
  for (int k = 0; k < schedule.micro_batches; ++k) c.rows.push_back(1 + k % 3);
  return c;
}

// Throws in its backward while `armed`.
struct Trap : torch::autograd::Function<Trap> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            bool armed) {
    ctx->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list g) {
    if (ctx->saved_data["armed"].toBool()) throw std::runtime_error("no gradient today");
    return {g[0], at::Tensor()};
  }
};

// The stages of `own`, of which stage `s` misbehaves in its `call`-th forward.
std::vector<std::shared_ptr<PipelineStage>> with_fault(
    OwnStages& own, int s, int call,
    const std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>& fault) {
  std::vector<std::shared_ptr<PipelineStage>> stages = own.stages;
  std::size_t i = 0;
  for (const auto& [number, module] : own.by_number) {
    if (number == s) {
      auto calls = std::make_shared<int>(0);
      stages[i] = make_stage(module, [=](const std::vector<at::Tensor>& x) {
        auto outputs = module->forward(x);
        return (*calls)++ == call ? fault(std::move(outputs)) : outputs;
      });
    }
    ++i;
  }
  return stages;
}

// Rank `bad` gets a PipelineError that says `words`, the others hear of it; then a step is right.
void expect_fault_and_recovery(
    const Case& c, int s, const std::string& words,
    const std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>& fault,
    const PipelineOptions& options = {}) {
  const auto expected = test::one_process(c);
  const int bad = c.schedule.placement[s];
  test::on_threads(c.ranks, [&](DistributedManager& manager) {
    OwnStages own(c, manager.rank());
    // In the second step.
    const int call = static_cast<int>(c.rows.size()) + 1;
    Pipeline pipeline(manager.mesh({{"pipe", c.ranks}}), "pipe", c.schedule,
                      with_fault(own, s, call, fault), test::mean_of, options);
    pipeline.step(c.batch());
    const auto began = std::chrono::steady_clock::now();
    try {
      pipeline.step(c.batch());
      ADD_FAILURE() << "rank " << manager.rank() << " noticed nothing";
    } catch (const PipelineError& e) {
      EXPECT_EQ(manager.rank(), bad) << e.what();
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
      EXPECT_EQ(e.action().stage, s);
    } catch (const PeerFailedError& e) {
      EXPECT_NE(manager.rank(), bad);
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
      EXPECT_EQ(e.ranks(), std::vector<int>{bad});
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
    for (const auto& [number, stage] : own.by_number) stage->zero_grad();
    const auto result = pipeline.step(c.batch());
    EXPECT_NEAR(result.loss, expected.loss, 1e-12 * std::abs(expected.loss));
    EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
  });
}

TEST(PipelineFaults, AForwardThatThrowsEndsTheStepOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    for (const int s : {0, ranks - 1})
      expect_fault_and_recovery(chain(schedule_1f1b(ranks, 4)), s, "the disk is full",
                                [](std::vector<at::Tensor>) -> std::vector<at::Tensor> {
                                  throw std::runtime_error("the disk is full");
                                });
  }
  expect_fault_and_recovery(chain(schedule_1f1b(2, 3)), 1, "size of tensor",
                            [](const std::vector<at::Tensor>& y) -> std::vector<at::Tensor> {
                              return {y[0] + at::zeros({77}, at::kDouble)};
                            });
}

TEST(PipelineFaults, ABackwardThatThrowsEndsTheStepOnAllRanks) {
  for (const auto& schedule : {schedule_1f1b(3, 4), schedule_zero_bubble_v(2, 4)}) {
    for (int s = 0; s < schedule.stages(); ++s)
      expect_fault_and_recovery(chain(schedule), s, "no gradient today",
                                [](const std::vector<at::Tensor>& y) -> std::vector<at::Tensor> {
                                  return {Trap::apply(y[0], true)};
                                });
  }
}

TEST(PipelineFaults, AShapeThatChangesIsAnErrorOnEveryRank) {
  const auto wider = [](const std::vector<at::Tensor>& y) -> std::vector<at::Tensor> {
    return {at::cat({y[0], y[0]}, 1)};
  };
  const auto more = [](const std::vector<at::Tensor>& y) -> std::vector<at::Tensor> {
    return {y[0], y[0]};
  };
  const auto other = [](const std::vector<at::Tensor>& y) -> std::vector<at::Tensor> {
    return {y[0].to(at::kFloat)};
  };
  for (const auto& fault :
       {std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>(wider), {more}, {other}})
    expect_fault_and_recovery(chain(schedule_1f1b(3, 3)), 1, "where it gave Double [", fault);
  expect_fault_and_recovery(
      chain(schedule_1f1b(2, 3)), 0, "undefined",
      [](const std::vector<at::Tensor>&) -> std::vector<at::Tensor> { return {at::Tensor()}; });
}

TEST(PipelineFaults, ShapesMayDependOnValuesWhereThatIsSaid) {
  // Rows are doubled in every second call, and the next stage takes half of them.
  const auto schedule = schedule_zero_bubble_h1(2, 4);
  test::on_threads(2, [&](DistributedManager& manager) {
    torch::nn::Linear net(4, 4);
    net->to(torch::kDouble);
    int calls = 0;
    const auto stage = make_stage(net.ptr(), [&](const std::vector<at::Tensor>& x) {
      if (manager.rank() == 1) return std::vector<at::Tensor>{net(x[0].narrow(0, 0, 2))};
      const at::Tensor y = net(x[0]);
      return std::vector<at::Tensor>{calls++ % 2 ? at::cat({y, y}) : y};
    });
    Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", schedule, {stage},
                      [](const auto& y, const auto& t) { return (y[0] - t[0]).square().mean(); },
                      {.dynamic_shapes = true});
    const at::Tensor x = at::ones({8, 4}, at::kDouble);
    for (int step = 0; step < 2; ++step)
      EXPECT_TRUE(std::isfinite(pipeline.step(split_batch({x}, {x}, 4)).loss));
  });
}

TEST(PipelineFaults, WhatDoesNotFitIsRefusedOnEveryRank) {
  const Case c = chain(schedule_1f1b(2, 3));
  test::on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}});
    const int rank = manager.rank();
    OwnStages own(c, rank);
    const auto make = [&](const PipelineSchedule& schedule, PipelineOptions options = {},
                          bool all = true) {
      return Pipeline(mesh, "pipe", schedule,
                      all ? own.stages : std::vector<std::shared_ptr<PipelineStage>>(),
                      test::mean_of, std::move(options));
    };
    // Ranks that differ.
    EXPECT_THROW(make(rank ? schedule_1f1b(2, 3) : schedule_gpipe(2, 3)), MismatchError);
    EXPECT_THROW(make(c.schedule, {.dynamic_shapes = rank == 1}), MismatchError);
    EXPECT_THROW(make(c.schedule, {.skips = {{0, rank}}}), MismatchError);
    // One rank alone is wrong.
    EXPECT_THROW(make(c.schedule, {}, rank == 0), InvalidArgument);
    EXPECT_THROW(make(c.schedule, {.skips = {{1, 1}}}), InvalidArgument);
    EXPECT_THROW(make(schedule_1f1b(3, 3)), InvalidArgument);
    auto broken = c.schedule;
    broken.actions[1].pop_back();
    EXPECT_THROW(make(broken), ScheduleError);
    PipelineOptions tied;
    if (rank == 1) tied.tied["w"] = {own.by_number[1]->mix->weight.detach()};
    EXPECT_THROW(make(c.schedule, tied), InvalidArgument);
    tied.tied["w"] = {rank ? own.by_number[1]->mix->weight : own.by_number[0]->mix->weight};
    EXPECT_THROW(make(c.schedule, tied), InvalidArgument);  // other shapes

    Pipeline pipeline = make(c.schedule);
    const auto refused = [&](const std::function<void(PipelineBatch&)>& change) {
      PipelineBatch batch = c.batch();
      change(batch);
      EXPECT_THROW(pipeline.step(batch), InvalidArgument);
    };
    refused([](PipelineBatch& b) { b.inputs.clear(); });
    refused([](PipelineBatch& b) { b.targets.clear(); });
    refused([](PipelineBatch& b) { b.targets.pop_back(); });
    refused([](PipelineBatch& b) { b.inputs.push_back(b.inputs[0]); });
    refused([](PipelineBatch& b) { b.inputs[1][0] = at::Tensor(); });
    refused([](PipelineBatch& b) { b.weights = {1, 2}; });
    refused([](PipelineBatch& b) { b.weights = {1, -2, 1}; });
    refused([](PipelineBatch& b) { b.weights = {0, 0, 0}; });
    refused([&](PipelineBatch& b) {
      if (rank == 1) b.weights = {1, 1, std::nan("")};
    });
    refused([&](PipelineBatch& b) {
      if (rank == 1) b.problem = "sample 7 cannot be read";
    });
    // And all of that left it sound.
    for (const auto& [s, stage] : own.by_number) stage->zero_grad();
    pipeline.step(c.batch());
    EXPECT_LE(test::gradient_error(own.by_number, test::one_process(c)), 1e-11);
  });
}

TEST(PipelineFaults, ALossThatIsNoScalarNamesTheAction) {
  const Case c = chain(schedule_1f1b(2, 2));
  test::on_threads(2, [&](DistributedManager& manager) {
    OwnStages own(c, manager.rank());
    Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", c.schedule, own.stages,
                      [](const auto& y, const auto&) { return y[0]; });
    try {
      pipeline.step(c.batch());
      ADD_FAILURE();
    } catch (const PipelineError& e) {
      EXPECT_EQ(to_string(e.action()), "1F0");
      EXPECT_NE(std::string(e.what()).find("must be 0-dim"), std::string::npos) << e.what();
      EXPECT_THROW(std::rethrow_if_nested(e), InvalidArgument);
    } catch (const PeerFailedError& e) {
      EXPECT_NE(std::string(e.what()).find("1F0 (stage 1, micro-batch 0) on rank 1"),
                std::string::npos)
          << e.what();
    }
    manager.world().barrier();  // nobody is gone before all have heard
  });
}

// Pipelines beside each other draw what their step's number says: one that failed while the other
// ended its step goes on with the same number.
TEST(PipelineFaults, PipelinesBesideEachOtherStayAtOneStep) {
  test::on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 2}, {"tensor", 2}});
    torch::nn::Linear net(4, 4);
    std::uint64_t seed = 0;
    const auto stage = make_stage(net.ptr(), [&](const std::vector<at::Tensor>& x) {
      seed = random_state(manager).seed;
      return std::vector<at::Tensor>{net(x[0])};
    });
    bool armed = false;
    PipelineOptions options;
    options.sample_axes.emplace();
    options.seed = 5;
    options.loss_everywhere = false;
    Pipeline pipeline(
        mesh, "pipe", schedule_1f1b(2, 2), {stage},
        [&](const auto& y, const auto& t) {
          if (armed && manager.rank() == 3) throw std::runtime_error("no loss today");
          return torch::mse_loss(y[0], t[0]);
        },
        options);
    const at::Tensor x = at::ones({4, 4});
    const auto step = [&] { pipeline.step(split_batch({x}, {x}, 2)); };
    const auto seed_of_all = [&] {
      step();
      for (const std::string& each : mesh.group("tensor").all_gather_bytes(std::to_string(seed)))
        EXPECT_EQ(each, std::to_string(seed)) << "rank " << manager.rank();
    };
    seed_of_all();
    armed = true;
    EXPECT_ANY_THROW({
      step();
      mesh.all().barrier();
    });
    armed = false;
    mesh.all().barrier();
    seed_of_all();
    seed_of_all();
  });
}

// A module that takes one tensor does not lose the skip that ends there.
TEST(PipelineFaults, ASkipIntoAModuleOfOneTensorIsRefused) {
  test::on_threads(3, [&](DistributedManager& manager) {
    torch::nn::Linear net(4, 4);
    const auto two = make_stage(net.ptr(), [&](const std::vector<at::Tensor>& x) {
      const at::Tensor y = net(x[0]);
      return std::vector<at::Tensor>{y, y.clone()};
    });
    Pipeline pipeline(manager.mesh({{"pipe", 3}}), "pipe", schedule_1f1b(3, 2),
                      {manager.rank() == 0 ? two : make_stage(net)},
                      [](const auto& y, const auto& t) { return torch::mse_loss(y[0], t[0]); },
                      {.skips = {{0, 2}}});
    const at::Tensor x = at::ones({4, 4});
    try {
      pipeline.step(split_batch({x}, {x}, 2));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("takes one tensor and is given 2"), std::string::npos)
          << e.what();
    }
    manager.world().barrier();
  });
}

// A schedule that somebody else lowered, without reductions, runs too.
TEST(PipelineFaults, RunsAScheduleFromText) {
  const Case c = chain(schedule_1f1b(2, 2));
  const auto lowered = schedule_from_csv(to_csv(insert_messages(c.schedule)));
  const auto expected = test::one_process(c);
  test::on_threads(2, [&](DistributedManager& manager) {
    OwnStages own(c, manager.rank());
    Pipeline pipeline(manager.mesh({{"pipe", 2}}), "pipe", lowered, own.stages, test::mean_of);
    pipeline.step(c.batch());
    EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
    EXPECT_EQ(pipeline.schedule(), lowered);
  });
}

}  // namespace
}  // namespace tessera
