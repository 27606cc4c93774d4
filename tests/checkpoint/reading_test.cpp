// How a checkpoint is read: straight into the memory of tensors where it takes the bytes, through
// memory of its own elsewhere, on one thread or several, once or twice. The values are the same.

#include <sys/mman.h>
#include <torch/torch.h>

#include <limits>

#include "support.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::Folder;
using ::tessera::testing::put;

namespace {

// What is saved: tensors of several sizes, replicated and sharded by rows.
std::vector<at::Tensor> saved_values() {
  std::vector<at::Tensor> all;
  for (int i = 0; i < 7; ++i)
    all.push_back(at::arange(i * 12, at::kDouble).reshape({3 * i, 4}) + 100 * i);
  return all;
}

void save_values(DistributedManager& manager, const std::string& folder) {
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  const std::vector<at::Tensor> values = saved_values();
  CheckpointState state;
  for (std::size_t i = 0; i < values.size(); ++i)
    state.add(concat("t", i),
              i % 2 == 0 ? values[i].clone() : distribute_tensor(values[i], mesh, {Shard(0)}));
  Checkpointer(manager, folder).save("c", state);
}

// Targets of every kind of memory, with what they are to hold.
struct Targets {
  explicit Targets(DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", manager.world_size()}});
    const std::vector<at::Tensor> values = saved_values();
    const auto add = [&](std::size_t i, const at::Tensor& target) {
      state.add(concat("t", i), target);
      tensors.push_back(target);
      expected.push_back(values[i].to(target.scalar_type()));
    };
    add(0, at::zeros({0, 4}, at::kDouble));
    add(1, at::zeros({4, 3}, at::kDouble).t());
    add(2, at::zeros({6, 4}, at::kFloat));
    add(3, distribute_tensor(at::zeros({9, 4}, at::kDouble), mesh, {Shard(1)}));
    add(4, distribute_tensor(at::zeros({12, 4}, at::kDouble), mesh, {Shard(0)}));
    add(5, at::zeros({40, 4}, at::kDouble).narrow(0, 7, 15));
    add(6, at::zeros({18, 4}, at::kDouble));
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& t : tensors) all.push_back(whole(t));
    return all;
  }
  CheckpointState state;
  std::vector<at::Tensor> tensors, expected;
};

// Memory of zeros that takes no bytes until it is opened: what reads into it fails.
class ClosedMemory {
 public:
  explicit ClosedMemory(std::size_t bytes)
      : bytes_(bytes),
        begin_(::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (begin_ == MAP_FAILED) throw Error("there is no memory");
  }
  ~ClosedMemory() { ::munmap(begin_, bytes_); }
  ClosedMemory(const ClosedMemory&) = delete;
  ClosedMemory& operator=(const ClosedMemory&) = delete;
  at::Tensor tensor(at::IntArrayRef sizes) const {
    return at::from_blob(begin_, sizes, at::TensorOptions().dtype(at::kDouble));
  }
  void open() { ASSERT_EQ(::mprotect(begin_, bytes_, PROT_READ | PROT_WRITE), 0); }

 private:
  std::size_t bytes_;
  void* begin_;
};

}  // namespace

TEST(Reading, IntoEveryKindOfMemoryOnAnyThreadsOnceOrTwice) {
  for (const int ranks : {1, 3}) {
    const Folder folder;
    on_threads(2, [&](DistributedManager& manager) { save_values(manager, folder.path()); });
    for (const bool all_or_nothing : {true, false}) {
      for (const bool verify : {true, false}) {
        for (const int threads : {0, 1, 3}) {
          on_threads(ranks, [&](DistributedManager& manager) {
            Targets targets(manager);
            CheckpointReader(manager.world(), folder.path(), "c")
                .load(targets.state, {.verify = verify,
                                      .all_or_nothing = all_or_nothing,
                                      .staging_bytes = threads == 1 ? 0u : 500u,
                                      .threads = threads,
                                      .convert = true});
            const auto got = targets.values();
            for (std::size_t i = 0; i < got.size(); ++i)
              EXPECT_TRUE(got[i].equal(targets.expected[i]))
                  << "t" << i << ", " << ranks << " ranks, threads " << threads;
          });
        }
      }
    }
  }
}

