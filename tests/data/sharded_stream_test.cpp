#include "tessera/data/sharded_stream.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/job/threads.h"
#include "tessera/data/loader.h"
#include "tessera/data/stream_loader.h"

namespace tessera::sharded_stream_test {
namespace {

// Shards of drawn lengths, empty ones too; a sample is 1000 shard + number. What is read is
// counted, and one sample fails as often as is said.
struct Drawn : StreamShards {
  explicit Drawn(std::vector<std::int64_t> lengths) : lengths(std::move(lengths)) {}
  std::uint64_t size() const override { return lengths.size(); }
  struct One : IterableDataset {
    One(const Drawn& of, std::uint64_t shard, std::uint64_t at) : of(of), shard(shard), at(at) {}
    std::optional<Sample> next() override {
      if (static_cast<std::int64_t>(at) >= of.lengths[shard]) return std::nullopt;
      const auto value = static_cast<std::int64_t>(1000 * shard + at);
      if (value == of.bad && of.fails-- > 0) throw std::runtime_error("the server is away");
      ++at;
      ++of.read;
      return Sample{torch::tensor(value)};
    }
    const Drawn& of;
    std::uint64_t shard, at;
  };
  std::unique_ptr<IterableDataset> open(std::uint64_t shard, std::uint64_t from) const override {
    return std::make_unique<One>(*this, shard, from);
  }
  std::vector<std::int64_t> lengths;
  std::int64_t bad = -1;
  mutable std::atomic<int> fails{0}, read{0};
};

struct Case {
  std::vector<std::int64_t> lengths;
  ShardedStreamOptions sharding;
  std::int64_t rows = 0;
  int workers = 0;
};

Case draw(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Case drawn;
  drawn.sharding.lanes = 4 + below(3);
  drawn.rows = drawn.sharding.lanes * (1 + below(3));
  drawn.lengths.resize(static_cast<std::size_t>(drawn.sharding.lanes + below(9)));
  for (auto& n : drawn.lengths) n = below(3) == 0 ? 0 : below(9);
  drawn.sharding.shuffle = below(3) != 0;
  drawn.sharding.seed = static_cast<std::uint64_t>(below(100));
  drawn.sharding.epochs = 1 + static_cast<std::uint64_t>(below(2));
  drawn.workers = below(3);
  return drawn;
}

struct Steps {
  std::vector<std::vector<std::int64_t>> batches;  // the global ones
  std::vector<std::string> states;                 // before each of them, and at the end
};

// All steps from `state` on, on some ranks.
Steps steps_on(int ranks, const Case& drawn, const std::string& state = "") {
  Steps all;
  std::mutex mutex;
  std::vector<std::map<std::uint64_t, std::vector<std::int64_t>>> read(
      static_cast<std::size_t>(ranks));
  std::vector<std::vector<std::string>> states(static_cast<std::size_t>(ranks));
  run_threads(ranks, [&](DistributedManager& manager) {
    StreamLoader loader(std::make_shared<Drawn>(drawn.lengths), drawn.sharding, drawn.rows,
                        manager.world(),
                        {.uneven = UnevenData::weight_zero,
                         .example = {torch::zeros({}, torch::kLong)},
                         .workers = drawn.workers});
    if (!state.empty()) loader.restore(state);
    std::vector<std::string> mine{loader.state()};
    std::map<std::uint64_t, std::vector<std::int64_t>> steps;
    while (auto batch = loader.next()) {
      auto& rows = steps[batch->step];
      for (std::int64_t i = 0; i < batch->real; ++i)
        rows.push_back(batch->tensors[0][i].item<std::int64_t>());
      mine.push_back(loader.state());
    }
    EXPECT_FALSE(loader.next());
    const std::lock_guard lock(mutex);
    read[static_cast<std::size_t>(manager.rank())] = std::move(steps);
    states[static_cast<std::size_t>(manager.rank())] = std::move(mine);
  });
  for (const auto& rank : states) EXPECT_EQ(rank, states[0]);  // the same text on every rank
  all.states = states[0];
  for (const auto& [step, rows] : read[0]) {
    auto& batch = all.batches.emplace_back(rows);
    for (std::size_t r = 1; r < read.size(); ++r)
      batch.insert(batch.end(), read[r][step].begin(), read[r][step].end());
  }
  return all;
}

// Batches are those of one rank, whatever reads them; every sample comes once an epoch; from any
// state any number of ranks goes on as if nothing had happened.
TEST(ShardedStream, AnyNumberOfRanksReadsTheSameAndGoesOn) {
  std::mt19937 random(5);
  for (int round = 0; round < 12; ++round) {
    const Case drawn = draw(random);
    SCOPED_TRACE(concat("round ", round, ": lengths ", list(drawn.lengths), ", ",
                        drawn.sharding.lanes, " lanes, ", drawn.rows, " rows"));
    const Steps one = steps_on(1, drawn);
    std::map<std::int64_t, std::uint64_t> times;
    for (const auto& batch : one.batches)
      for (const auto value : batch) ++times[value];
    std::int64_t samples = 0;
    for (const auto n : drawn.lengths) samples += n;
    EXPECT_EQ(static_cast<std::int64_t>(times.size()), samples);
    for (const auto& [value, n] : times) EXPECT_EQ(n, drawn.sharding.epochs) << value;
    for (int ranks = 2; ranks <= 4; ++ranks) {
      const Steps more = steps_on(ranks, drawn);
      EXPECT_EQ(more.batches, one.batches) << ranks << " ranks";
      EXPECT_EQ(more.states, one.states) << ranks << " ranks";
      const std::size_t at = random() % one.states.size();
      const Steps rest = steps_on(1 + static_cast<int>(random() % 4), drawn, more.states[at]);
      EXPECT_EQ(rest.batches,
                std::vector<std::vector<std::int64_t>>(
                    one.batches.begin() + static_cast<std::ptrdiff_t>(at), one.batches.end()));
    }
  }
}

TEST(ShardedStream, GoingOnReadsNothingAgain) {
  const std::vector<std::int64_t> lengths(4, 500);
  const ShardedStreamOptions sharding{.lanes = 2};
  StreamLoader first(std::make_shared<Drawn>(lengths), sharding, 8, Group());
  for (int i = 0; i < 100; ++i) first.next();
  const auto shards = std::make_shared<Drawn>(lengths);
  StreamLoader second(shards, sharding, 8, Group());
  second.restore(first.state());
  EXPECT_EQ(shards->read, 0);
  const auto a = first.next(), b = second.next();
  EXPECT_TRUE(a->tensors[0].equal(b->tensors[0]));
  EXPECT_EQ(b->step, 100u);
  EXPECT_EQ(shards->read, 8);
}

// data x domain: ranks of one coordinate along `data` read the same samples, others different ones.
TEST(ShardedStream, RanksOfOneCoordinateReadTheSame) {
  std::array<std::vector<std::int64_t>, 4> read;
  run_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    StreamLoader loader(std::make_shared<Drawn>(std::vector<std::int64_t>(6, 7)), {.lanes = 3}, 6,
                        mesh.group("data"), {.uneven = UnevenData::weight_zero});
    while (auto batch = loader.next())
      for (std::int64_t i = 0; i < batch->real; ++i)
        read[static_cast<std::size_t>(manager.rank())].push_back(
            batch->tensors[0][i].item<std::int64_t>());
  });
  EXPECT_EQ(read[0], read[1]);
  EXPECT_EQ(read[2], read[3]);
  EXPECT_EQ(read[0].size(), 28u);
  EXPECT_EQ(read[2].size(), 14u);
  for (const auto value : read[0]) EXPECT_EQ(std::ranges::count(read[2], value), 0);
}

