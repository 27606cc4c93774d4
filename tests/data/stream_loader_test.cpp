#include "tessera/data/stream_loader.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/threads.h"

namespace tessera {
namespace {

struct Counter : IterableDataset {
  Counter(std::int64_t begin, std::int64_t end, std::int64_t fail_at = -1) : at(begin), end(end), fail_at(fail_at) {}
  std::optional<Sample> next() override {
    if (at == fail_at) throw std::runtime_error("the socket closed");
    if (at >= end) return std::nullopt;
    return Sample{torch::tensor(static_cast<double>(at++), torch::kDouble)};
  }
  std::int64_t at, end, fail_at;
};

// Ranks with other numbers of samples: every policy ends on every rank at the same step.
TEST(StreamLoader, RanksWithOtherNumbersOfSamplesNeverWaitForEachOther) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (int shape = 0; shape < 12; ++shape)
      for (const auto policy : {UnevenData::error, UnevenData::drop, UnevenData::pad, UnevenData::weight_zero})
        run_threads(ranks, [&](DistributedManager& manager) {
          auto length = [&](int r) { return (r * 5 + shape * 7) % 11; };
          std::int64_t total = 0, longest = 0, shortest = 100;
          for (int r = 0; r < ranks; ++r) {
            total += length(r);
            longest = std::max<std::int64_t>(longest, length(r));
            shortest = std::min<std::int64_t>(shortest, length(r));
          }
          StreamLoader loader(std::make_shared<Counter>(0, length(manager.rank())), 3, manager.world(), policy, {torch::zeros({}, torch::kDouble)});
          std::int64_t steps = 0, seen = 0, all = 0;
          double sum = 0;
          bool uneven = false;
          try {
            while (auto batch = loader.next()) {
              EXPECT_EQ(batch->step, static_cast<std::uint64_t>(steps++));
              EXPECT_EQ(batch->tensors.at(0).size(0), batch->rows);
              seen += batch->real;
              all += batch->global_real;
              sum += batch->tensors[0].slice(0, 0, batch->real).sum().item<double>();
              EXPECT_TRUE(policy != UnevenData::pad || batch->rows == 3);
              EXPECT_EQ(batch->mask.defined(), batch->real < batch->rows);
            }
          } catch (const UnevenDataError&) {
            uneven = true;
          }
          const auto n = length(manager.rank());
          EXPECT_DOUBLE_EQ(sum, static_cast<double>(seen) * (static_cast<double>(seen) - 1) / 2);
          switch (policy) {
            case UnevenData::pad:
            case UnevenData::weight_zero:
              EXPECT_EQ(steps, (longest + 2) / 3);
              EXPECT_EQ(seen, n);
              EXPECT_EQ(all, total);
              break;
            case UnevenData::drop:
              EXPECT_EQ(steps, shortest / 3);
              break;
            case UnevenData::error:
              EXPECT_EQ(uneven, (longest + 2) / 3 != (shortest + 2) / 3 || (longest / 3 != shortest / 3));
              break;
          }
        });
}

TEST(StreamLoader, AFailingStreamIsAnErrorOnEveryRank) {
  run_threads(3, [](DistributedManager& manager) {
    StreamLoader loader(std::make_shared<Counter>(0, 9, manager.rank() == 1 ? 5 : -1), 3, manager.world());
    EXPECT_TRUE(loader.next());
    try {
      loader.next();
      ADD_FAILURE();
    } catch (const SampleError& e) {
      EXPECT_NE(std::string(e.what()).find("ranks [1]"), std::string::npos);
      EXPECT_EQ(std::string(e.what()).find("the socket closed") != std::string::npos, manager.rank() == 1);
    }
  });
}

// Samples that make no batch, and exceptions of any type, on one rank: an error on all, no rank is left waiting.
struct Odd : Counter {
  Odd(bool shapes, bool odd) : Counter(0, 9), shapes(shapes), odd(odd) {}
  std::optional<Sample> next() override {
    if (odd && at == 4) {
      if (!shapes) throw 42;
      ++at;
      return Sample{torch::zeros({3}, torch::kDouble)};
    }
    return Counter::next();
  }
  bool shapes, odd;
};

TEST(StreamLoader, WhateverOneRankMeetsIsAnErrorOnEveryRank) {
  for (const bool shapes : {false, true})
    run_threads(3, [&](DistributedManager& manager) {
      StreamLoader loader(std::make_shared<Odd>(shapes, manager.rank() == 2), 3, manager.world());
      EXPECT_TRUE(loader.next());
      EXPECT_THROW(loader.next(), SampleError);
    });
}

TEST(StreamLoader, AnEmptyStreamNeedsAnExample) {
  run_threads(2, [](DistributedManager& manager) {
    StreamLoader loader(std::make_shared<Counter>(0, manager.rank() == 0 ? 3 : 0), 3, manager.world(), UnevenData::weight_zero);
    EXPECT_THROW(loader.next(), UnevenDataError);
  });
}

TEST(StreamLoader, ResumingIsRefusedOrReplayed) {
  StreamLoader first(std::make_shared<Counter>(0, 20), 4, Group());
  first.next();
  first.next();
  StreamLoader second(std::make_shared<Counter>(0, 20), 4, Group());
  EXPECT_THROW(second.restore(first.state(), false), NotAvailable);
  second.restore(first.state(), true);
  const auto a = first.next(), b = second.next();
  EXPECT_TRUE(a->tensors[0].equal(b->tensors[0]));
  EXPECT_EQ(a->step, b->step);
  StreamLoader third(std::make_shared<Counter>(0, 3), 4, Group());
  EXPECT_THROW(third.restore(first.state(), true), ConfigurationError);
  EXPECT_THROW(third.restore("x", true), ConfigurationError);
}

}  // namespace
}  // namespace tessera
