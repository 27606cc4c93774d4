// Ranks as processes, in memory and over Gloo, of which one is killed at any of its operations, on
// a file system and on an object store: the others learn of it in bounded time, and what was saved
// before can be loaded by whoever comes next.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include "../comm/fork_ranks.h"
#include "object_store.h"
#include "support.h"
#include "tessera/checkpoint/file.h"

namespace tessera::test {

using ::tessera::testing::Fault;
using ::tessera::testing::Folder;
using ::tessera::testing::fork_ranks;
using ::tessera::testing::HttpIO;
using ::tessera::testing::latest_checkpoint;
using ::tessera::testing::ObjectStore;
using ::tessera::testing::RankEnd;

namespace {

// Ends the process by SIGKILL in its n-th operation.
class Killed : public FileOperations {
 public:
  explicit Killed(int at) : left_(at) {}
  File open(const std::string& path, bool existing) override {
    step();
    return FileOperations::open(path, existing);
  }
  void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    if (left_ == 0) FileOperations::write(file, data, bytes / 2, offset);
    step();
    FileOperations::write(file, data, bytes, offset);
  }
  void sync(const File& file) override {
    step();
    FileOperations::sync(file);
  }
  void rename(const std::string& from, const std::string& to) override {
    step();
    FileOperations::rename(from, to);
  }
  void sync_folder(const std::string& path) override {
    step();
    FileOperations::sync_folder(path);
  }
  void arm() { armed_ = true; }

