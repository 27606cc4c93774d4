// What happens in the folder beside the saves: who only looks changes nothing, damage is told,
// locks are respected, and what is to stay stays. And what is saved where ranks hold other values.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "support.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::Folder;
using ::tessera::testing::put;

namespace {

CheckpointState number_state(double value) {
  CheckpointState state;
  state.add("t", at::full({4}, value, at::kDouble));
  return state;
}

// A file system without locks.
class Lockless : public FileOperations {
 public:
  std::shared_ptr<const void> lock(const std::string& path) override {
    throw NotAvailable("'", path, "' cannot be locked: No locks available");
  }
};

// What a save that was killed leaves.
void leave_incomplete(const std::string& path) {
  std::filesystem::create_directory(path);
  put(path + '/' + shard_name(0, 1, make_nonce()), "half");
}

// A module with buffers of several dtypes, which each rank's forward makes its own.
struct Buffered : torch::nn::Module {
  Buffered(std::int64_t width, int rank) {
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    linear = register_module("linear", torch::nn::Linear(width, 2));
    counts = register_buffer("counts", at::arange(width, at::kLong) * (rank + 1));
    mask = register_buffer("mask", at::arange(width, at::kLong).remainder(rank + 2).eq(0));
    const at::NoGradGuard no_grad;
    at::manual_seed(5);
    for (const at::Tensor& p : parameters()) p.copy_(at::randn_like(p));
    at::manual_seed(100 + rank);
    for (int i = 0; i <= rank; ++i) norm->forward(at::randn({7, width}));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
  at::Tensor counts, mask;
};

}  // namespace

TEST(CheckpointFolder, WhatASaveLeftGoesWithTheNextSaveAlone) {
  const Folder folder;
  leave_incomplete(folder / "partial");
  on_threads(2, [&](DistributedManager& manager) {
    {
      Checkpointer looks(manager, folder.path());
      EXPECT_EQ(looks.latest(), std::nullopt);
      EXPECT_EQ(looks.to_resume(), std::nullopt);
      EXPECT_TRUE(looks.names().empty());
    }
    EXPECT_TRUE(std::filesystem::exists(folder / "partial"));
    manager.world().barrier();
    Checkpointer(manager, folder.path(), {.remove_incomplete = false}).save("a", number_state(1));
    EXPECT_TRUE(std::filesystem::exists(folder / "partial"));
    manager.world().barrier();
    Checkpointer saves(manager, folder.path());
    saves.save("b", number_state(2));
    EXPECT_FALSE(std::filesystem::exists(folder / "partial"));
    EXPECT_EQ(saves.names(), (std::vector<std::string>{"a", "b"}));
    EXPECT_TRUE(saves.warnings().empty());
  });
}

TEST(CheckpointFolder, WithoutLocksNothingIsRemovedAndAWarningSaysSo) {
  const Folder folder;
  leave_incomplete(folder / "partial");
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path(), {.operations = std::make_shared<Lockless>()});
    for (const char* name : {"a", "b"}) checkpoints.save(name, number_state(1));
    checkpoints.remove("a");
    EXPECT_EQ(checkpoints.latest(), "b");
    EXPECT_TRUE(std::filesystem::exists(folder / "partial"));
    const auto warnings = checkpoints.warnings();
    ASSERT_EQ(warnings.size(), manager.rank() == 0 ? 1u : 0u) << "once";
    if (manager.rank() == 0) {
      EXPECT_TRUE(contains(warnings[0], "up to you")) << warnings[0];
    }
  });
}