// Of pieces that are needed in full, a load that may be half done reads each byte once; one that
// may not reads it twice.
TEST(Reading, BytesThatAreReadOnceAndTwice) {
  const Folder folder;
  on_threads(1, [&](DistributedManager& manager) {
    save_values(manager, folder.path());
    std::uint64_t bytes = 0;
    for (const at::Tensor& t : saved_values()) bytes += t.nbytes();
    const auto read = [&](const LoadOptions& options) {
      CheckpointState state;
      for (const at::Tensor& t : saved_values())
        state.add(concat("t", state.tensors().size()), at::zeros_like(t));
      const CheckpointReader saved(manager.world(), folder.path(), "c");
      saved.load(state, options);
      return saved.bytes_read();
    };
    EXPECT_EQ(read({}), 2 * bytes);
    EXPECT_EQ(read({.all_or_nothing = false}), bytes) << "verified while it is read";
    EXPECT_EQ(read({.verify = false}), bytes);
    EXPECT_EQ(read({.verify = false, .all_or_nothing = false}), bytes);
    EXPECT_EQ(read({.staging_bytes = bytes}), bytes) << "everything waits in memory of its own";
    // 96, 192 and 288 bytes fit, 384 and more do not.
    EXPECT_EQ(read({.staging_bytes = 600}), 2 * bytes - 576);
    EXPECT_EQ(read({.threads = std::numeric_limits<int>::max()}), 2 * bytes);
    EXPECT_THROW(read({.threads = -1}), InvalidArgument);
  });
}

TEST(Reading, DamageChangesNothingUnlessEverythingIsReadOnce) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) { save_values(manager, folder.path()); });
  const std::string file = folder / ("c/" + names_in(folder / "c").back());
  std::string bytes = contents(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  put(file, bytes);
  for (const int ranks : {1, 2}) {
    for (const int threads : {1, 3}) {
      on_threads(ranks, [&](DistributedManager& manager) {
        Targets targets(manager);
        const CheckpointReader saved(manager.world(), folder.path(), "c");
        std::string why;
        for (const std::uint64_t staging : {0, 500}) {
          why = thrown<FileError>([&] {
            saved.load(targets.state,
                       {.staging_bytes = staging, .threads = threads, .convert = true});
          });
          EXPECT_TRUE(contains(why, file)) << why;
          EXPECT_FALSE(contains(why, "load again")) << why;
          for (const at::Tensor& t : targets.values())
            EXPECT_EQ(t.ne(0).sum().item<std::int64_t>(), 0) << "nothing is half loaded";
        }
        why = thrown<FileError>([&] {
          saved.load(targets.state, {.all_or_nothing = false, .threads = threads, .convert = true});
        });
        EXPECT_TRUE(contains(why, file)) << why;
      });
    }
  }
}

// The disk fails after everything was verified: all ranks are told what holds now, and another load
// puts it right.
TEST(Reading, ASecondReadThatFailsSaysWhatIsHalfLoaded) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) { save_values(manager, folder.path()); });
  const std::vector<at::Tensor> values = saved_values();
  for (const int ranks : {1, 2}) {
    for (const int threads : {1, 3}) {
      on_threads(ranks, [&](DistributedManager& manager) {
        const bool fails = manager.rank() == ranks - 1;
        ClosedMemory closed(values.back().nbytes());
        CheckpointState state;
        for (std::size_t i = 0; i < values.size(); ++i)
          state.add(concat("t", i), fails && i + 1 == values.size()
                                        ? closed.tensor(values[i].sizes())
                                        : at::zeros_like(values[i]));
        const CheckpointReader saved(manager.world(), folder.path(), "c");
        const std::string why = thrown<FileError>([&] { saved.load(state, {.threads = threads}); });
        EXPECT_TRUE(contains(why, "cannot be read")) << why;
        EXPECT_TRUE(contains(why, "others do not")) << why;
        EXPECT_TRUE(contains(why, "load again before going on")) << why;
        EXPECT_EQ(contains(why, "load: rank 1: "), ranks == 2) << why;
        if (threads == 1) {
          EXPECT_TRUE(contains(why, "(6 of 7 are loaded on this rank")) << why;
          EXPECT_TRUE(state.tensors()[5].value.equal(values[5])) << "it was loaded";
        }
        closed.open();
        EXPECT_EQ(state.tensors().back().value.ne(0).any().item<bool>(), !fails);
        saved.load(state, {.threads = threads});
        for (std::size_t i = 0; i < values.size(); ++i)
          EXPECT_TRUE(state.tensors()[i].value.equal(values[i])) << "t" << i;
      });
    }
  }
}

