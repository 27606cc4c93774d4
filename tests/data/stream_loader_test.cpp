#include "tessera/data/stream_loader.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "../support/ranks.h"
#include "tessera/base/text.h"
#include "tessera/data/loader.h"

namespace tessera::stream_loader_test {
namespace {

struct Counter : IterableDataset {
  Counter(std::int64_t begin, std::int64_t end, std::int64_t fail_at = -1)
      : at(begin), end(end), fail_at(fail_at) {}
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
      for (const auto policy :
           {UnevenData::error, UnevenData::drop, UnevenData::pad, UnevenData::weight_zero})
        test::on_ranks(ranks, [&](DistributedManager& manager) {
          auto length = [&](int r) { return (r * 5 + shape * 7) % 11; };
          std::int64_t total = 0, longest = 0, shortest = 100;
          for (int r = 0; r < ranks; ++r) {
            total += length(r);
            longest = std::max<std::int64_t>(longest, length(r));
            shortest = std::min<std::int64_t>(shortest, length(r));
          }
          StreamLoader loader(std::make_shared<Counter>(0, length(manager.rank())), 3,
                              manager.world(),
                              {.uneven = policy,
                               .example = {torch::zeros({}, torch::kDouble)},
                               .workers = (shape + manager.rank()) % 3,
                               .prefetch = shape % 4});
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
              EXPECT_EQ(uneven,
                        (longest + 2) / 3 != (shortest + 2) / 3 || (longest / 3 != shortest / 3));
              break;
          }
        });
}

TEST(StreamLoader, AFailingStreamIsAnErrorOnEveryRank) {
  for (const int workers : {0, 1, 3})
    test::on_ranks(3, [&](DistributedManager& manager) {
      StreamLoader loader(std::make_shared<Counter>(0, 9, manager.rank() == 1 ? 5 : -1), 3,
                          manager.world(), {.workers = workers});
      EXPECT_TRUE(loader.next());
      try {
        loader.next();
        ADD_FAILURE();
      } catch (const SampleError& e) {
        EXPECT_NE(std::string(e.what()).find("ranks [1]"), std::string::npos);
        EXPECT_EQ(std::string(e.what()).find("the socket closed") != std::string::npos,
                  manager.rank() == 1);
        if (manager.rank() == 1) {
          EXPECT_EQ(e.index(), 5u);
        }
      }
    });
}

// Samples that make no batch, and exceptions of any type, on one rank: an error on all, no rank is
// left waiting.
struct Odd : Counter {
  Odd(bool shapes, bool odd) : Counter(0, 9), shapes(shapes), odd(odd) {}
  std::optional<Sample> next() override {
    if (odd && at == 4) {
      if (!shapes) throw 42;  // NOLINT(bugprone-std-exception-baseclass)
      ++at;
      return Sample{torch::zeros({3}, torch::kDouble)};
    }
    return Counter::next();
  }
  bool shapes, odd;
};

TEST(StreamLoader, WhateverOneRankMeetsIsAnErrorOnEveryRank) {
  for (const bool shapes : {false, true})
    test::on_ranks(3, [&](DistributedManager& manager) {
      StreamLoader loader(std::make_shared<Odd>(shapes, manager.rank() == 2), 3, manager.world(),
                          {.workers = shapes ? 2 : 0});
      EXPECT_TRUE(loader.next());
      EXPECT_THROW(loader.next(), SampleError);
    });
}

TEST(StreamLoader, AnEmptyStreamNeedsAnExample) {
  test::on_ranks(2, [](DistributedManager& manager) {
    StreamLoader loader(std::make_shared<Counter>(0, manager.rank() == 0 ? 3 : 0), 3,
                        manager.world(),
                        {.uneven = UnevenData::weight_zero, .workers = manager.rank()});
    EXPECT_THROW(loader.next(), UnevenDataError);
  });
}

TEST(StreamLoader, ResumingIsRefusedOrReplayed) {
  for (const int workers : {0, 1, 3}) {
    const StreamOptions options{.workers = workers, .prefetch = 3};
    StreamLoader first(std::make_shared<Counter>(0, 20), 4, Group(), options);
    first.next();
    first.next();
    StreamLoader second(std::make_shared<Counter>(0, 20), 4, Group(), options);
    EXPECT_THROW(second.restore(first.state(), false), NotAvailable);
    second.restore(first.state(), true);
    EXPECT_EQ(second.state(), first.state());
    const auto a = first.next(), b = second.next();
    EXPECT_TRUE(a->tensors[0].equal(b->tensors[0]));
    EXPECT_EQ(a->step, b->step);
    StreamLoader third(std::make_shared<Counter>(0, 3), 4, Group(), options);
    EXPECT_THROW(third.restore(first.state(), true), ConfigurationError);
    EXPECT_THROW(third.restore("x", true), ConfigurationError);
  }
}

// A transform takes longer for some samples than for others; what is delivered, and the state
// between, is as without workers.
TEST(StreamLoader, WorkersDeliverTheSameBatchesInTheSameOrder) {
  std::atomic<int> at_once{0}, most{0};
  const auto slow = [&](Sample sample) {
    const int now = ++at_once;
    for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
    }
    if (static_cast<int>(sample[0].item<double>()) % 7 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    --at_once;
    return Sample{sample[0] * 2, sample[0].reshape({1})};
  };
  const auto run = [&](int workers, int prefetch) {
    StreamLoader loader(
        std::make_shared<Counter>(0, 103), 5, Group(),
        {.uneven = UnevenData::pad, .workers = workers, .prefetch = prefetch, .transform = slow});
    std::vector<std::string> seen;
    while (auto batch = loader.next()) {
      EXPECT_EQ(batch->tensors.size(), 2u);
      seen.push_back(concat(batch->step, ' ', batch->real, ' ',
                            batch->tensors[0].sum().item<double>(), ' ', batch->tensors[1].sizes(),
                            ' ', loader.state()));
    }
    EXPECT_FALSE(loader.next());
    return seen;
  };
  const auto alone = run(0, 2);
  EXPECT_EQ(alone.size(), 21u);
  EXPECT_EQ(most, 1);
  for (const int workers : {1, 2, 4})
    for (const int prefetch : {0, 1, 5})
      EXPECT_EQ(run(workers, prefetch), alone) << workers << " workers, " << prefetch << " ahead";
  EXPECT_GT(most, 1);
}

TEST(StreamLoader, TwoWorkersMakeBatchesAtTheSameTime) {
  std::atomic<int> inside{0};
  std::atomic<bool> together{false};
  const auto waits = [&](Sample sample) {
    ++inside;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!together && std::chrono::steady_clock::now() < limit) {
      if (inside == 2) together = true;
      std::this_thread::yield();
    }
    --inside;
    return sample;
  };
  StreamLoader loader(std::make_shared<Counter>(0, 4), 2, Group(),
                      {.workers = 2, .prefetch = 2, .transform = waits});
  // Both wait for the first call, which wakes one of them.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  while (loader.next()) {
  }
  EXPECT_TRUE(together);
}

