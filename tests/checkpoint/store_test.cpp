// Checkpoints in an object store over loopback HTTP, which fails and is slow on purpose: the same
// values on any number of ranks, errors on all of them within a limit, and of two writers one is
// told. processes_test.cpp kills a rank at each of its calls.

#include "object_store.h"
#include "support.h"

namespace tessera::test {

using ::tessera::testing::Fault;
using ::tessera::testing::HttpIO;
using ::tessera::testing::ObjectStore;

namespace {

// Sharded unevenly, with a value.
CheckpointState state_of(DistributedManager& manager, double value) {
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  CheckpointState state;
  const at::Tensor t = at::arange(21, at::kDouble).reshape({7, 3}) + value;
  state.add("t", distribute_tensor(t, mesh, {Shard(0)})).add("plain", at::full({5}, value));
  state.set_real("value", value);
  return state;
}

// Its value, after everything has been compared.
double loaded(DistributedManager& manager, const std::shared_ptr<CheckpointIO>& io,
              const std::string& name) {
  const CheckpointReader saved(manager.world(), io, name);
  saved.verify();
  const double value = saved.real("value");
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  const at::Tensor t = full_tensor(saved.read("t", ShardSpec(mesh, {7, 3}, {Shard(1)})));
  EXPECT_TRUE(t.equal(at::arange(21, at::kDouble).reshape({7, 3}) + value)) << name;
  return value;
}

// A store that cannot decide between two writers.
class Unconditional : public HttpIO {
 public:
  using HttpIO::HttpIO;
  bool put(const std::string& name, std::string_view bytes, bool if_absent) override {
    if (if_absent) throw NotAvailable("the store has no conditional puts");
    return HttpIO::put(name, bytes, false);
  }
};

}  // namespace

TEST(CheckpointStore, WhatIsSavedThereIsLoadedOnOtherRanks) {
  const ObjectStore store;
  const auto io = [&] { return std::make_shared<HttpIO>(store.port()); };
  on_threads(3, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, io(), {.keep_last = 2});
    EXPECT_EQ(checkpoints.to_resume(), std::nullopt);
    EXPECT_EQ(checkpoints.folder(), concat("http://127.0.0.1:", store.port(), '/'));
    for (const double value : {1, 2, 3})
      checkpoints.start_save(concat("c", value), state_of(manager, value));
    checkpoints.wait();
    // The same name again.
    checkpoints.save("c3", state_of(manager, 4));
    EXPECT_EQ(checkpoints.names(), (std::vector<std::string>{"c2", "c3"}));
    EXPECT_EQ(loaded(manager, checkpoints.io(), "c3"), 4);
    EXPECT_TRUE(checkpoints.warnings().empty());
  });
  EXPECT_TRUE(io()->list("c1").empty()) << "nothing is left of it";
  EXPECT_EQ(io()->list("c3").size(), read_manifest(*io(), "c3").files.size() + 1);
  EXPECT_EQ(io()->list("").size(), 3u) << "two checkpoints and the last claim";
  for (const int ranks : {1, 2, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Checkpointer checkpoints(manager, io());
      EXPECT_EQ(checkpoints.to_resume(), "c3");
      EXPECT_EQ(loaded(manager, checkpoints.io(), "c3"), 4);
      const CheckpointReader saved(manager.world(), io(), "c2");
      const auto mesh = manager.mesh({{"x", ranks}});
      saved.read("t", ShardSpec(mesh, {7, 3}, {Shard(1)}), {.verify = false});
      EXPECT_EQ(saved.bytes_read(), 7u * 8 *
                                        (static_cast<std::size_t>(3 + ranks - 1 - manager.rank()) /
                                         static_cast<std::size_t>(ranks)))
          << "ranges, and not one byte more";
      if (ranks == 4) checkpoints.remove("c2");
      EXPECT_EQ(checkpoints.names().size(), ranks == 4 ? 1u : 2u);
    });
  }
  on_threads(2, [&](DistributedManager& manager) {
    EXPECT_TRUE(contains(thrown<FileError>([&] { CheckpointReader(manager.world(), io(), "c1"); }),
                         "never ended, or not begun"));
    const std::shared_ptr<CheckpointIO> none;
    for (const auto& call :
         {std::function<void()>([&] { Checkpointer(manager, manager.rank() ? io() : none); }),
          std::function<void()>(
              [&] { CheckpointReader(manager.world(), manager.rank() ? none : io(), "c3"); })})
      EXPECT_TRUE(contains(thrown<InvalidArgument>(call), "null"));
  });
}

