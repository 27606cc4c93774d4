// Drawn lives of a folder of checkpoints: saves, replacements and removals by jobs of one to four
// ranks, of tensors of all kinds, in the background too; others look at it all the time, saves are
// interrupted, files damaged. What is read is what was saved, bit by bit, by any number of ranks;
// what is damaged is told; and who looks changes nothing.

#include <atomic>
#include <mutex>
#include <thread>

#include "../support/hostile.h"
#include "support.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::Folder;
using ::tessera::testing::for_seeds;
using ::tessera::testing::put;

namespace {

const std::vector<at::ScalarType>& dtypes() {
  static const std::vector<at::ScalarType> all{at::kDouble, at::kFloat, at::kBFloat16,
                                               at::kHalf,   at::kLong,  at::kInt,
                                               at::kByte,   at::kBool,  at::kComplexFloat};
  return all;
}

// The values of a tensor of a checkpoint, which are found again from two numbers.
at::Tensor values(const std::vector<std::int64_t>& shape, at::ScalarType type, std::int64_t from) {
  std::int64_t count = 1;
  for (const std::int64_t n : shape) count *= n;
  const at::Tensor all = at::arange(from, from + count, at::kLong);
  if (type == at::kBool) return all.remainder(3).eq(0).view(shape);
  if (type == at::kComplexFloat)
    return at::complex(all.to(at::kFloat).sin(), all.to(at::kFloat).cos()).view(shape);
  if (at::isFloatingType(type)) return all.to(at::kDouble).mul(0.7).sin().to(type).view(shape);
  return all.remainder(120).to(type).view(shape);
}

struct Entry {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType type;
  // Sharded along a dim over the ranks; else plain: the same on all ranks, or differing.
  bool sharded, differs;
};

std::vector<Entry> draw_entries(Draw& draw) {
  std::vector<Entry> all;
  for (int n = draw.between(1, 6); n > 0; --n) {
    Entry e{concat("t", n), {}, draw.of(dtypes()), draw.chance(40), draw.chance(30)};
    for (int d = draw.between(0, 3); d > 0; --d) e.shape.push_back(draw.between(0, 9));
    // Some of several hundred KiB, which ranks write in parts.
    if (draw.chance(20)) e.shape = {draw.between(1, 4), 70000};
    if (e.shape.empty()) e.sharded = false;
    all.push_back(e);
  }
  return all;
}

// What this rank holds of the entries as save number `number` has them; the first rank's values of
// plain tensors that differ are those that count.
CheckpointState state_of(DistributedManager& manager, const std::vector<Entry>& entries,
                         std::int64_t number, Draw& draw) {
  CheckpointState state;
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  for (const Entry& e : entries) {
    const int d = draw.below(std::max<int>(1, static_cast<int>(e.shape.size())));
    const Sizes sizes = draw.sizes(e.shape.empty() ? 0 : e.shape[static_cast<std::size_t>(d)],
                                   manager.world_size());
    const at::Tensor global = values(e.shape, e.type, number * 1000);
    if (e.sharded)
      state.add(e.name,
                distribute_tensor(global, ShardSpec(mesh, e.shape, {Shard(d)}, {{d, sizes}})));
    else
      state.add(e.name,
                e.differs ? values(e.shape, e.type, number * 1000 + manager.rank()) : global);
  }
  return state;
}

void expect_saved(DistributedManager& manager, const std::string& folder, const std::string& name,
                  const std::vector<Entry>& entries, std::int64_t number, Draw& draw) {
  CheckpointState state = state_of(manager, entries, number + 7, draw);
  const CheckpointReader saved(manager.world(), folder, name);
  saved.load(state, {.allow_extra = true});
  EXPECT_EQ(state.get_integer("number"), number) << name;
  for (const auto& t : state.tensors()) {
    const auto e =
        std::ranges::find_if(entries, [&](const Entry& one) { return one.name == t.name; });
    const at::Tensor expected = values(e->shape, e->type, number * 1000);
    EXPECT_TRUE(whole(t.value).equal(expected)) << name << ", " << t.name << ' ' << e->type;
  }
  EXPECT_EQ(saved.values_of_ranks("rank").at(0), "of rank 0");
}

// Another job that looks while saves go on, in a thread of its own: what it can read is whole.
class Onlooker {
 public:
  explicit Onlooker(const std::string& folder) : thread_([this, folder] { look(folder); }) {}
  ~Onlooker() {
    over_ = true;
    thread_.join();
  }
  Onlooker(const Onlooker&) = delete;
  Onlooker& operator=(const Onlooker&) = delete;