 private:
  void step() {
    if (armed_ && left_-- == 0) ::kill(::getpid(), SIGKILL);
  }
  int left_;
  bool armed_ = false;
};

CheckpointState table(int rank, double value) {
  CheckpointState state;
  state.add("t", at::full({2, 3}, value + rank), {{4, 3}, {2 * rank, 0}});
  state.set_integer("step", static_cast<std::int64_t>(value));
  return state;
}

// The step of the checkpoint that can be loaded, after its values have been compared; by this
// process alone.
std::int64_t loadable(const std::shared_ptr<CheckpointIO>& io, const std::string& name) {
  const SavedCheckpoint saved(io, name);
  std::vector<float> t(12);
  saved.read(*saved.manifest().find(EntryKind::tensor, "t"), {{0, 4}, {0, 3}}, t.data());
  const Entry* step = saved.manifest().find(EntryKind::value, "step");
  std::string bytes(static_cast<std::size_t>(step->info.shape[0]), '\0');
  saved.read(*step, {{0, step->info.shape[0]}}, bytes.data());
  const auto value = std::stoll(bytes);
  for (int i = 0; i < 12; ++i)
    EXPECT_EQ(t[static_cast<std::size_t>(i)], static_cast<float>(value + i / 6)) << "half loaded";
  return value;
}

class CheckpointProcesses : public ::testing::TestWithParam<const char*> {};

TEST_P(CheckpointProcesses, OneRankKilledAtEveryOperation) {
  for (const bool background : {false, true}) {
    for (const int victim : {0, 1}) {
      for (int at = 0;; ++at) {
        ASSERT_LT(at, 40);
        const Folder folder;
        const auto body = [&](const Launch& launch) -> std::string {
          ManagerOptions options;
          options.launch = launch;
          options.backend = GetParam();
          options.timeout = std::chrono::seconds(10);
          const auto manager = DistributedManager::initialize(options);
          const auto operations = std::make_shared<Killed>(manager.rank() == victim ? at : -1);
          Checkpointer checkpoints(manager, folder.path(),
                                   {.timeout = std::chrono::seconds(10), .operations = operations});
          checkpoints.save("first", table(manager.rank(), 10));
          operations->arm();
          try {
            if (background) {
              checkpoints.start_save("second", table(manager.rank(), 20));
              checkpoints.wait();
            } else {
              checkpoints.save("second", table(manager.rank(), 20));
            }
          } catch (const CommError& e) {
            return "lost";
          }
          return "saved";
        };
        const auto ends = fork_ranks(2, body, std::chrono::seconds(40));
        const RankEnd& other = ends[1 - victim];
        ASSERT_TRUE(other.ended) << "a hang; victim " << victim << ", operation " << at;
        ASSERT_TRUE(other.report == "lost" || other.report == "saved") << other.report;
        const auto latest = latest_checkpoint(folder.path());
        ASSERT_TRUE(latest.has_value());
        EXPECT_EQ(loadable(local_folder(folder.path()), "first"), 10);
        if (latest == "second") {
          EXPECT_EQ(loadable(local_folder(folder.path()), "second"), 20);
        } else {
          EXPECT_EQ(other.report, "lost");
        }
        if (ends[victim].signal == 0) {
          EXPECT_EQ(latest, "second");
          EXPECT_EQ(ends[victim].report, "saved");
          break;
        }
        EXPECT_EQ(ends[victim].signal, SIGKILL);
      }
    }
  }
}

// The process of two ranks is killed with half of a call sent, or once the store has done it; three
// ranks go on from what is there. Kill.AtEveryCallOfAStore has every call, without ranks.
TEST(CheckpointStoreProcesses, KilledWhileItSaves) {
  const auto saves = [](int port, int victim, int at, Fault fault) {
    return [=](const Launch&) -> std::string {
      on_threads(2, [&](DistributedManager& manager) {
        const auto io = std::make_shared<HttpIO>(port);
        Checkpointer checkpoints(manager, io, {.keep_last = 1});
        checkpoints.save("first", table(manager.rank(), 10));
        if (manager.rank() == victim) io->fail_at(at, fault);
        checkpoints.start_save("second", table(manager.rank(), 20));
        checkpoints.wait();
        if (io->failed()) throw Error("it lives");
      });
      return "saved";
    };
  };
  const auto goes_on = [](int port) {
    return [=](const Launch&) -> std::string {
      std::string report;
      on_threads(3, [&](DistributedManager& manager) {
        const auto io = std::make_shared<HttpIO>(port);
        Checkpointer checkpoints(manager, io);
        const std::string name = checkpoints.to_resume().value_or("");
        const CheckpointReader saved(manager.world(), io, name);
        const auto mesh = manager.mesh({{"x", 3}});
        const at::Tensor t = full_tensor(saved.read("t", ShardSpec(mesh, {4, 3}, {Shard(0)})));
        const auto value = static_cast<double>(saved.integer("step"));
        EXPECT_TRUE(t.equal(at::tensor({0., 0., 1., 1.}).add(value).unsqueeze(1).expand({4, 3})));
        for (const char* again : {"second", "third"}) {
          checkpoints.save(again, CheckpointState().set_real("value", 1));
          EXPECT_EQ(checkpoints.to_resume(), again);
        }
        if (manager.rank() == 0) report = name;
      });
      return ::testing::Test::HasFailure() ? "wrong" : report;
    };
  };
  std::set<std::string> seen;
  for (const auto& [victim, at] : {std::pair(1, 0), {0, 4}, {0, 14}, {0, 17}}) {
    const ObjectStore store;
    const auto limit = std::chrono::seconds(40);
    const Fault fault = at % 2 ? Fault::dies_after : Fault::dies_within;
    const auto end = fork_ranks(1, saves(store.port(), victim, at, fault), limit)[0];
    ASSERT_EQ(end.signal, SIGKILL) << end.report;
    const auto io = std::make_shared<HttpIO>(store.port());
    std::vector<DamagedCheckpoint> damaged;
    for (const auto& one : list_checkpoints(*io, &damaged))
      EXPECT_EQ(loadable(io, one.name), one.name == "first" ? 10 : 20);
    ASSERT_TRUE(damaged.empty()) << damaged[0].damage;
    const std::string from = fork_ranks(1, goes_on(store.port()), limit)[0].report;
    ASSERT_TRUE(from == "first" || from == "second") << "call " << at << ": " << from;
    seen.insert(from);
  }
  EXPECT_EQ(seen.size(), 2u);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// The first rank of a save to one file has no memory for the full tensor: the others must not wait.
TEST_P(CheckpointProcesses, WithoutMemoryForTheFullTensorAllThrow) {
  const Folder folder;
  const auto body = [&](const Launch& launch) -> std::string {
    ManagerOptions options;
    options.launch = launch;
    options.backend = GetParam();
    options.timeout = std::chrono::seconds(20);
    const auto manager = DistributedManager::initialize(options);
    const auto mesh = manager.mesh({{"x", 2}});
    const std::int64_t rows = 80'000'000;
    const bool all = manager.rank() == 1;
    const auto sharded = from_local(at::zeros({all ? rows : 0}),
                                    ShardSpec(mesh, {rows}, {Shard(0)}, {{0, {0, rows}}}));
    // The connections are made before the memory is short.
    manager.world().barrier();
    if (!all) {
      std::ifstream status("/proc/self/statm");
      rlim_t pages = 0;
      status >> pages;
      rlimit limit{};
      ::getrlimit(RLIMIT_AS, &limit);
      limit.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (160 << 20);
      ::setrlimit(RLIMIT_AS, &limit);
    }
    try {
      save(sharded, folder / "one.safetensors");
    } catch (const Error& e) {
      return e.what();
    }
    return "saved";
  };
  for (const RankEnd& end : fork_ranks(2, body, std::chrono::seconds(60))) {
    EXPECT_TRUE(end.ended);
    EXPECT_TRUE(contains(end.report, "allocate memory")) << end.report;
  }
  EXPECT_TRUE(names_in(folder.path()).empty());
}

// A rank that is not the first has memory for its shard, but not for what arrives.
TEST_P(CheckpointProcesses, WithoutMemoryToReceiveAllThrow) {
  const Folder folder;
  const auto body = [&](const Launch& launch) -> std::string {
    ManagerOptions options;
    options.launch = launch;
    options.backend = GetParam();
    options.timeout = std::chrono::seconds(20);
    const auto manager = DistributedManager::initialize(options);
    const auto mesh = manager.mesh({{"x", 2}});
    const std::int64_t rows = 24'000'000;  // 96 MB
    const bool second = manager.rank() == 1;
    const std::string path = folder / "one.safetensors";
    save(from_local(at::zeros({second ? 0 : rows}),
                    ShardSpec(mesh, {rows}, {Shard(0)}, {{0, {rows, 0}}})),
         path);
    if (second) {
      std::ifstream status("/proc/self/statm");
      rlim_t pages = 0;
      status >> pages;
      rlimit limit{};
      ::getrlimit(RLIMIT_AS, &limit);
      limit.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (150 << 20);
      ::setrlimit(RLIMIT_AS, &limit);
    }
    try {
      load(path, ShardSpec(mesh, {rows}, {Shard(0)}, {{0, {0, rows}}}));
    } catch (const Error& e) {
      return e.what();
    }
    return "loaded";
  };
  for (const RankEnd& end : fork_ranks(2, body, std::chrono::seconds(60))) {
    EXPECT_TRUE(end.ended);
    EXPECT_TRUE(contains(end.report, "rank 1")) << end.report;
    EXPECT_TRUE(contains(end.report, "allocate memory")) << end.report;
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Over, CheckpointProcesses, ::testing::Values("shm", "gloo"));

}  // namespace
}  // namespace tessera::test