// Found before anything changes, on every rank: one rank's target cannot be written to, or the
// ranks' options differ.
TEST(Reading, TargetsAndOptionsThatDoNotFitChangeNothing) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    save_values(manager, folder.path());
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const bool mine = manager.rank() == 1;
    const at::Tensor other = at::zeros({18, 4}, at::kDouble);
    const auto refused = [&](const at::Tensor& t, const LoadOptions& options) {
      CheckpointState state;
      state.add("t1", mine ? t : at::zeros({3, 4}, at::kDouble)).add("t6", other);
      const std::string why = thrown<InvalidArgument>([&] { saved.load(state, options); });
      EXPECT_FALSE(other.ne(0).any().item<bool>()) << why;
      return why;
    };
    const LoadOptions some{.allow_extra = true};
    std::string why = refused(at::zeros({1, 4}, at::kDouble).expand({3, 4}), some);
    EXPECT_TRUE(contains(why, "'t1' has elements that share memory")) << why;
    at::Tensor inferred;
    {
      const c10::InferenceMode mode;
      inferred = at::zeros({3, 4}, at::kDouble);
    }
    why = refused(inferred, some);
    EXPECT_TRUE(contains(why, "'t1' was made in inference mode")) << why;
    const at::Tensor fine = at::zeros({3, 4}, at::kDouble);
    why = refused(fine, {.verify = mine, .allow_extra = true});
    EXPECT_TRUE(contains(why, "rank 1 verify 1")) << why;
    why = refused(fine, {.all_or_nothing = mine, .allow_extra = true});
    EXPECT_TRUE(contains(why, "all_or_nothing 0")) << why;
  });
}

// Names of a checkpoint are quoted in errors, which are printed to terminals.
TEST(Reading, NamesWriteNothingOfTheirOwn) {
  const Folder folder;
  on_threads(1, [&](DistributedManager& manager) {
    const std::string name = "w\x1b[2J\nrank 0: all is well";
    CheckpointState state;
    state.add(name, at::ones({2})).set(name, "x").set_of_rank(name, "x");
    Checkpointer(manager, folder.path()).save("c", state);
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const auto mesh = manager.mesh({{"x", 1}});
    CheckpointState other;
    other.add("w", at::ones({2}));
    const std::vector<std::function<void()>> calls{
        [&] { saved.read("w", ShardSpec::replicated(mesh, {2})); }, [&] { saved.value("w"); },
        [&] { saved.values_of_ranks("w"); }, [&] { saved.load(other, {.allow_missing = true}); }};
    for (const auto& call : calls) {
      const std::string why = thrown<InvalidArgument>(call);
      for (const char c : why) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << why;
      EXPECT_TRUE(contains(why, "w\\x1b[2J\\x0arank 0")) << why;
    }
  });
}

// Two names for one memory, and a graph that still needs what was there.
TEST(Reading, SharedMemoryAndGraphsAreNoticed) {
  const Folder folder;
  on_threads(1, [&](DistributedManager& manager) {
    save_values(manager, folder.path());
    const std::vector<at::Tensor> values = saved_values();
    const at::Tensor memory = at::zeros({18, 4}, at::kDouble);
    CheckpointState state;
    state.add("t6", memory).add("t1", memory.narrow(0, 2, 3));
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    saved.load(state, {.threads = 3, .allow_extra = true});
    EXPECT_TRUE(memory.narrow(0, 2, 3).equal(values[1])) << "the later one counts";
    EXPECT_TRUE(memory.narrow(0, 5, 13).equal(values[6].narrow(0, 5, 13)));

    // One of them cannot be read straight.
    const auto rows = [&](const char* first, const char* second) {
      memory.zero_();
      CheckpointState both;
      const at::Tensor others = memory.as_strided({3, 4}, {8, 1});
      for (const std::string name : {first, second}) both.add(name, name == "t1" ? others : memory);
      saved.load(both, {.threads = 3, .allow_extra = true});
    };
    rows("t1", "t6");
    EXPECT_TRUE(memory.equal(values[6])) << "the later one counts";
    rows("t6", "t1");
    EXPECT_TRUE(memory.as_strided({3, 4}, {8, 1}).equal(values[1]));
    EXPECT_TRUE(memory.narrow(0, 5, 13).equal(values[6].narrow(0, 5, 13)));

    const at::Tensor leaf = at::ones({18, 4}, at::kDouble).requires_grad_();
    const at::Tensor loss = leaf.square().sum();
    CheckpointState one;
    one.add("t6", leaf);
    saved.load(one, {.allow_extra = true});
    EXPECT_TRUE(leaf.detach().equal(values[6]));
    EXPECT_THROW(loss.backward(), c10::Error) << "its values are not those of the forward pass";
  });
}

// More ranks than rows, most of them with nothing to write; read by fewer and by one.
TEST(Reading, WhatSixteenRanksSavedOnFiveAndOnOne) {
  const Folder folder;
  on_threads(16, [&](DistributedManager& manager) { save_values(manager, folder.path()); });
  for (const int ranks : {5, 1}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Targets targets(manager);
      const CheckpointReader saved(manager.world(), folder.path(), "c");
      EXPECT_EQ(saved.saved_ranks(), 16);
      saved.load(targets.state, {.convert = true});
      const auto got = targets.values();
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(got[i].equal(targets.expected[i])) << "t" << i << ", " << ranks << " ranks";
    });
  }
}

}  // namespace tessera::test
