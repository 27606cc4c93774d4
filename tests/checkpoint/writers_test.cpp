// Several jobs and one folder: those that look, and those that write, at the same time.

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../comm/fork_ranks.h"
#include "support.h"

namespace tessera::test {

using ::tessera::testing::Folder;
using ::tessera::testing::fork_ranks;
using ::tessera::testing::local_launch;

namespace {

constexpr auto kLimit = std::chrono::seconds(60);

CheckpointState numbers_of(int rank, double value) {
  CheckpointState state;
  state.add("t", at::full({2, 3}, value), {{4, 3}, {2 * rank, 0}});
  state.set_real("value", value);
  return state;
}

DistributedManager manager_of(const Launch& launch) {
  ManagerOptions options;
  options.launch = launch;
  options.timeout = std::chrono::seconds(30);
  return DistributedManager::initialize(options);
}

// The same value in the whole checkpoint; by this process alone.
void expect_one_value(const std::string& folder, const std::string& name) {
  const SavedCheckpoint saved(local_folder(folder), name);
  std::vector<float> t(12);
  saved.read(*saved.manifest().find(EntryKind::tensor, "t"), {{0, 4}, {0, 3}}, t.data());
  const Entry* value = saved.manifest().find(EntryKind::value, "value");
  std::string bytes(static_cast<std::size_t>(value->info.shape[0]), '\0');
  saved.read(*value, {{0, value->info.shape[0]}}, bytes.data());
  for (const float x : t) EXPECT_EQ(x, static_cast<float>(real_from_bytes(bytes, "value"))) << name;
}

// A job of one process beside those of the test.
class OtherJob {
 public:
  // `body` gets what ends it: the process ends well when it returns.
  explicit OtherJob(const std::function<void(const Launch&, int begun)>& body) {
    int ends[2];
    if (::pipe(ends) != 0) throw Error("no pipe");
    const int port = ::tessera::testing::free_port();
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      ::alarm(2 * kLimit.count());
      try {
        body(local_launch(0, 1, port), ends[1]);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "the other job: %s\n", e.what());
        ::_exit(9);
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    begun_ = ends[0];
  }
  ~OtherJob() {
    end();
    ::close(begun_);
  }
  OtherJob(const OtherJob&) = delete;
  OtherJob& operator=(const OtherJob&) = delete;

  // Until the body has written to `begun`.
  bool has_begun() const {
    pollfd one{begun_, POLLIN, 0};
    char byte = 0;
    return ::poll(&one, 1, std::chrono::milliseconds(kLimit).count()) == 1 &&
           ::read(begun_, &byte, 1) == 1;
  }
  bool runs() const { return ::waitpid(pid_, nullptr, WNOHANG) == 0; }
  // Waits for its end; its exit code.
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void end() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }

 private:
  pid_t pid_ = 0;
  int begun_ = -1;
};

// Tells once that a write has begun, and never writes.
class Stuck : public FileOperations {
 public:
  explicit Stuck(int begun) : begun_(begun) {}
  void write(const File&, const void*, std::size_t, std::uint64_t) override {
    if (::write(begun_, "w", 1) == 1)
      for (;;) ::pause();
  }

 private:
  int begun_;
};

}  // namespace