TEST(StreamLoader, AFailingTransformNamesItsSample) {
  for (const int workers : {0, 2}) {
    StreamLoader loader(std::make_shared<Counter>(0, 12), 4, Group(),
                        {.workers = workers, .transform = [](Sample sample) {
                           if (sample[0].item<double>() == 6)
                             throw std::runtime_error("no such codec");
                           return sample;
                         }});
    EXPECT_TRUE(loader.next());
    try {
      loader.next();
      ADD_FAILURE();
    } catch (const SampleError& e) {
      EXPECT_EQ(e.index(), 6u);
      EXPECT_NE(std::string(e.what()).find("no such codec"), std::string::npos);
    }
    const auto after = loader.next();  // that step's samples are gone, the stream goes on
    ASSERT_TRUE(after);
    EXPECT_EQ(after->tensors[0][0].item<double>(), 8);
    EXPECT_FALSE(loader.next());
  }
}

TEST(StreamLoader, ASampleOfAnotherDtypeIsRefusedByItsIndex) {
  StreamLoader loader(std::make_shared<Counter>(0, 4), 4, Group(), {.transform = [](Sample sample) {
                        if (sample[0].item<double>() == 2) return Sample{sample[0].to(at::kLong)};
                        return sample;
                      }});
  try {
    loader.next();
    ADD_FAILURE();
  } catch (const SampleError& e) {
    EXPECT_EQ(e.index(), 2u);
    EXPECT_NE(std::string(e.what()).find("dtype and device"), std::string::npos) << e.what();
  }
}