TEST(CheckpointFolder, ASecondWriterIsToldOnAllRanks) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path());
    checkpoints.save("a", number_state(1));
    std::shared_ptr<const void> other;
    if (manager.rank() == 0) other = FileOperations::system()->lock(folder / ".lock");
    manager.world().barrier();
    for (const auto& call :
         {std::function<void()>([&] { checkpoints.remove("a"); }),
          std::function<void()>([&] { checkpoints.save("b", number_state(2)); }),
          std::function<void()>([&] { checkpoints.start_save("b", number_state(2)); })}) {
      const std::string why = thrown<CheckpointLocked>(call);
      EXPECT_TRUE(contains(why, folder / ".lock")) << why;
    }
    EXPECT_EQ(checkpoints.names(), std::vector<std::string>{"a"});
    EXPECT_FALSE(std::filesystem::exists(folder / "b"));
    manager.world().barrier();
    other.reset();
    manager.world().barrier();
    checkpoints.start_save("b", number_state(2));
    checkpoints.wait();
    EXPECT_EQ(checkpoints.latest(), "b");
  });
}

TEST(CheckpointFolder, DamageIsToldToWhoResumes) {
  for (const std::string kind : {"shard cut", "shard gone", "manifest cut", "manifest flipped"}) {
    const Folder folder;
    on_threads(2, [&](DistributedManager& manager) {
      Checkpointer checkpoints(manager, folder.path());
      for (const char* name : {"one", "two", "three"}) checkpoints.save(name, number_state(1));
      EXPECT_EQ(checkpoints.to_resume(), "three");
      const auto damage = [&](const std::string& name) {
        manager.world().barrier();
        const std::string manifest = folder / (name + "/manifest.json"),
                          shard = folder / (name + "/" + names_in(folder / name).back());
        if (manager.rank() == 0) {
          const std::string text = contents(manifest), bytes = contents(shard);
          if (kind == "shard cut") put(shard, bytes.substr(0, bytes.size() / 2));
          if (kind == "shard gone") std::filesystem::remove(shard);
          if (kind == "manifest cut") put(manifest, text.substr(0, text.size() / 2));
          if (kind == "manifest flipped")
            put(manifest, text.substr(0, 99) + "~" + text.substr(100));
        }
        manager.world().barrier();
      };
      damage("three");
      const std::string why = thrown<CheckpointDamaged>([&] { checkpoints.to_resume(); });
      EXPECT_TRUE(contains(why, "'three'")) << why;
      EXPECT_TRUE(contains(why, folder / "three/")) << "what is wrong: " << why;
      EXPECT_TRUE(contains(why, "one") && contains(why, "two")) << why;
      EXPECT_EQ(checkpoints.latest(), "two") << "which passes over it";
      // Older than one that is whole, as far as that is known.
      checkpoints.save("four", number_state(4));
      if (kind.starts_with("shard"))
        EXPECT_EQ(checkpoints.to_resume(), "four");
      else
        EXPECT_TRUE(
            contains(thrown<CheckpointDamaged>([&] { checkpoints.to_resume(); }), "may be"));
      for (const char* name : {"three", "four"}) checkpoints.remove(name);
      for (const char* name : {"one", "two"}) damage(name);
      EXPECT_TRUE(contains(thrown<CheckpointDamaged>([&] { checkpoints.to_resume(); }),
                           "no other one is whole"));
    });
  }
}

TEST(CheckpointFolder, ProtectedOnesStayBesideTheLatest) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path(), {.keep_last = 2});
    for (int i = 0; i < 6; ++i) {
      if (i == 2) checkpoints.protect({"c0", "c1"});
      if (i == 4) checkpoints.protect({"c1"});
      checkpoints.save(concat("c", i), number_state(i));
    }
    EXPECT_EQ(checkpoints.names(), (std::vector<std::string>{"c1", "c4", "c5"}));
  });
}

// A job that ended between a commit and the removals that follow it: the next one makes them.
TEST(CheckpointFolder, KeepLastHoldsOverJobs) {
  const Folder folder;
  for (int job = 0; job < 4; ++job) {
    on_threads(2, [&](DistributedManager& manager) {
      Checkpointer(manager, folder.path()).save(concat("left", job), number_state(job));
      Checkpointer checkpoints(manager, folder.path(), {.keep_last = 1});
      checkpoints.save(concat("kept", job), number_state(job));
      EXPECT_EQ(checkpoints.names(), std::vector<std::string>{concat("kept", job)});
    });
  }
}

