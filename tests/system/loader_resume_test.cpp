// A training run whose ranks are killed again and again, each time going on with another number of
// ranks: the samples of every step are those of a run that never stopped, and so are the weights at
// the end.

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "launcher_run.h"
#include "loader_trainer.h"
#include "process.h"

namespace tessera::test {
namespace {

struct Read {
  std::uint64_t step;
  std::int64_t begin, end;
  std::vector<std::int64_t> samples;
};

// What the ranks of one run have written down; a line that the kill cut off is left out.
std::vector<Read> reads_of(const std::filesystem::path& folder) {
  std::vector<Read> reads;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().rfind("read.", 0) != 0) continue;
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line) && !file.eof();) {
      std::istringstream words(line);
      std::uint64_t step = 0;
      words >> step;
      for (std::string bar; words >> bar;) {
        Read read{step, 0, 0, {}};
        words >> read.begin >> read.end;
        for (auto i = read.begin; i < read.end; ++i) {
          std::int64_t sample = -1;
          words >> sample;
          read.samples.push_back(sample);
        }
        reads.push_back(std::move(read));
      }
    }
  }
  return reads;
}

std::vector<double> weights_of(const std::filesystem::path& folder) {
  std::ifstream file(folder / "checkpoint");
  std::string state, number;
  std::getline(file, state);
  std::vector<double> weights;
  while (file >> number) weights.push_back(std::strtod(number.c_str(), nullptr));
  return weights;
}

void remove_reads(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().filename().string().rfind("read.", 0) == 0) files.push_back(entry.path());
  for (const auto& file : files) std::filesystem::remove(file);
}

std::string pid_mark(int rank) { return "rank " + std::to_string(rank) + " pid "; }

pid_t pid_of(const Process& run, int rank) {
  const std::string mark = pid_mark(rank);
  const auto at = run.out().find(mark);
  return at == std::string::npos
             ? -1
             : static_cast<pid_t>(std::stol(run.out().substr(at + mark.size())));
}

void killed_and_resumed(const std::string& kind, int workers, const std::vector<int>& ranks) {
  const Folder folder, alone;
  std::uint64_t steps = 0;  // of the last run
  auto trainer = [&](const Folder& where, int n, std::uint64_t until) {
    return command(n, {},
                   {where.path().string(), kind, std::to_string(workers), std::to_string(until)});
  };

  const auto input = trainer_input(kind);
  Loader whole(input.datasets, input.order, BatchMapping({1}, {0}, {}), 0);
  std::vector<std::vector<std::int64_t>> reference;
  auto reference_of = [&](std::uint64_t step) -> const std::vector<std::int64_t>& {
    while (reference.size() <= step) {
      const auto t = whole.next().tensors[0];
      reference.emplace_back(t.const_data_ptr<std::int64_t>(),
                             t.const_data_ptr<std::int64_t>() + t.numel());
    }
    return reference[step];
  };

  std::uint64_t next = 0;  // the step that must come next
  for (std::size_t phase = 0; phase < ranks.size(); ++phase) {
    const bool last = phase + 1 == ranks.size();
    steps = next + 20;
    // A run that is to be killed has far to go: it cannot end by itself first.
    Process run(trainer(folder, ranks[phase], last ? steps : 1'000'000'000));
    if (last) {
      ASSERT_EQ(run.finish(std::chrono::seconds(100)), 0) << run.err();
    } else {
      // The launcher may pass on what the ranks say in another order than they said it.
      const int dies = phase % 2 == 0 ? ranks[phase] - 1 : 0;
      ASSERT_TRUE(run.await({"step " + std::to_string(next + 5) + ";", pid_mark(dies)},
                            std::chrono::seconds(100)))
          << run.err();
      const pid_t victim = pid_of(run, dies);
      ASSERT_GT(victim, 0);
      ASSERT_EQ(::kill(victim, SIGKILL), 0);
      EXPECT_NE(run.finish(std::chrono::seconds(60)), 0);
      EXPECT_TRUE(run.all_gone());
    }
    std::map<std::uint64_t, std::vector<bool>> covered;
    for (const Read& read : reads_of(folder.path())) {
      const auto& all = reference_of(read.step);
      ASSERT_LE(read.end, static_cast<std::int64_t>(all.size()));
      EXPECT_EQ(read.samples,
                (std::vector<std::int64_t>{all.begin() + read.begin, all.begin() + read.end}))
          << "step " << read.step;
      auto& rows = covered[read.step];
      rows.resize(all.size());
      for (auto i = read.begin; i < read.end; ++i) rows[static_cast<std::size_t>(i)] = true;
    }
    ASSERT_FALSE(covered.empty());
    EXPECT_EQ(covered.begin()->first, next) << "it went on at another step than the saved one";
    const std::uint64_t end = covered.rbegin()->first + 1;
    // what the last step of a killed run wrote may be a part
    for (std::uint64_t s = next; s + 1 < end || (last && s < end); ++s)
      EXPECT_EQ(covered[s], std::vector<bool>(reference_of(s).size(), true)) << "step " << s;
    remove_reads(folder.path());
    if (last) {
      EXPECT_EQ(end, steps);
      break;
    }
    Loader saved(input.datasets, input.order, BatchMapping({1}, {0}, {}), 0);
    std::string state;
    std::ifstream checkpoint(folder.path() / "checkpoint");
    std::getline(checkpoint, state);
    saved.restore(state);
    next = saved.next().step;
    EXPECT_LE(next, end);
    ASSERT_GT(next, 0u);
  }

  Process never_stopped(trainer(alone, 1, steps));
  ASSERT_EQ(never_stopped.finish(std::chrono::seconds(100)), 0) << never_stopped.err();
  const auto weights = weights_of(folder.path()), wanted = weights_of(alone.path());
  ASSERT_EQ(weights.size(), 4u);
  ASSERT_EQ(wanted.size(), 4u);
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(weights[i], wanted[i], 1e-10);
}

TEST(LoaderResume, AScheduleOfBatchSizesWithWorkers) {
  killed_and_resumed("schedule", 2, {2, 3, 1, 4});
}
TEST(LoaderResume, ATokenBudgetWithWorkers) { killed_and_resumed("tokens", 1, {3, 2}); }
TEST(LoaderResume, AMixtureWithoutWorkers) { killed_and_resumed("mixture", 0, {1, 4, 2}); }

}  // namespace
}  // namespace tessera::test