// A stream that waits to be released.
struct Gated : Counter {
  using Counter::Counter;
  std::optional<Sample> next() override {
    std::unique_lock lock(mutex);
    ++taken;
    changed.notify_all();
    changed.wait(lock, [&] { return at < allowed; });
    return Counter::next();
  }
  void allow(std::int64_t samples) {
    const std::lock_guard lock(mutex);
    allowed = samples;
    changed.notify_all();
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t allowed = 0, taken = 0;
};

TEST(StreamLoader, AStalledStreamIsReportedOnEveryRankAndNothingIsLost) {
  run_threads(3, [](DistributedManager& manager) {
    const bool slow = manager.rank() == 1;
    const auto stream = std::make_shared<Gated>(0, 6);
    stream->allow(slow ? 3 : 6);
    StreamLoader loader(
        stream, 3, manager.world(),
        {.workers = manager.rank() == 2 ? 0 : 1, .stall_limit = std::chrono::milliseconds(300)});
    // The next batch, or none at the end; again where no worker has been given the core yet.
    const auto delivered = [&]() -> std::optional<StreamBatch> {
      for (int i = 0; i < 100; ++i) {
        try {
          return loader.next();
        } catch (const StalledError&) {
        }
      }
      throw Error("stalled for good");
    };
    ASSERT_TRUE(delivered());
    for (int i = 0; i < 2; ++i) EXPECT_THROW(loader.next(), StalledError);
    if (slow) stream->allow(7);
    manager.world().barrier();
    const std::optional<StreamBatch> batch = delivered();
    ASSERT_TRUE(batch);
    EXPECT_EQ(batch->step, 1u);
    EXPECT_EQ(batch->tensors[0].sum().item<double>(), 12);
    stream->allow(7);
    EXPECT_FALSE(delivered());
  });
}

TEST(StreamLoader, NoMoreIsReadThanTheDepth) {
  const auto stream = std::make_shared<Gated>(0, 1000);
  stream->allow(1000);
  StreamLoader loader(stream, 4, Group(), {.workers = 2, .prefetch = 3});
  EXPECT_EQ(stream->taken, 0);  // nothing before the first next(): restore() may come first
  ASSERT_TRUE(loader.next());
  std::unique_lock lock(stream->mutex);
  ASSERT_TRUE(stream->changed.wait_for(lock, std::chrono::seconds(30),
                                       [&] { return stream->taken >= 4 * 4; }));
  // One delivered, one waited for, three ahead: a loader that reads on does so within the time that
  // this waits.
  EXPECT_FALSE(stream->changed.wait_for(lock, std::chrono::milliseconds(200), [&] {
    return stream->taken > 4 * 5;
  })) << stream->taken;
}

TEST(StreamLoader, BadOptionsAreRefused) {
  EXPECT_THROW(StreamLoader(nullptr, 1, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(std::make_shared<Counter>(0, 1), 0, Group()), InvalidArgument);
  EXPECT_THROW(StreamLoader(std::make_shared<Counter>(0, 1), 1, Group(), {.workers = -1}),
               InvalidArgument);
  EXPECT_THROW(StreamLoader(std::make_shared<Counter>(0, 1), 1, Group(), {.prefetch = -1}),
               InvalidArgument);
}

}  // namespace
}  // namespace tessera::stream_loader_test