// Without end every batch is full, and each epoch has another order.
TEST(ShardedStream, WithoutEndEveryBatchIsFull) {
  const auto shards = std::make_shared<Drawn>(std::vector<std::int64_t>{3, 0, 5, 2, 4});
  StreamLoader loader(shards, {.lanes = 1, .seed = 3, .epochs = 0}, 7, Group(), {.workers = 1});
  std::vector<std::vector<std::int64_t>> epochs;
  std::vector<std::int64_t> read;
  for (int i = 0; i < 16; ++i) {  // 112 samples: eight epochs of 14
    const auto batch = loader.next();
    ASSERT_TRUE(batch);
    ASSERT_EQ(batch->real, 7);
    for (int k = 0; k < 7; ++k) read.push_back(batch->tensors[0][k].item<std::int64_t>());
    if (i % 2 == 1) epochs.push_back(std::exchange(read, {}));
  }
  EXPECT_GT(std::set<std::vector<std::int64_t>>(epochs.begin(), epochs.end()).size(), 4u);
  for (auto& epoch : epochs) {
    std::ranges::sort(epoch);
    EXPECT_EQ(epoch, (std::vector<std::int64_t>{0, 1, 2, 2000, 2001, 2002, 2003, 2004, 3000, 3001,
                                                4000, 4001, 4002, 4003}));
  }
  StreamLoader nothing(std::make_shared<Drawn>(std::vector<std::int64_t>{0, 0}),
                       {.lanes = 1, .epochs = 0}, 2, Group());
  EXPECT_THROW(nothing.next(), SampleError);
}

