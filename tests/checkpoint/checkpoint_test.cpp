// What a checkpoint promises to the ranks that save and load it: values by name, errors on all
// ranks, saves in the background, retention. Disks that fail: failing_disk_test.cpp.

#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "saved_rows.h"
#include "tessera/checkpoint/file.h"

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
namespace {
thread_local bool no_thread_starts = false;
}

// As a system that has reached its limit of processes.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  if (no_thread_starts) return EAGAIN;
  using Function = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, start, argument);
}
#endif

namespace tessera::test {

using ::tessera::testing::Folder;

namespace {

// Writes wait until the gate is opened.
class Gate : public FileOperations {
 public:
  void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
    lock.unlock();
    FileOperations::write(file, data, bytes, offset);
  }
  void set(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

}  // namespace

TEST(Checkpoint, ValuesByName) {
  const Folder folder;
  const std::string bytes("\0\xff\x80 any", 8);
  on_threads(3, [&](DistributedManager& manager) {
    CheckpointState state;
    state.set("bytes", bytes).set("empty", "").set_integer("step", -7).set_real("loss", 0.1);
    state.set_of_rank("random", concat("of rank ", manager.rank()));
    if (manager.rank() == 1) state.set_of_rank("only", "here");
    Checkpointer(manager, folder.path()).save("c", state);
  });
  for (const int ranks : {2, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const CheckpointReader saved(manager.world(), folder.path(), "c");
      EXPECT_EQ(saved.value_names(), (std::vector<std::string>{"bytes", "empty", "loss", "step"}));
      EXPECT_EQ(saved.rank_value_names(), (std::vector<std::string>{"only", "random"}));
      EXPECT_EQ(saved.value("bytes"), bytes);
      EXPECT_EQ(saved.value("empty"), "");
      EXPECT_EQ(saved.integer("step"), -7);
      EXPECT_EQ(saved.real("loss"), 0.1);
      EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { saved.integer("bytes"); }), "'bytes'"));
      EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { saved.value("none"); }), "loss"));
      EXPECT_EQ(saved.values_of_ranks("random"),
                (std::map<int, std::string>{{0, "of rank 0"}, {1, "of rank 1"}, {2, "of rank 2"}}));
      EXPECT_EQ(saved.values_of_ranks("only"), (std::map<int, std::string>{{1, "here"}}));
      CheckpointState state;
      saved.load(state);
      EXPECT_EQ(state.get("bytes"), bytes);
      EXPECT_EQ(state.has_of_rank("random"), manager.rank() < 3);
      if (manager.rank() < 3) {
        EXPECT_EQ(state.get_of_rank("random"), concat("of rank ", manager.rank()));
      }
    });
  }
}

TEST(Checkpoint, WhatDoesNotFitIsReportedBeforeAnythingChanges) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    CheckpointState state;
    state.add("a", at::ones({2})).add("b", at::ones({3})).add("c", at::ones({4}));
    Checkpointer(manager, folder.path()).save("c", state);
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const at::Tensor a = at::zeros({2}), b = at::zeros({5}), d = at::zeros({1}),
                     c = at::zeros({4}, at::kDouble);
    CheckpointState other;
    other.add("a", a).add("b", b).add("d", d).add("c", c);
    const std::string why = thrown<InvalidArgument>([&] { saved.load(other); });
    EXPECT_TRUE(contains(why, "'b' has shape [5], in the checkpoint [3]")) << why;
    EXPECT_TRUE(contains(why, "'d' is not in the checkpoint")) << why;
    EXPECT_TRUE(contains(why, "'c' is F64")) << why;
    EXPECT_EQ(a.sum().item<float>(), 0);
    CheckpointState less;
    less.add("a", a).add("c", c);
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { saved.load(less, {.convert = true}); }),
                         "'b' is in the checkpoint alone"));
    saved.load(less, {.allow_extra = true, .convert = true});
    EXPECT_EQ(c.sum().item<double>(), 4);
    EXPECT_TRUE(contains(
        thrown<FileError>([&] { CheckpointReader(manager.world(), folder.path(), "absent"); }),
        "absent"));
  });
}

TEST(Checkpoint, RanksThatDisagreeAreNamed) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path(), {.check_replicas = true});
    CheckpointState value, tensor;
    value.set_integer("step", manager.rank() == 2 ? 5 : 4);
    EXPECT_TRUE(
        contains(thrown<InvalidArgument>([&] { checkpoints.save("c", value); }), "value 'step'"));
    tensor.add("w", at::full({3}, manager.rank() == 1 ? 1.0 : 2.0));
    EXPECT_TRUE(
        contains(thrown<InvalidArgument>([&] { checkpoints.save("c", tensor); }), "tensor 'w'"));
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] {
                           checkpoints.save(manager.rank() == 0 ? "one" : "other",
                                            CheckpointState());
                         }),
                         "name"));
    EXPECT_THROW(checkpoints.save("a/b", CheckpointState()), InvalidArgument);
    EXPECT_TRUE(checkpoints.names().empty());
    checkpoints.save("empty", CheckpointState());
    EXPECT_EQ(checkpoints.latest(), "empty") << "a state of nothing is a checkpoint too";
  });
}

