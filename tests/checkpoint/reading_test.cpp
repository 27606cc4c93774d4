// How a checkpoint is read: straight into the memory of tensors where it takes the bytes, through
// memory of its own elsewhere, on one thread or several, once or twice. The values are the same.

#include <torch/torch.h>

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
        std::string why = thrown<FileError>(
            [&] { saved.load(targets.state, {.threads = threads, .convert = true}); });
        EXPECT_TRUE(contains(why, file)) << why;
        for (const at::Tensor& t : targets.values())
          EXPECT_EQ(t.ne(0).sum().item<std::int64_t>(), 0) << "nothing is half loaded";
        why = thrown<FileError>([&] {
          saved.load(targets.state, {.all_or_nothing = false, .threads = threads, .convert = true});
        });
        EXPECT_TRUE(contains(why, file)) << why;
      });
    }
  }
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
