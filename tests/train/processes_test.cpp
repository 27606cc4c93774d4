// Ranks as processes, in memory and over Gloo, that get signals, are killed in every phase, or
// throw: all end in bounded time, and a new job goes on from the last checkpoint to the values of
// one that was left alone.

#include <signal.h>
#include <unistd.h>

#include "../comm/fork_ranks.h"
#include "elsewhere.h"
#include "placed_cases.h"
#include "tessera/base/hash.h"
#include "tessera/launch/local_run.h"

namespace tessera::test {

using ::tessera::testing::fork_ranks;
using ::tessera::testing::RankEnd;

namespace {

constexpr int kRanks = 2;

// What ranks of this test talk through.
std::string& backend() {
  static std::string name;
  return name;
}

class TrainProcesses : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { backend() = GetParam(); }
};

// What happens to rank `victim` at `step`, in `phase`.
struct Trouble {
  int victim = -1;
  std::int64_t step = 0;
  std::string phase;
  // 0: throws.
  int signal = 0;
};

class Maker : public Callback {
 public:
  explicit Maker(Trouble trouble) : trouble_(std::move(trouble)) {}
  std::string name() const override { return "maker"; }
  void on_fit_start(Trainer& t) override { at("load", t); }
  void on_batch_start(Trainer& t, const MicroBatch&) override { at("forward", t); }
  void on_before_backward(Trainer& t, const at::Tensor&) override { at("backward", t); }
  void on_after_backward(Trainer& t) override { at("accumulated", t); }
  void on_before_step(Trainer& t, const StepResult&) override { at("step", t); }
  void on_step_end(Trainer& t, const StepResult&) override { at("after", t); }
  void on_validation_start(Trainer& t) override { at("validation", t); }
  void save(Trainer& t, CheckpointState&, const std::string&) override { at("save", t); }

 private:
  void at(const std::string& phase, Trainer& trainer) {
    if (trainer.strategy().rank() != trouble_.victim || phase != trouble_.phase ||
        trainer.step() != trouble_.step || done_)
      return;
    done_ = true;
    if (trouble_.signal == 0) throw Error("trouble in " + phase);
    ::kill(::getpid(), trouble_.signal);
  }
  Trouble trouble_;
  bool done_ = false;
};

// Trains, or goes on from what is in the folder; "steps stop hash".
std::string train(const Launch& launch, const std::string& folder, const Trouble& trouble) {
  at::set_num_threads(1);
  ManagerOptions how;
  how.launch = launch;
  how.backend = backend();
  how.timeout = std::chrono::seconds(10);
  const auto manager = DistributedManager::initialize(how);
  torch::manual_seed(3 + launch.rank);
  torch::nn::Sequential net = remembering_net(3);
  net->push_back(torch::nn::Dropout(0.2));
  Regression task(net);
  TrainerOptions options;
  options.strategy = std::make_shared<DDPStrategy>(manager);
  options.max_epochs = 2;
  options.accumulate = 2;
  options.checkpoint.folder = folder;
  options.checkpoint.resume = true;
  options.checkpoint.options.timeout = std::chrono::seconds(10);
  options.requeue = ::getenv("SLURM_JOB_ID") != nullptr;
  options.callbacks = {std::make_shared<CheckpointCallback>(
                           CheckpointCallbackOptions{.every_steps = 2, .keep_last = 2}),
                       std::make_shared<Maker>(trouble)};
  const FitResult result = Trainer(options).fit(task, ragged_batches(launch.rank, 7),
                                                ragged_batches(launch.rank + 3, 2));
  Hash hash;
  for (const at::Tensor& t : task.values()) hash.bytes(t.contiguous().data_ptr(), t.nbytes());
  return concat(result.steps, " ", to_string(result.stop), " ", hash.value());
}

std::vector<RankEnd> job(const std::string& folder, const Trouble& trouble = {}) {
  return fork_ranks(
      kRanks, [&](const Launch& launch) { return train(launch, folder, trouble); },
      std::chrono::seconds(40));
}

const std::string& undisturbed() {
  static const std::string report = [] {
    const Folder folder;
    const auto ends = job(folder.path());
    EXPECT_EQ(ends[0].report, ends[1].report);
    return ends[0].report;
  }();
  return report;
}

void expect_goes_on(const std::string& folder, const std::string& what) {
  for (const RankEnd& end : job(folder)) {
    EXPECT_EQ(end.exit_code, 0) << what << ": " << end.report;
    EXPECT_EQ(end.report, undisturbed()) << what;
  }
}

TEST_P(TrainProcesses, SignalsSaveAndStopAllAtTheSameStep) {
  EXPECT_EQ(undisturbed().substr(0, 7), "8 none ");
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const std::vector<std::int64_t> steps{0, 3, 5}, two{2};
    for (const std::int64_t step : signal == SIGTERM ? steps : two) {
      const Folder folder;
      const std::string what = concat("signal ", signal, " after step ", step);
      const auto ends = job(folder.path(), {static_cast<int>(step) % kRanks, step,
                                            step % 2 == 0 ? "forward" : "after", signal});
      for (const RankEnd& end : ends) {
        EXPECT_EQ(end.exit_code, 0) << what << ": " << end.report;
        EXPECT_EQ(end.report, ends[0].report) << what;
        EXPECT_NE(end.report.find(signal == SIGTERM ? " SIGTERM " : " SIGUSR1 "), std::string::npos)
            << what << ": " << end.report;
      }
      EXPECT_EQ(ends[0].report.substr(0, 2), concat(step + 1, " ")) << what;
      expect_goes_on(folder.path(), what);
    }
  }
}