// Each call of a save goes wrong once, on each rank: the save is refused on all of them or stands,
// and so does what was there before, though the store may do what it was asked much later.
TEST(CheckpointStore, AFaultAtEveryCallIsToldOnAllRanksAndNothingIsLost) {
  for (const Fault fault : {Fault::error, Fault::slow, Fault::lost}) {
    for (const int victim : {0, 1}) {
      int refused = 0;
      bool more = true;
      for (int at = 0; more; ++at) {
        ASSERT_LT(at, 60);
        const ObjectStore store;
        std::atomic<int> told{0};
        on_threads(2, [&](DistributedManager& manager) {
          const bool mine = manager.rank() == victim;
          const auto io = std::make_shared<HttpIO>(store.port());
          Checkpointer checkpoints(manager, io, {.keep_last = 1});
          checkpoints.save("first", state_of(manager, 1));
          if (mine) io->fail_at(at, fault);
          try {
            checkpoints.save("second", state_of(manager, 2));
          } catch (const FileError& e) {
            ++told;
            EXPECT_TRUE(contains(e.what(), "http://")) << e.what();
          }
          if (mine) more = io->failed();
        });
        if (more) refused += told > 0;
        ASSERT_TRUE(told == 0 || told == 2) << "call " << at;
        on_threads(3, [&](DistributedManager& manager) {
          Checkpointer checkpoints(manager, std::make_shared<HttpIO>(store.port()));
          const auto name = checkpoints.to_resume();
          ASSERT_TRUE(name == "second" || (name == "first" && told > 0)) << "call " << at;
          EXPECT_EQ(loaded(manager, checkpoints.io(), *name), *name == "first" ? 1 : 2);
          checkpoints.save("second", state_of(manager, 3));
          EXPECT_EQ(checkpoints.to_resume(), "second");
          EXPECT_EQ(loaded(manager, checkpoints.io(), "second"), 3);
        });
      }
      EXPECT_GE(refused, victim == 0 ? 8 : 1);
    }
  }
}

TEST(CheckpointStore, ADeadOneIsAnErrorOnAllRanksWithinTheLimit) {
  const ObjectStore store;
  on_threads(2, [&](DistributedManager& manager) {
    const auto io = std::make_shared<HttpIO>(store.port());
    Checkpointer checkpoints(manager, io);
    checkpoints.save("a", state_of(manager, 1));
    const CheckpointReader saved(manager.world(), io, "a");
    io->set_limit(std::chrono::milliseconds(100));
    manager.world().barrier();
    store.stop();
    const auto begun = std::chrono::steady_clock::now();
    for (const auto& call :
         {std::function<void()>([&] { checkpoints.save("b", state_of(manager, 2)); }),
          std::function<void()>([&] {
            checkpoints.start_save("b", state_of(manager, 2));
            checkpoints.wait();
          }),
          std::function<void()>([&] { checkpoints.to_resume(); }),
          std::function<void()>([&] { saved.verify(); })}) {
      const std::string why = thrown<FileError>(call);
      EXPECT_TRUE(contains(why, "no answer within 100 ms")) << why;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
  });
}

// The other job's save happens while this one is between two calls: of both at least one stands,
// and the other is told on all its ranks.
TEST(CheckpointStore, OfTwoWritersOneIsTold) {
  const auto both = [&](const std::string& before, const std::string& name,
                        const std::string& others) {
    const ObjectStore store;
    on_threads(2, [&](DistributedManager& manager) {
      const bool first = manager.rank() == 0;
      const auto io = std::make_shared<HttpIO>(store.port());
      Checkpointer mine(manager, io);
      mine.save("old", state_of(manager, 1));
      std::optional<Checkpointer> other;
      if (first) {
        other.emplace(manager, std::make_shared<HttpIO>(store.port()), CheckpointOptions{},
                      std::vector<int>{0});
        io->before_put(before,
                       [&] { other->save(others, CheckpointState().set_real("value", 7)); });
      }
      const auto save = [&] { mine.save(name, state_of(manager, 2)); };
      const bool stands = before == "manifest.json" && name != others;
      if (stands)
        save();
      else
        EXPECT_TRUE(contains(thrown<CheckpointLocked>(save), "another job")) << before;
      EXPECT_EQ(mine.names(), stands ? (std::vector<std::string>{"old", name, others})
                                     : (std::vector<std::string>{"old", others}));
      const CheckpointReader saved(manager.world(), io, others);
      EXPECT_EQ(saved.real("value"), 7);
      saved.verify();
      EXPECT_EQ(loaded(manager, io, "old"), 1);
      mine.save("next", state_of(manager, 3));
      EXPECT_EQ(mine.to_resume(), "next");
    });
  };
  // While this one writes its shards; and in the moment between its last look and its manifest.
  for (const std::string before : {".safetensors", "manifest.json"})
    for (const std::string others : {"new", "other"}) both(before, "new", others);
}

TEST(CheckpointStore, WithoutConditionalPutsAWarningSaysSo) {
  const ObjectStore store;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, std::make_shared<Unconditional>(store.port()));
    for (const double value : {1, 2}) checkpoints.save("c", state_of(manager, value));
    EXPECT_EQ(loaded(manager, checkpoints.io(), "c"), 2);
    const auto warnings = checkpoints.warnings();
    ASSERT_EQ(warnings.size(), manager.rank() == 0 ? 1u : 0u);
    if (manager.rank() == 0) {
      EXPECT_TRUE(contains(warnings[0], "no conditional puts")) << warnings[0];
    }
  });
}

}  // namespace tessera::test