TEST(Checkpoint, BackgroundSavesHoldTheStateOfTheirCall) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    const auto gate = std::make_shared<Gate>();
    Checkpointer checkpoints(manager, folder.path(), {.operations = gate});
    CheckpointState state = rows_state(manager, 1);
    gate->set(false);
    checkpoints.start_save("one", state);
    to_local(state.tensors()[0].value).fill_(2);
    EXPECT_TRUE(checkpoints.saving());
    manager.world().all_gather_bytes("both meet while it is being written");
    gate->set(true);
    checkpoints.start_save("two", state);
    to_local(state.tensors()[0].value).fill_(3);
    checkpoints.wait();
    EXPECT_FALSE(checkpoints.saving());
    EXPECT_EQ(checkpoints.names(), (std::vector<std::string>{"one", "two"}));
    EXPECT_EQ(loaded_value(manager, folder.path(), "one"), 1);
    EXPECT_EQ(loaded_value(manager, folder.path(), "two"), 2);
    checkpoints.save("three", state);
    EXPECT_EQ(loaded_value(manager, folder.path(), "three"), 3);
  });
}

TEST(Checkpoint, ASecondSaveIsRefusedOnAllRanksIfOneIsBusy) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    const auto gate = std::make_shared<Gate>();
    Checkpointer checkpoints(manager, folder.path(),
                             {.busy = CheckpointOptions::Busy::refuse, .operations = gate});
    const CheckpointState state = rows_state(manager, 1);
    // Only rank 1 is slow, and the others know it.
    if (manager.rank() == 1) gate->set(false);
    checkpoints.start_save("one", state);
    EXPECT_TRUE(
        contains(thrown<CheckpointBusy>([&] { checkpoints.start_save("two", state); }), "rank "));
    EXPECT_THROW(checkpoints.save("two", state), CheckpointBusy);
    manager.world().all_gather_bytes("");
    gate->set(true);
    checkpoints.wait();
    checkpoints.start_save("three", state);
    checkpoints.wait();
    EXPECT_EQ(checkpoints.names(), (std::vector<std::string>{"one", "three"}));
  });
}

TEST(Checkpoint, FoldersOfAnyBytesAreListed) {
  const Folder folder;
  const std::string bytes = folder / "caf\xe9";
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, bytes);
    checkpoints.save("a b", rows_state(manager, 1));
    EXPECT_THROW(checkpoints.save("caf\xe9", rows_state(manager, 1)), InvalidArgument);
    manager.world().barrier();
    if (manager.rank() == 0) std::filesystem::copy(bytes + "/a b", bytes + "/\xff");
    manager.world().barrier();
    std::vector<std::string> problems;
    EXPECT_EQ(checkpoints.names(&problems), std::vector<std::string>{"a b"});
    ASSERT_EQ(problems.size(), 1u);
    EXPECT_TRUE(contains(problems[0], bytes + "/\xff")) << problems[0];
  });
}

TEST(Checkpoint, TheFirstRanksSpellingOfTheFolderDecides) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    const std::string spelled = folder.path() + (manager.rank() == 1 ? "/." : "");
    Checkpointer checkpoints(manager, spelled, {.timeout = std::chrono::seconds(20)});
    checkpoints.start_save("one", rows_state(manager, 1));
    checkpoints.wait();
    EXPECT_EQ(loaded_value(manager, folder.path(), "one"), 1);
    EXPECT_TRUE(contains(thrown<MismatchError>([&] {
                           Checkpointer(manager, folder.path(), {.keep_last = manager.rank() / 2});
                         }),
                         "keep_last"));
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] {
                           Checkpointer(manager, manager.rank() == 2 ? "" : folder.path());
                         }),
                         "rank 2"));
  });
}

TEST(Checkpoint, TheLongestLimitIsNoLimit) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path(), {.timeout = std::chrono::milliseconds::max()});
    checkpoints.start_save("one", rows_state(manager, 1));
    checkpoints.wait();
    EXPECT_EQ(loaded_value(manager, folder.path(), "one"), 1);
  });
}

// Who has little to read waits for who has most, longer than groups wait otherwise.
TEST(Checkpoint, LoadingHasALimitOfItsOwn) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    CheckpointState state = rows_state(manager, 1);
    Checkpointer(manager, folder.path()).save("c", state);
    const at::Tensor t = state.tensors()[0].value;
    save(t, folder / "one.safetensors");
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    manager.world().set_timeout(std::chrono::milliseconds(100));
    const auto slow = [&] {
      if (manager.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    };
    slow();
    saved.load(state);
    slow();
    saved.verify();
    slow();
    saved.export_file(folder / "two.safetensors");
    slow();
    load_into({{"t", t}}, mesh, folder / "two.safetensors");
    manager.world().set_timeout(std::chrono::seconds(60));
  });
}