// Again and again at random steps, phases and ranks: nothing is lost, and the end is the same.
TEST_P(TrainProcesses, FiftySignalsAtRandomSteps) {
  Draw draw(50);
  const std::vector<std::string> phases{"forward", "backward", "step", "after", "save"};
  const int all = backend() == "shm" ? 50 : 12;
  for (int signals = 0; signals < all;) {
    const Folder folder;
    std::int64_t done = 0;
    while (signals < all) {
      const std::int64_t step = done + draw.below(static_cast<int>(8 - done));
      const std::string phase = draw.of(phases);
      const Trouble trouble{draw.below(kRanks), step, phase, SIGTERM};
      const auto ends = job(folder.path(), trouble);
      ++signals;
      const std::string what = concat(phase, " at ", step, ", from ", done);
      ASSERT_EQ(ends[0].exit_code, 0) << what << ": " << ends[0].report;
      EXPECT_EQ(ends[0].report, ends[1].report) << what;
      const std::int64_t steps = std::stoll(ends[0].report);
      EXPECT_GE(steps, step) << what;
      done = steps;
      if (steps == 8) break;
    }
    expect_goes_on(folder.path(), "many signals");
  }
}

TEST_P(TrainProcesses, SignalsInAValidationAreNoticed) {
  const Folder folder;
  const auto ends = job(folder.path(), {1, 4, "validation", SIGTERM});
  for (const RankEnd& end : ends) EXPECT_EQ(end.report.substr(0, 10), "4 SIGTERM ") << end.report;
  expect_goes_on(folder.path(), "in a validation");
}

TEST_P(TrainProcesses, ARankKilledInAnyPhaseEndsAllAndTheJobGoesOn) {
  for (const std::string phase :
       {"load", "forward", "backward", "step", "after", "save", "validation"}) {
    const Folder folder;
    const std::int64_t step = phase == "load" ? 0 : 4;
    const int victim = phase == "backward" ? 0 : 1;
    const auto began = std::chrono::steady_clock::now();
    const auto ends = job(folder.path(), {victim, step, phase, SIGKILL});
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(25)) << phase;
    EXPECT_EQ(ends[victim].signal, SIGKILL) << phase;
    EXPECT_TRUE(ends[1 - victim].ended) << phase << ": a hang";
    EXPECT_EQ(ends[1 - victim].exit_code, 9) << phase << ": " << ends[1 - victim].report;
    expect_goes_on(folder.path(), "killed in " + phase);
  }
}

// In the middle of an accumulation, with a save in progress; the next job has other ranks and
// another strategy.
TEST_P(TrainProcesses, KilledAndResumedByOtherRanksAndStrategies) {
  const auto run = [](const Place& place, const std::string& folder, const Trouble& trouble) {
    return fork_ranks(
        place.ranks,
        [&](const Launch& launch) -> std::string {
          at::set_num_threads(1);
          ManagerOptions how;
          how.launch = launch;
          how.backend = backend();
          how.timeout = std::chrono::seconds(10);
          auto manager = DistributedManager::initialize(how);
          ReadLog log;
          const FieldRun got =
              train_fields(strategy_of(manager, place.layout), readers_of(place), launch.rank,
                           folder, log, {std::make_shared<Maker>(trouble)});
          expect_near(got.values, fields_alone(log).values, to_string(place));
          return ::testing::Test::HasFailure() ? "wrong values" : "right";
        },
        std::chrono::seconds(40));
  };
  const std::vector<Place> places{{Layout::ddp, 2}, {Layout::domain, 3}, {Layout::sharded, 2}};
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Folder folder;
    const auto killed = run(places[i], folder.path(),
                            {1, static_cast<std::int64_t>(2 + i), "accumulated", SIGKILL});
    // The second rank of the strategy, whose mesh may have the ranks in another order.
    int dead = 0;
    for (const RankEnd& end : killed) {
      dead += end.signal == SIGKILL;
      if (end.signal == 0) {
        EXPECT_EQ(end.exit_code, 9) << end.report;
      }
    }
    EXPECT_EQ(dead, 1) << to_string(places[i]);
    const Place& other = places[(i + 1) % places.size()];
    for (const RankEnd& end : run(other, folder.path(), {}))
      EXPECT_EQ(end.report, "right") << to_string(other) << " after " << to_string(places[i]);
  }
}

