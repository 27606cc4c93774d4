// Pipelines on ranks that are processes, over Gloo or MPI (`--backend=mpi`): samples of what
// step_test.cpp draws, random numbers, measured costs; a rank that throws (`--faults`), and one
// that is killed (`--killed`).

#include <gtest/gtest.h>
#include <signal.h>

#include "../comm/fork_ranks.h"
#include "pipeline_support.h"
#include "tessera/schedule/simulate.h"

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
        const bool found = std::ranges::any_of(
            expected, [&](double e) { return std::abs(e - got[i]) <= 1e-10 * std::abs(e); });
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

// Throws in its backward.
struct Refuses : torch::autograd::Function<Refuses> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("no gradient today");
  }
};

// In each phase of a step: that rank and the others name the action, and the next step is right.
TEST(PipelineFaulty, ARankThatThrowsEndsTheStepOnAllAndTheNextOneWorks) {
  auto manager = start();
  const int ranks = manager.world_size(), rank = manager.rank();
  const auto mesh = manager.mesh({{"pipe", ranks}});
  Case c;
  c.schedule = schedule_1f1b(ranks, 4);
  c.plain.assign(static_cast<std::size_t>(ranks), 1);
  c.marks.assign(static_cast<std::size_t>(ranks), false);
  c.recompute = c.marks;
  c.rows = {2, 1, 3, 2};
  c.seed = 4;
  const auto expected = test::one_process(c);
  enum Phase { kForward, kBackward, kLoss, kReduce };
  for (const Phase phase : {kForward, kBackward, kLoss, kReduce}) {
    SCOPED_TRACE(static_cast<int>(phase));
    const int bad = phase == kLoss ? ranks - 1 : ranks / 2;
    OwnStages own(c, rank);
    const auto module = own.by_number.at(rank);
    bool armed = false;
    struct Stage : PipelineStage {
      std::vector<at::Tensor> forward(const std::vector<at::Tensor>& x) override {
        auto y = module->forward(x);
        if (*armed && ++calls == 2 && phase == kForward)
          throw std::runtime_error("the disk is full");
        if (*armed && phase == kBackward) y[0] = Refuses::apply(y[0]);
        return y;
      }
      std::vector<at::Tensor> parameters() const override { return module->parameters(); }
      void reduce() override {
        if (*armed && phase == kReduce) throw std::runtime_error("no reduction today");
      }
      std::shared_ptr<test::DrawnStage> module;
      bool* armed = nullptr;
      Phase phase = kForward;
      int calls = 0;
    };
    const auto stage = std::make_shared<Stage>();
    stage->module = module;
    stage->armed = &armed;
    stage->phase = phase;
    Pipeline pipeline(mesh, "pipe", c.schedule, {stage}, [&](const auto& y, const auto& t) {
      if (armed && phase == kLoss) throw std::runtime_error("no loss today");
      return test::mean_of(y, t);
    });
    pipeline.step(c.batch());
    armed = rank == bad;
    const auto began = std::chrono::steady_clock::now();
    try {
      pipeline.step(c.batch());
      ADD_FAILURE() << "noticed nothing";
    } catch (const PipelineError& e) {
      EXPECT_EQ(rank, bad) << e.what();
      EXPECT_NE(std::string(e.what()).find("pipeline 1F1B, step 1"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find(concat("(stage ", bad)), std::string::npos) << e.what();
    } catch (const PeerFailedError& e) {
      EXPECT_NE(rank, bad) << e.what();
      EXPECT_NE(std::string(e.what()).find(concat("(stage ", bad)), std::string::npos) << e.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(15));
    armed = false;
    module->zero_grad();
    const auto result = pipeline.step(c.batch());
    EXPECT_NEAR(result.loss, expected.loss, 1e-12 * std::abs(expected.loss));
    EXPECT_LE(test::gradient_error(own.by_number, expected), 1e-11);
  }
  // Each rank answers for all: the launcher may end a rank of MPI before it has said how it went.
  const at::Tensor failed = at::full({1}, ::testing::Test::HasFailure() ? 1 : 0, at::kLong);
  manager.world().all_reduce(failed);
  EXPECT_EQ(failed.item<std::int64_t>(), 0);
  manager.shutdown();
}

// A rank that is killed in its backward, its loss or its reduction: the others end within their
// limit, and say in which action.
TEST(PipelineKilled, InEachPhaseTheOthersEndAndSayWhere) {
  enum Phase { kBackward, kLoss, kReduce };
  for (const Phase phase : {kBackward, kLoss, kReduce}) {
    SCOPED_TRACE(static_cast<int>(phase));
    const int bad = phase == kLoss ? 2 : 1;
    const auto ends = testing::fork_ranks(
        3,
        [=](const Launch& launch) -> std::string {
          at::set_num_threads(1);
          ManagerOptions options;
          options.launch = launch;
          options.timeout = std::chrono::seconds(10);
          auto manager = DistributedManager::initialize(options);
          const bool mine = manager.rank() == bad;
          const auto die = [=](Phase now) {
            if (mine && now == phase) ::kill(::getpid(), SIGKILL);
          };
          struct Stage : PipelineStage {
            explicit Stage(std::function<void(Phase)> d) : die(std::move(d)) {}
            std::vector<at::Tensor> forward(const std::vector<at::Tensor>& x) override {
              at::Tensor y = net(x[0]);
              if (++calls == 2) y.register_hook([this](const at::Tensor&) { die(kBackward); });
              return {y};
            }
            std::vector<at::Tensor> parameters() const override { return net->parameters(); }
            void reduce() override { die(kReduce); }
            torch::nn::Linear net{3, 3};
            std::function<void(Phase)> die;
            int calls = 0;
          };
          Pipeline pipeline(manager.mesh({{"pipe", 3}}), "pipe", schedule_1f1b(3, 4),
                            {std::make_shared<Stage>(die)}, [&](const auto& y, const auto& t) {
                              die(kLoss);
                              return torch::mse_loss(y[0], t[0]);
                            });
          const at::Tensor x = at::ones({8, 3});
          try {
            pipeline.step(split_batch({x}, {x}, 4));
          } catch (const PeerLostError& e) {
            return concat("lost: ", e.what());
          } catch (const std::exception& e) {
            return concat("another error: ", e.what());
          }
          return "no error";
        },
        std::chrono::seconds(30), {true, bad != 1, bad != 2});
    EXPECT_EQ(ends[bad].signal, SIGKILL);
    for (const int rank : {0, 1, 2}) {
      if (rank == bad) continue;
      const std::string& report = ends[rank].report;
      EXPECT_TRUE(ends[rank].ended) << rank;
      EXPECT_TRUE(report.starts_with("lost: ")) << report;
      EXPECT_NE(report.find("pipeline 1F1B, step 0, "), std::string::npos) << report;
      // Some rank waited for it in an action; after the last one there is none to name.
      if (phase != kReduce) {
        EXPECT_NE(report.find("(stage "), std::string::npos) << report;
      }
    }
  }
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
    if (argument == "--faults") filter = "PipelineFaulty.*";
    if (argument.starts_with("--backend=")) tessera::backend = argument.substr(10);
  }
  ::testing::GTEST_FLAG(filter) = filter;
  return RUN_ALL_TESTS();
}