// What is wrong on one rank alone is told to all, before any tensor of any rank has changed.
TEST(Checkpoint, AFileIsLoadedIntoAllTensorsOfAllRanksOrNone) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const std::string path = folder / "two.safetensors";
    const auto rows = [&](double value) {
      return distribute_tensor(at::full({5, 3}, value, at::kDouble), mesh, {Shard(0)});
    };
    const auto plain = [](double value) { return at::full({4}, value, at::kDouble); };
    save({{"a", rows(1)}, {"b", plain(2)}}, mesh, path);
    const bool odd = manager.rank() == 1;
    const auto a = rows(7), b = plain(8);
    const auto refused = [&](const NamedTensors& tensors) {
      const auto error = thrown<InvalidArgument>([&] { load_into(tensors, mesh, path); });
      EXPECT_TRUE(to_local(a).eq(7).all().item<bool>() && b.eq(8).all().item<bool>()) << error;
      return error;
    };
    NamedTensors more{{"a", a}, {"b", b}};
    if (odd) more.emplace_back("c", plain(0));
    EXPECT_TRUE(contains(refused(more), "rank 1: load: ")) << refused(more);
    // The last one cannot be written to, on one rank.
    const auto shared = at::full({1}, 3.0, at::kDouble).expand({4});
    const auto error = refused({{"a", a}, {"b", odd ? shared : b}});
    EXPECT_TRUE(contains(error, "rank 1: load: several elements of 'b' share memory")) << error;
    // Other layouts: the ranks would not read the same.
    const auto other = odd ? distribute_tensor(plain(8), mesh, {Shard(0)}) : b;
    EXPECT_TRUE(contains(refused({{"a", a}, {"b", other}}), "give all ranks the same"));
    // Another order is none.
    if (odd)
      load_into({{"b", b}, {"a", a}}, mesh, path);
    else
      load_into({{"a", a}, {"b", b}}, mesh, path);
    EXPECT_TRUE(to_local(a).eq(1).all().item<bool>() && b.eq(2).all().item<bool>());
  });
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(Checkpoint, WithoutAThreadItIsSavedInPlace) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path());
    for (const int victim : {1, 0}) {
      no_thread_starts = manager.rank() == victim;
      checkpoints.start_save(concat("of ", victim), rows_state(manager, victim));
      no_thread_starts = false;
      EXPECT_EQ(checkpoints.warnings().empty(), manager.rank() < victim);
      checkpoints.wait();
      EXPECT_EQ(loaded_value(manager, folder.path(), concat("of ", victim)), victim);
    }
  });
}

TEST(Checkpoint, WithoutThreadsTheCallerReads) {
  const Folder folder;
  on_threads(1, [&](DistributedManager& manager) {
    const auto five = [](double value) {
      CheckpointState state;
      for (int i = 0; i < 5; ++i) state.add(concat("t", i), at::full({4}, value + i));
      return state;
    };
    Checkpointer(manager, folder.path()).save("c", five(3));
    CheckpointState state = five(0);
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    no_thread_starts = true;
    saved.load(state, {.threads = 3});
    no_thread_starts = false;
    for (int i = 0; i < 5; ++i)
      EXPECT_TRUE(state.tensors()[i].value.equal(at::full({4}, 3.0 + i))) << i;
  });
}
#endif

TEST(Checkpoint, TheLatestAreKept) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path(), {.keep_last = 2});
    for (const char* name : {"z", "y", "x"}) checkpoints.save(name, rows_state(manager, name[0]));
    EXPECT_EQ(checkpoints.names(), (std::vector<std::string>{"y", "x"}));
    EXPECT_FALSE(std::filesystem::exists(folder / "z"));
    checkpoints.save("y", rows_state(manager, 7));
    EXPECT_EQ(checkpoints.names(), (std::vector<std::string>{"x", "y"}))
        << "saved again, it is the latest";
    EXPECT_EQ(loaded_value(manager, folder.path(), "y"), 7);
    checkpoints.remove("y");
    EXPECT_EQ(checkpoints.latest(), "x");
    EXPECT_TRUE(checkpoints.warnings().empty());
  });
}

TEST(Checkpoint, GroupsOfSomeRanksSaveForThemselves) {
  const Folder folder;
  on_threads(4, [&](DistributedManager& manager) {
    const int half = manager.rank() / 2;
    Checkpointer checkpoints(manager, folder / concat("half", half), {}, {2 * half, 2 * half + 1});
    CheckpointState state;
    state.add("t", at::full({1, 2}, static_cast<double>(manager.rank()), at::kFloat),
              {{2, 2}, {manager.rank() % 2, 0}});
    checkpoints.save("c", state);
    const CheckpointReader saved(manager.group({2 * half, 2 * half + 1}), checkpoints.folder(),
                                 "c");
    const at::Tensor t = at::zeros({2, 2});
    CheckpointState full;
    full.add("t", t);
    saved.load(full);
    EXPECT_EQ(t.sum().item<double>(), 2 * (4 * half + 1));
  });
}

}  // namespace tessera::test