TEST_P(TrainProcesses, AnExceptionOnOneRankIsToldByAll) {
  for (const std::string phase : {"load", "forward", "step", "save"}) {
    const Folder folder;
    const auto began = std::chrono::steady_clock::now();
    const auto ends = job(folder.path(), {1, phase == "load" ? 0 : 2, phase, 0});
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20)) << phase;
    for (const RankEnd& end : ends) {
      EXPECT_EQ(end.exit_code, 9) << phase << ": " << end.report;
      EXPECT_NE(end.report.find("trouble in " + phase), std::string::npos)
          << phase << ": " << end.report;
    }
  }
}

TEST_P(TrainProcesses, EveryKindOfParallelismEqualsOneProcess) {
  for (const int ranks : {2, 3, 4}) {
    const Folder folder;
    const auto ends = fork_ranks(
        ranks,
        [&](const Launch& launch) -> std::string {
          at::set_num_threads(1);
          ManagerOptions how;
          how.launch = launch;
          how.backend = backend();
          how.timeout = std::chrono::seconds(20);
          auto manager = DistributedManager::initialize(how);
          each_strategy_case(manager);
          mixed_case(manager);
          batch_fields_case(manager);
          table_case(manager, folder.path(), ranks, false);
          table_case(manager, folder.path(), ranks, true);
          return ::testing::Test::HasFailure() ? "wrong values" : "right";
        },
        std::chrono::seconds(60));
    for (const RankEnd& end : ends) EXPECT_EQ(end.report, "right");
  }
}

INSTANTIATE_TEST_SUITE_P(Over, TrainProcesses, ::testing::Values("shm", "gloo"));

// What the ranks do that the test below starts.
TEST(LocalRanks, DISABLED_OneOfThem) {
  const auto manager = DistributedManager::initialize();
  at::Tensor ranks = at::ones({1});
  manager.world().all_reduce(ranks);
  ::tessera::testing::put(concat(::getenv("TRAIN_TEST_FOLDER"), "/", manager.rank()),
                          concat(ranks.item<float>()));
}

TEST(LocalRanks, AProgramStartsItselfWhereNoLauncherHas) {
  const Folder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("TRAIN_TEST_FOLDER", folder.path().c_str(), 1);
    std::vector<std::string> words{"program", "--gtest_filter=LocalRanks.DISABLED_OneOfThem",
                                   "--gtest_also_run_disabled_tests"};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    const auto status = start_local_ranks(3, 3, arguments.data(), Environment());
    ::_exit(status ? *status : 77);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(::tessera::testing::contents(folder / std::to_string(rank)), "3");
  // Under a launcher it is one of its ranks already.
  Environment launched;
  launched.variables = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  EXPECT_FALSE(start_local_ranks(3, 0, nullptr, launched));
  EXPECT_FALSE(start_local_ranks(1, 0, nullptr, Environment()));
  EXPECT_THROW(start_local_ranks(0, 0, nullptr, Environment()), InvalidArgument);
}

TEST(Requeueing, SlurmIsAskedToQueueTheJobAgain) {
  const Folder folder;
  const std::string said = folder / "said";
  ::tessera::testing::put(folder / "scontrol",
                          "#!/bin/sh\necho \"$@\" > " + said + "\n[ \"$2\" != 7 ]\n");
  std::filesystem::permissions(folder / "scontrol", std::filesystem::perms::owner_all);
  const std::string path = ::getenv("PATH");
  ::setenv("PATH", (folder.path() + ":" + path).c_str(), 1);
  requeue_slurm_job("123_4");
  EXPECT_EQ(::tessera::testing::contents(said), "requeue 123_4\n");
  EXPECT_THROW(requeue_slurm_job("7"), Error);
  EXPECT_THROW(requeue_slurm_job("7; rm"), InvalidArgument);
  // The trainer asks once, for Slurm's job: the launch's own job_id may be torchrun's.
  ::setenv("SLURM_JOB_ID", "55", 1);
  const Folder runs;
  for (const RankEnd& end : job(runs.path(), {1, 3, "after", SIGUSR1}))
    EXPECT_EQ(end.report.substr(0, 10), "4 SIGUSR1 ") << end.report;
  EXPECT_EQ(::tessera::testing::contents(said), "requeue 55\n");
  std::filesystem::remove(said);
  for (const RankEnd& end : job(runs.path())) EXPECT_EQ(end.report, undisturbed());
  EXPECT_FALSE(std::filesystem::exists(said));
  ::unsetenv("SLURM_JOB_ID");
  ::setenv("PATH", "/nowhere", 1);
  EXPECT_THROW(requeue_slurm_job("8"), Error);
  ::setenv("PATH", path.c_str(), 1);
}

}  // namespace
}  // namespace tessera::test