// What an evaluation, or somebody curious, does all the time beside a training.
TEST(CheckpointWriters, SixtySavesHoldWhileOthersLook) {
  const Folder folder;
  OtherJob looks([&](const Launch& launch, int begun) {
    const auto manager = manager_of(launch);
    for (bool told = false;; told = true) {
      Checkpointer checkpoints(manager, folder.path());
      checkpoints.names();
      // Neither a checkpoint that is being written, replaced nor removed is a damaged one.
      const auto name = checkpoints.to_resume();
      std::vector<std::string> problems;
      checkpoints.latest(&problems);
      if (!problems.empty()) throw Error(problems[0]);
      if (name) {
        try {
          CheckpointReader(manager.world(), folder.path(), *name).verify();
        } catch (const FileError&) {
          // Removed, or replaced, since it was named.
        }
      }
      if (!told && ::write(begun, "r", 1) != 1) throw Error("the pipe is gone");
    }
  });
  ASSERT_TRUE(looks.has_begun());
  const auto ends = fork_ranks(
      2,
      [&](const Launch& launch) -> std::string {
        const auto manager = manager_of(launch);
        Checkpointer checkpoints(manager, folder.path(), {.keep_last = 2});
        for (int i = 0; i < 60; ++i) {
          const auto state = numbers_of(manager.rank(), i);
          // Every third has the name of the one before, which it replaces.
          const std::string name = concat("c", i - (i % 3 == 2));
          if (i % 2)
            checkpoints.start_save(name, state);
          else
            checkpoints.save(name, state);
        }
        checkpoints.wait();
        for (const std::string& warning : checkpoints.warnings()) return warning;
        return "saved";
      },
      kLimit);
  for (const auto& end : ends) EXPECT_EQ(end.report, "saved");
  EXPECT_TRUE(looks.runs()) << "who looks meets no error";
  looks.end();
  std::vector<DamagedCheckpoint> damaged;
  const auto all = list_checkpoints(folder.path(), &damaged);
  EXPECT_TRUE(damaged.empty());
  ASSERT_EQ(all.size(), 2u);
  for (const auto& one : all) expect_one_value(folder.path(), one.name);
}

TEST(CheckpointWriters, TheLockDiesWithItsHolder) {
  const Folder folder;
  OtherJob holds([&](const Launch& launch, int begun) {
    const auto manager = manager_of(launch);
    Checkpointer(manager, folder.path(), {.operations = std::make_shared<Stuck>(begun)})
        .save("half", CheckpointState().set_real("value", 1));
  });
  ASSERT_TRUE(holds.has_begun());
  const auto save = [&](const Launch& launch) -> std::string {
    const auto manager = manager_of(launch);
    Checkpointer checkpoints(manager, folder.path());
    try {
      checkpoints.save("mine", numbers_of(manager.rank(), 3));
    } catch (const CheckpointLocked& e) {
      return e.what();
    }
    return "saved";
  };
  for (const auto& end : fork_ranks(2, save, kLimit))
    EXPECT_TRUE(contains(end.report, "another job saves")) << end.report;
  EXPECT_EQ(names_in(folder / "half").size(), 1u) << "it is being written";
  holds.end();
  for (const auto& end : fork_ranks(2, save, kLimit)) EXPECT_EQ(end.report, "saved");
  expect_one_value(folder.path(), "mine");
  EXPECT_FALSE(std::filesystem::exists(folder / "half")) << "nobody writes it any more";
}

// Two jobs that save under the same names: each save is refused or stands, and none is mixed.
TEST(CheckpointWriters, TwoJobsNeverMixTheirCheckpoints) {
  const Folder folder;
  const auto job = [&](const Launch& launch, double mine) {
    const auto manager = manager_of(launch);
    Checkpointer checkpoints(manager, folder.path());
    int saved = 0;
    for (int i = 0; saved < 20; ++i) {
      if (i > 1000000) return std::string("never had its turn");
      CheckpointState state;
      state.add("t", at::full({4, 3}, mine + saved));
      state.set_real("value", mine + saved);
      try {
        checkpoints.save(concat("c", saved % 4), state);
        ++saved;
      } catch (const CheckpointLocked&) {
        // The other one's turn.
      }
    }
    return std::string("saved");
  };
  OtherJob other([&](const Launch& launch, int) {
    if (job(launch, 1000) != "saved") throw Error("not saved");
  });
  const auto ends = fork_ranks(1, [&](const Launch& launch) { return job(launch, 0); }, kLimit);
  EXPECT_EQ(ends[0].report, "saved");
  EXPECT_EQ(other.wait(), 0);
  std::vector<DamagedCheckpoint> damaged;
  const auto all = list_checkpoints(folder.path(), &damaged);
  for (const auto& one : damaged) ADD_FAILURE() << one.damage;
  ASSERT_EQ(all.size(), 4u);
  for (const auto& one : all) expect_one_value(folder.path(), one.name);
}

}  // namespace tessera::test