 private:
  void look(const std::string& folder) {
    try {
      run_threads(1, [&](DistributedManager& manager) {
        at::set_num_threads(1);
        while (!over_) look_once(manager, folder);
      });
    } catch (const std::exception& error) {
      ADD_FAILURE() << "who looks was told: " << error.what();
    }
  }
  static void look_once(DistributedManager& manager, const std::string& folder) {
    std::vector<std::string> problems;
    const auto latest = Checkpointer(manager, folder).latest(&problems);
    EXPECT_TRUE(problems.empty()) << problems[0];
    if (!latest) return;
    try {
      EXPECT_GE(CheckpointReader(manager.world(), folder, *latest).integer("number"), 0);
    } catch (const FileError&) {  // replaced or removed meanwhile
    }
  }
  std::atomic<bool> over_{false};
  std::thread thread_;
};

struct Folded {
  std::string name;
  std::int64_t number;
  std::vector<Entry> entries;
};

}  // namespace

TEST(HostileCheckpoints, WhatIsReadIsWhatWasSavedAndWhoLooksChangesNothing) {
  for_seeds({}, 12, [](std::uint64_t seed) {
    Draw draw(seed);
    const Folder folder;
    // In the order of their saves, as the folder should have them.
    std::vector<Folded> there;
    std::int64_t number = 0;
    for (int job = draw.between(2, 4); job > 0; --job) {
      const int ranks = draw.between(1, 4), steps = draw.between(1, 5);
      const int keep = draw.chance(30) ? draw.between(1, 2) : 0;
      const std::vector<Entry> entries = draw_entries(draw);
      const std::uint64_t own = static_cast<std::uint64_t>(draw.below(1 << 30));
      std::vector<Folded> after = there;
      {
        const Onlooker onlooker(folder.path());
        std::mutex mutex;
        on_threads(ranks, [&](DistributedManager& manager) {
          Draw steps_draw(own);
          Checkpointer checkpoints(manager, folder.path(), {.keep_last = keep});
          std::vector<Folded> mine = there;
          for (int s = 0; s < steps; ++s) {
            const std::string name = concat("c", steps_draw.below(6));
            const bool background = steps_draw.chance(50);
            const std::int64_t at = number + s;
            CheckpointState state = state_of(manager, entries, at, steps_draw);
            state.set_integer("number", at);
            state.set_of_rank("rank", concat("of rank ", manager.rank()));
            if (background)
              checkpoints.start_save(name, state);
            else
              checkpoints.save(name, state);
            std::erase_if(mine, [&](const Folded& one) { return one.name == name; });
            mine.push_back({name, at, entries});
            if (keep > 0 && mine.size() > static_cast<std::size_t>(keep))
              mine.erase(mine.begin(), mine.end() - keep);
            if (!steps_draw.chance(15)) continue;
            checkpoints.remove(name);
            mine.pop_back();
          }
          checkpoints.wait();
          EXPECT_TRUE(checkpoints.warnings().empty());
          const std::lock_guard lock(mutex);
          if (manager.rank() == 0) after = mine;
        });
      }
      there = after;
      number += steps;
      std::vector<std::string> wanted;
      for (const Folded& one : there) wanted.push_back(one.name);
      const int readers = draw.between(1, 4);
      const std::uint64_t layout = static_cast<std::uint64_t>(draw.below(1 << 30));
      on_threads(readers, [&](DistributedManager& manager) {
        Draw reads(layout);
        const Checkpointer checkpoints(manager, folder.path());
        EXPECT_EQ(checkpoints.names(), wanted);
        for (const Folded& one : there)
          expect_saved(manager, folder.path(), one.name, one.entries, one.number, reads);
      });
      if (there.empty() || !draw.chance(40)) continue;
      // One file of the latest is damaged.
      const std::string latest = folder / there.back().name;
      std::vector<std::string> files;
      for (const auto& entry : std::filesystem::directory_iterator(latest))
        files.push_back(entry.path().string());
      std::ranges::sort(files);
      const std::string file = draw.of(files), text = contents(file);
      put(file, text.substr(0, text.size() / 2));
      on_threads(readers, [&](DistributedManager& manager) {
        const Checkpointer checkpoints(manager, folder.path());
        EXPECT_THROW(checkpoints.to_resume(), CheckpointDamaged) << file;
      });
      std::filesystem::remove_all(latest);
      there.pop_back();
    }
  });
}

}  // namespace tessera::test
