// Pipelines on ranks that are processes, over Gloo or MPI (`--backend=mpi`): samples of what
// step_test.cpp draws, random numbers, measured costs; and a rank that is killed (`--killed`).

#include <gtest/gtest.h>
#include <signal.h>

#include "../comm/fork_ranks.h"
#include "pipeline_support.h"
#include "tessera/schedule/picture.h"

namespace tessera {
namespace {

using test::Case;
using test::OwnStages;

std::string backend = "gloo";

DistributedManager start() {
  ManagerOptions options;
  options.backend = backend;
  options.timeout = std::chrono::seconds(40);
  return DistributedManager::initialize(options);
}

TEST(PipelineProcesses, StepsEqualOneProcess) {
  auto manager = start();
  const int ranks = manager.world_size(), rank = manager.rank();
  const auto mesh = manager.mesh({{"pipe", ranks}});
  test::Draw draw(23);
  for (std::uint64_t seed = 1; seed <= 14; ++seed) {
    const Case c = test::draw_case(draw, ranks, seed);
    SCOPED_TRACE(concat("case ", seed, ", ", c.text()));
    const auto expected = test::one_process(c);
    OwnStages own(c, rank);
    Pipeline pipeline(mesh, "pipe", c.schedule, own.stages, test::mean_of, {.skips = c.skips});
    for (int step = 0; step < 2; ++step) {
      for (const auto& [s, stage] : own.by_number) stage->zero_grad();
      const auto result = pipeline.step(c.batch());
      EXPECT_NEAR(result.loss, expected.loss, 1e-12 * std::abs(expected.loss));
      EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
    }
  }

  // Dropout: the numbers of a run with all stages on one rank, whatever the schedule; those of the
  // program itself go on as if there had been no step.
  const int micro_batches = 3;
  const auto draws = [&](const PipelineSchedule& schedule, const DeviceMesh& on, bool recompute) {
    Case c;
    c.schedule = schedule;
    c.seed = 77;
    c.drop = true;
    const auto stages = static_cast<std::size_t>(schedule.stages());
    c.plain.assign(stages, 1);
    c.marks.assign(stages, false);
    c.recompute.assign(stages, recompute);
    c.rows = {3, 2, 4};
    OwnStages own(c, on.group("pipe").rank());
    Pipeline pipeline(on, "pipe", schedule, own.stages, test::mean_of, {.seed = 5});
    std::vector<double> all;
    torch::manual_seed(rank);
    for (int step = 0; step < 2; ++step) all.push_back(pipeline.step(c.batch()).loss);
    const double next = torch::rand({1}).item<double>();
    torch::manual_seed(rank);
    EXPECT_EQ(next, torch::rand({1}).item<double>());
    for (const auto& [s, stage] : own.by_number) {
      for (const at::Tensor& p : stage->parameters())
        if (p.grad().defined()) all.push_back(1000.0 * s + p.grad().abs().sum().item<double>());
    }
    return all;
  };
  const auto alone = manager.mesh(Mesh({{"pipe", 1}}, {rank}));
  const auto expected =
      draws(schedule_gpipe(std::vector<int>(ranks, 0), micro_batches), alone, false);
  EXPECT_NE(expected[0], expected[1]);
  for (const bool recompute : {false, true}) {
    for (const auto& schedule :
         {schedule_1f1b(ranks, micro_batches), schedule_zero_bubble_h1(ranks, micro_batches)}) {
      const auto got = draws(schedule, mesh, recompute);
      EXPECT_NEAR(got[0], expected[0], 1e-12 * expected[0]);
      EXPECT_NEAR(got[1], expected[1], 1e-12 * expected[1]);
      for (std::size_t i = 2; i < got.size(); ++i) {
        const bool found = std::any_of(expected.begin(), expected.end(), [&](double e) {
          return std::abs(e - got[i]) <= 1e-10 * std::abs(e);
        });
        EXPECT_TRUE(found) << got[i];
      }
    }
  }

  // Measured costs, a schedule made for them, and when its actions ran.
  Case c = test::draw_case(draw, ranks, 99);
  c.schedule = schedule_1f1b(ranks, 4);
  c.skips.clear();
  c.plain.assign(static_cast<std::size_t>(ranks), 1);
  c.marks.assign(static_cast<std::size_t>(ranks), false);
  c.recompute.assign(static_cast<std::size_t>(ranks), false);
  c.rows = {2, 1, 3, 2};
  OwnStages own(c, rank);
  Pipeline pipeline(mesh, "pipe", c.schedule, own.stages, test::mean_of);
  EXPECT_THROW(pipeline.timeline(), InvalidArgument);
  const PipelineCosts costs = pipeline.measure(c.batch(), 2);
  costs.check(ranks, 4);
  for (const StageCosts& one : costs.stages) {
    EXPECT_GT(one.forward, 0);
    EXPECT_GT(*one.backward, 0);
  }
  for (const double travel : costs.communication) EXPECT_GT(travel, 0);
  const auto made = list_schedule(c.schedule.placement, 4, costs);
  Pipeline second(mesh, "pipe", made, own.stages, test::mean_of);  // compared over the ranks
  second.step(c.batch());
  EXPECT_LE(test::gradient_error(own.by_number, test::one_process(c)), 1e-11);
  const Timeline ran = second.timeline();
  ASSERT_EQ(ran.spans.size(), static_cast<std::size_t>(ranks));
  EXPECT_GT(ran.makespan, 0);
  for (const auto& row : ran.spans) {
    double last = 0;
    for (const ActionSpan& span : row) {
      EXPECT_LE(last, span.end);
      EXPECT_LE(span.start, span.end);
      last = span.end;
    }
  }
  EXPECT_NE(visualize_schedule(second.schedule(), ran).find("<svg"), std::string::npos);
  manager.shutdown();
}

// Rank 1 dies in its third forward: the others name it and the action, within their limit.
TEST(PipelineKilled, TheOthersNameTheRankAndTheAction) {
  const auto ends = testing::fork_ranks(
      3,
      [](const Launch& launch) -> std::string {
        at::set_num_threads(1);
        ManagerOptions options;
        options.launch = launch;
        options.timeout = std::chrono::seconds(10);
        auto manager = DistributedManager::initialize(options);
        torch::nn::Linear net(3, 3);
        int calls = 0;
        const auto stage = make_stage(net.ptr(), [&](const std::vector<at::Tensor>& x) {
          if (manager.rank() == 1 && ++calls == 3) ::kill(::getpid(), SIGKILL);
          return std::vector<at::Tensor>{net(x[0])};
        });
        Pipeline pipeline(manager.mesh({{"pipe", 3}}), "pipe", schedule_1f1b(3, 4), {stage},
                          [](const auto& y, const auto& t) { return torch::mse_loss(y[0], t[0]); });
        const at::Tensor x = at::ones({8, 3});
        try {
          for (int step = 0; step < 3; ++step) pipeline.step(split_batch({x}, {x}, 4));
        } catch (const PeerLostError& e) {
          return concat("lost ", list(e.ranks()), ": ", e.what());
        } catch (const std::exception& e) {
          return concat("another error: ", e.what());
        }
        return "no error";
      },
      std::chrono::seconds(30), {true, false, true});
  EXPECT_EQ(ends[1].signal, SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(ends[rank].ended);
    EXPECT_NE(ends[rank].report.find("lost [1"), std::string::npos) << ends[rank].report;
    EXPECT_NE(ends[rank].report.find("pipeline 1F1B, step 0"), std::string::npos)
        << ends[rank].report;
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  std::string filter = "PipelineProcesses.*";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--killed") filter = "PipelineKilled.*";
    if (argument.starts_with("--backend=")) tessera::backend = argument.substr(10);
  }
  ::testing::GTEST_FLAG(filter) = filter;
  return RUN_ALL_TESTS();
}