TEST(CheckpointFolder, WhatCannotBeSavedIsNamed) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path());
    const auto why = [&](const at::Tensor& t) {
      CheckpointState state;
      state.add("fine", at::ones({2})).add("the one", manager.rank() == 1 ? t : at::ones({2}));
      return thrown<InvalidArgument>([&] { checkpoints.save("c", state); });
    };
    EXPECT_TRUE(contains(why(at::ones({2}).to_sparse()), "rank 1: 'the one' is not dense"));
    EXPECT_TRUE(contains(why(at::empty({2}, at::kMeta)), "rank 1: 'the one' has no data"));
    const std::string name =
        thrown<InvalidArgument>([&] { checkpoints.save(std::string("a\0b", 3), number_state(1)); });
    EXPECT_TRUE(contains(name, "'a\\x00b' cannot be the name")) << name;
    EXPECT_TRUE(checkpoints.names().empty());
  });
}

// Batch norm's statistics, counters and masks are each rank's own until they are broadcast.
TEST(CheckpointReplicas, WhatDiffersIsTheFirstRanksSetBitByBit) {
  for (const int ranks : {2, 3, 4}) {
    for (const std::int64_t width : {6, 20000}) {
      const Folder folder;
      std::map<std::string, at::Tensor> first;
      on_threads(ranks, [&](DistributedManager& manager) {
        const auto module = std::make_shared<Buffered>(width, manager.rank());
        CheckpointState state;
        state.add("net.", *module);
        // Shards by hand, of which two ranks each hold the same box with other values.
        state.add("hand", at::full({1, width}, manager.rank(), at::kInt),
                  {{2, width}, {manager.rank() % 2, 0}});
        if (manager.rank() == 0)
          for (const auto& t : state.tensors()) first[t.name] = t.value.detach().clone();
        Checkpointer checkpoints(manager, folder.path());
        checkpoints.save("c", state);
        // The same again from the plan of before, and in the background.
        checkpoints.start_save("d", state);
        checkpoints.wait();
      });
      for (const char* name : {"c", "d"}) {
        on_threads(1, [&](DistributedManager& manager) {
          const auto module = std::make_shared<Buffered>(width, 9);
          const at::Tensor hand = at::full({2, width}, -1, at::kInt);
          CheckpointState state;
          state.add("net.", *module).add("hand", hand);
          CheckpointReader(manager.world(), folder.path(), name).load(state);
          for (const auto& t : state.tensors()) {
            if (t.name == "hand") continue;
            EXPECT_TRUE(t.value.equal(first.at(t.name)))
                << t.name << " of width " << width << ", " << ranks << " ranks";
          }
          EXPECT_TRUE(hand[0].eq(0).all().item<bool>()) << "rank 0's";
          EXPECT_TRUE(hand[1].eq(1).all().item<bool>()) << "rank 1's";
        });
      }
    }
  }
}

// Values that become equal, or differ, are planned anew although shapes are those of before.
TEST(CheckpointReplicas, ThePlanFollowsTheValues) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path());
    const at::Tensor t = at::zeros({3, 100000});
    CheckpointState state;
    state.add("t", t);
    for (const bool differs : {false, true, false, true}) {
      t.fill_(differs ? manager.rank() : 7);
      checkpoints.save("c", state);
      const std::uint64_t mine = checkpoints.bytes_written();
      if (differs)
        EXPECT_EQ(mine > 0, manager.rank() == 0);
      else
        EXPECT_GT(mine, 3u * 100000 * 4 / 4) << "a third each";
      const at::Tensor back = at::ones({3, 100000});
      CheckpointState loaded;
      loaded.add("t", back);
      CheckpointReader(manager.world(), folder.path(), "c").load(loaded);
      EXPECT_TRUE(back.eq(differs ? 0 : 7).all().item<bool>());
      manager.world().barrier();
    }
  });
}

}  // namespace tessera::test
