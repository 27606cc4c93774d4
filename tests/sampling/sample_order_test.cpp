#include "tessera/sampling/sample_order.h"

#include <gtest/gtest.h>

#include <set>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

// The definition, step by step.
std::vector<Batch> by_definition(const SampleOrderOptions& options, const BatchSchedule& schedule,
                                 std::uint64_t steps) {
  std::vector<Batch> batches;
  std::uint64_t epoch = 0, offset = 0;
  for (std::uint64_t s = 0; s < steps; ++s) {
    const std::uint64_t size = schedule.size(s);
    auto left = [&] { return options.samples - offset; };
    if (left() == 0 || (options.last == LastBatch::drop && left() < size)) {
      ++epoch;
      offset = 0;
    }
    const std::uint64_t real = std::min(size, left());
    batches.push_back({epoch, offset, options.last == LastBatch::pad ? size : real, real});
    offset += real;
  }
  return batches;
}

SampleOrder generated(Generator& random, LastBatch last) {
  const auto samples = static_cast<std::uint64_t>(random.number(1, 30));
  std::vector<BatchSchedule::Entry> entries;
  std::uint64_t from = 0;
  for (auto n = random.number(1, 4); n > 0; --n) {
    const auto largest = last == LastBatch::drop ? static_cast<std::int64_t>(samples) : 40;
    entries.push_back({from, static_cast<std::uint64_t>(random.number(1, largest))});
    from += static_cast<std::uint64_t>(random.number(1, 9));
  }
  return SampleOrder({samples, 5, !random.chance(4), last}, BatchSchedule(entries));
}

TEST(SampleOrder, AnyStepIsWhatCountingGives) {
  Generator random(21);
  for (int n = 0; n < 1500; ++n)
    for (const auto last : {LastBatch::keep, LastBatch::pad, LastBatch::drop}) {
      const SampleOrder order = generated(random, last);
      const auto wanted = by_definition(order.options(), order.schedule(), 60);
      for (std::uint64_t s = 0; s < 60; ++s) {
        ASSERT_EQ(order.step(s), wanted[s]);
        if (s == 0) continue;
        ASSERT_EQ(order.after(wanted[s - 1], s - 1), wanted[s]);
        ASSERT_EQ(order.first_step(wanted[s].epoch) == s, wanted[s].epoch != wanted[s - 1].epoch);
      }
    }
}

TEST(SampleOrder, EveryEpochHasEverySampleOnce) {
  Generator random(22);
  for (int n = 0; n < 500; ++n)
    for (const auto last : {LastBatch::keep, LastBatch::pad, LastBatch::drop}) {
      const SampleOrder order = generated(random, last);
      std::multiset<std::uint64_t> seen;
      std::uint64_t epoch = 0, dropped = 0;
      for (std::uint64_t s = 0; epoch < 3; ++s) {
        const Batch batch = order.step(s);
        if (batch.epoch != epoch) {
          EXPECT_EQ(seen.size() + dropped, order.options().samples);
          EXPECT_EQ(std::set<std::uint64_t>(seen.begin(), seen.end()).size(), seen.size());
          seen.clear();
          epoch = batch.epoch;
        }
        for (std::uint64_t i = 0; i < batch.real; ++i) seen.insert(order.sample(batch, i));
        std::vector<std::uint64_t> all(batch.size), tail(batch.size / 2);
        order.samples(batch, 0, all);
        order.samples(batch, batch.size - tail.size(), tail);
        for (std::uint64_t i = 0; i < batch.size; ++i) {
          ASSERT_EQ(all[i], order.sample(batch, i));
          ASSERT_LT(all[i], order.options().samples);
        }
        EXPECT_TRUE(std::equal(tail.rbegin(), tail.rend(), all.rbegin()));
        EXPECT_THROW(order.samples(batch, 1, all), InvalidArgument);
        dropped = last == LastBatch::drop ? order.options().samples - batch.offset - batch.real : 0;
      }
    }
}

TEST(SampleOrder, EpochsDifferAndHugeStepsAreComputedAlone) {
  const SampleOrder order({.samples = 1000, .seed = 3}, BatchSchedule(10));
  int same = 0;
  for (std::uint64_t i = 0; i < 10; ++i)
    same += order.sample(order.step(0), i) == order.sample(order.step(100), i);
  EXPECT_LT(same, 5);
  const SampleOrder vast({.samples = 1ull << 62, .seed = 3},
                         BatchSchedule({{0, 256}, {1'000'000, 4096}}));
  const Batch far = vast.step(1'000'000'000'000ull);
  EXPECT_EQ(far.epoch, 0u);
  EXPECT_EQ(far.offset, 256ull * 1'000'000 + 4096ull * (1'000'000'000'000ull - 1'000'000));
  const SampleOrder many({.samples = 7, .seed = 3}, BatchSchedule(2));
  EXPECT_EQ(many.step(4'000'000'000'000ull + 3), (Batch{1'000'000'000'000ull, 6, 1, 1}));
}

TEST(SampleOrder, RefusesWhatCannotBe) {
  EXPECT_THROW(SampleOrder({.samples = 0}, BatchSchedule(1)), InvalidArgument);
  EXPECT_THROW(SampleOrder({.samples = 3, .last = LastBatch::drop}, BatchSchedule(4)),
               InvalidArgument);
  EXPECT_THROW(BatchSchedule(std::uint64_t{0}), InvalidArgument);
  EXPECT_THROW(BatchSchedule({{1, 4}}), InvalidArgument);
  EXPECT_THROW(BatchSchedule({{0, 4}, {0, 5}}), InvalidArgument);
}

}  // namespace
}  // namespace tessera