// A shard that cannot be read is an error on all ranks with its number and the sample's; the next
// call reads the same step, and nothing is lost or comes twice.
TEST(ShardedStream, AnErrorLosesNothing) {
  const Case drawn{std::vector<std::int64_t>(6, 9), {.lanes = 3, .shuffle = false}, 6, 0};
  const Steps whole = steps_on(1, drawn);
  for (const int workers : {0, 2}) {
    std::array<std::vector<std::vector<std::int64_t>>, 3> read;
    std::atomic<int> errors{0};
    run_threads(3, [&](DistributedManager& manager) {
      const auto shards = std::make_shared<Drawn>(drawn.lengths);
      shards->bad = 1005;
      shards->fails = 2;
      StreamLoader loader(shards, drawn.sharding, drawn.rows, manager.world(),
                          {.uneven = UnevenData::weight_zero, .workers = workers});
      for (;;) {
        try {
          const auto batch = loader.next();
          if (!batch) break;
          auto& rows = read[static_cast<std::size_t>(manager.rank())].emplace_back();
          for (std::int64_t i = 0; i < batch->real; ++i)
            rows.push_back(batch->tensors[0][i].item<std::int64_t>());
        } catch (const SampleError& e) {
          ++errors;
          EXPECT_NE(std::string(e.what()).find("ranks [1]"), std::string::npos) << e.what();
          if (manager.rank() == 1) {
            EXPECT_NE(std::string(e.what()).find("shard 1, sample 5: the server is away"),
                      std::string::npos)
                << e.what();
          }
        }
      }
    });
    EXPECT_EQ(errors, 6);
    ASSERT_EQ(read[0].size(), whole.batches.size());
    for (std::size_t s = 0; s < whole.batches.size(); ++s) {
      auto batch = read[0][s];
      for (const int r : {1, 2}) batch.insert(batch.end(), read[r][s].begin(), read[r][s].end());
      EXPECT_EQ(batch, whole.batches[s]) << "step " << s;
    }
  }
}

TEST(ShardedStream, MistakesAreTold) {
  const auto shards = std::make_shared<Drawn>(std::vector<std::int64_t>(4, 3));
  const auto none = std::make_shared<Drawn>(std::vector<std::int64_t>{});
  EXPECT_THROW(StreamLoader(none, {}, 4, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(std::shared_ptr<Drawn>(), {}, 4, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(shards, {}, 0, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(shards, {.lanes = 3}, 4, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(shards, {.lanes = 8}, 8, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(shards, {.lanes = -1}, 8, Group()), InvalidArgument);
  EXPECT_EQ(ShardedStream(shards, {}, 6).lanes(), 3);  // the largest divisor of 6 up to 4
  EXPECT_EQ(ShardedStream(shards, {}, 2).lanes(), 2);
  EXPECT_EQ(ShardedStream(shards, {}, 1).lanes(), 1);
  StreamLoader loader(shards, {.lanes = 2}, 4, Group());
  loader.next();
  const std::string state = loader.state();
  StreamLoader other(shards, {.lanes = 2, .seed = 1}, 4, Group());
  EXPECT_THROW(other.restore(state), ConfigurationError);
  EXPECT_THROW(loader.restore(state.substr(0, state.size() - 1)), ConfigurationError);
  EXPECT_THROW(loader.restore(""), ConfigurationError);
  EXPECT_THROW(loader.restore("tessera-stream-1 3 9"), ConfigurationError);
  EXPECT_EQ(loader.state(), state);
  run_threads(3, [&](DistributedManager& manager) {
    EXPECT_THROW(StreamLoader(shards, {.lanes = 2}, 4, manager.world()), InvalidArgument);
    StreamLoader differs(shards, {.lanes = 4, .seed = manager.rank() == 2 ? 1u : 0u}, 4,
                         manager.world());
    EXPECT_THROW(differs.next(), MismatchError);
  });
}

}  // namespace
}  // namespace tessera::sharded_stream_test
