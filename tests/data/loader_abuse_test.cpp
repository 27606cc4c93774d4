// The loader in the hands of somebody who gives it what it does not expect.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <set>

#include "tessera/comm/group/types.h"
#include "tessera/comm/job/threads.h"
#include "tessera/data/loader.h"

namespace tessera {
namespace {

const BatchMapping kAlone({1}, {0}, {});

std::shared_ptr<const Dataset> numbers(std::uint64_t n) {
  return std::make_shared<TensorDataset>(
      std::vector<at::Tensor>{torch::arange(static_cast<std::int64_t>(n))});
}

std::shared_ptr<const Order> in_order(std::uint64_t n, std::uint64_t batch) {
  return std::make_shared<FixedOrder>(SampleOrderOptions{.samples = n, .shuffle = false},
                                      BatchSchedule(batch));
}

TEST(LoaderAbuse, DatasetsThatAreTooSmallOrTooFewAreRefusedAtOnce) {
  EXPECT_THROW(Loader({numbers(9)}, in_order(10, 2), kAlone, 0), InvalidArgument);
  EXPECT_NO_THROW(Loader({numbers(11)}, in_order(10, 2), kAlone, 0));
  EXPECT_THROW(Loader({numbers(9), numbers(9)}, in_order(9, 2), kAlone, 0), InvalidArgument);
  auto mixture = std::make_shared<MixtureOrder>(Mixture({{"a", 5}, {"b", 5}}, {{0, {1, 1}}}, 1),
                                                BatchSchedule(2));
  EXPECT_THROW(Loader({numbers(5)}, mixture, kAlone, 0), InvalidArgument);
  EXPECT_THROW(Loader({numbers(5), numbers(4)}, mixture, kAlone, 0), InvalidArgument);
}

TEST(LoaderAbuse, AnEpochOf2To62SamplesFromAFunction) {
  const std::uint64_t samples = (1ull << 62) + 3;
  auto data = std::make_shared<FunctionDataset>(
      samples, [](std::uint64_t i) { return Sample{torch::tensor(static_cast<std::int64_t>(i))}; });
  auto order = std::make_shared<FixedOrder>(SampleOrderOptions{.samples = samples, .seed = 4},
                                            BatchSchedule(64));
  Loader loader({data}, order, BatchMapping({3}, {0, 1, 2}, {0}), 2, {.workers = 2});
  for (const std::uint64_t step : {0ull, 1ull << 40, (1ull << 56) - 3, (1ull << 56) + 5}) {
    loader.seek(step);
    const auto batch = loader.next();
    EXPECT_EQ(batch.step, step);
    EXPECT_EQ(batch.epoch, step > (1ull << 56) ? 1u : 0u);
    EXPECT_EQ(batch.rows, 21);
    for (std::int64_t i = 0; i < batch.rows; ++i)
      EXPECT_EQ(batch.tensors[0][i].item<std::int64_t>(),
                static_cast<std::int64_t>(batch.samples[static_cast<std::size_t>(i)].index));
  }
}

TEST(LoaderAbuse, FewerSamplesThanDevicesWithEveryKindOfBatch) {
  // Seven coordinates, three samples: four processes have no row, and get tensors of the right
  // shape all the same.
  const BatchMapping mapping({7}, {0, 1, 2, 3, 4, 5, 6}, {0});
  auto ragged = std::make_shared<FunctionDataset>(3, [](std::uint64_t i) {
    return Sample{torch::full({static_cast<std::int64_t>(i) + 1, 2}, static_cast<std::int64_t>(i),
                              torch::kInt)};
  });
  auto packed = std::make_shared<PackedOrder>(std::vector<std::uint64_t>{1, 2, 3}, 7, 4, 1);
  for (int process = 0; process < 7; ++process) {
    const auto plain = Loader({numbers(3)}, in_order(3, 3), mapping, process).next();
    EXPECT_EQ(plain.rows, process < 3 ? 1 : 0);
    EXPECT_EQ(plain.tensors.at(0).sizes(), (std::vector<std::int64_t>{plain.rows}));
    const auto collated =
        Loader({ragged}, in_order(3, 3), mapping, process,
               {.collate = [](const std::vector<Sample>& s) { return pad_collate(s); }})
            .next();
    ASSERT_EQ(collated.tensors.size(), 2u);
    EXPECT_EQ(collated.tensors[0].size(0), process < 3 ? 1 : 0);
    const auto rows = Loader({ragged}, packed, mapping, process).next();
    ASSERT_EQ(rows.tensors.size(), 2u);
    EXPECT_EQ(rows.tensors[0].sizes(), (std::vector<std::int64_t>{1, 4, 2}));
    EXPECT_EQ(rows.tensors[0].scalar_type(), torch::kInt);
    EXPECT_EQ(rows.tensors[1].sizes(), (std::vector<std::int64_t>{1, 4}));
  }
  EXPECT_THROW(Loader({ragged}, packed, mapping, 0,
                      {.collate = [](const std::vector<Sample>& s) { return pad_collate(s); }})
                   .next(),
               InvalidArgument);
}

struct OnlyBatches : Dataset {
  std::uint64_t size() const override { return 10; }
  Sample get(std::uint64_t) const override { throw std::logic_error("not this one"); }
  std::vector<at::Tensor> get_batch(std::span<const std::uint64_t> indices) const override {
    for (auto i : indices)
      if (i == 7) throw 42;
    return {torch::zeros({static_cast<std::int64_t>(indices.size()) + rows_too_many, 1})};
  }
  std::int64_t rows_too_many = 0;
};

TEST(LoaderAbuse, WhateverABatchThrowsNamesTheSample) {
  Loader loader({std::make_shared<OnlyBatches>()}, in_order(10, 5), kAlone, 0, {.workers = 1});
  EXPECT_EQ(loader.next().rows, 5);
  try {
    loader.next();
    FAIL();
  } catch (const SampleError& e) {
    EXPECT_EQ(e.index(), 7u);
    EXPECT_THROW(std::rethrow_if_nested(e), int);
  }
  auto wrong = std::make_shared<OnlyBatches>();
  wrong->rows_too_many = 1;
  EXPECT_THROW(Loader({wrong}, in_order(10, 5), kAlone, 0).next(), InvalidArgument);
}

TEST(LoaderAbuse, AHangingReadDoesNotHoldUpTheDestructor) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  auto gate = std::make_shared<Gate>();
  std::promise<void> gone;
  {
    auto keep = std::shared_ptr<void>(nullptr, [&](void*) { gone.set_value(); });
    auto data = std::make_shared<FunctionDataset>(10, [gate, keep](std::uint64_t i) {
      std::unique_lock lock(gate->mutex);
      gate->changed.wait(lock, [&] { return gate->open; });
      return Sample{torch::tensor(static_cast<std::int64_t>(i))};
    });
    keep.reset();
    Loader loader({data}, in_order(10, 2), kAlone, 0,
                  {.workers = 2, .stall_limit = std::chrono::milliseconds(20)});
    data.reset();
    EXPECT_THROW(loader.next(), StalledError);
  }  // returns although both workers still read
  {
    const std::lock_guard lock(gate->mutex);
    gate->open = true;
  }
  gate->changed.notify_all();
  // What the workers used lives until they are done with it.
  EXPECT_EQ(gone.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST(LoaderAbuse, DamagedStatesAndThoseOfOtherConfigurationsAreRefused) {
  auto tokens = [](std::uint64_t n, std::uint64_t budget) {
    return std::make_shared<TokenBudgetOrder>(std::vector<std::uint64_t>(n, 2),
                                              TokenBudget{budget, 0, false}, 1);
  };
  auto mixture = [](double weight) {
    return std::make_shared<MixtureOrder>(Mixture({{"a", 5}, {"b", 5}}, {{0, {weight, 1}}}, 1),
                                          BatchSchedule(2));
  };
  auto state = [](const std::shared_ptr<const Order>& order,
                  std::vector<std::shared_ptr<const Dataset>> data) {
    Loader loader(std::move(data), order, kAlone, 0, {.workers = 1});
    loader.next();
    return loader.state();
  };
  Loader loader({numbers(20)}, tokens(20, 8), kAlone, 0);
  const std::string good = state(tokens(20, 8), {numbers(20)});
  EXPECT_NO_THROW(loader.restore(good));
  EXPECT_NO_THROW(loader.restore(good + "\n"));
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = bad[i] == '1' ? '2' : '1';
    EXPECT_THROW(loader.restore(bad), ConfigurationError) << bad;
    EXPECT_THROW(loader.restore(good.substr(0, i)), ConfigurationError) << i;
  }
  EXPECT_THROW(loader.restore(state(tokens(20, 9), {numbers(20)})), ConfigurationError);
  EXPECT_THROW(loader.restore(state(in_order(20, 4), {numbers(20)})), ConfigurationError);
  EXPECT_THROW(loader.restore(state(
                   std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 20, .shuffle = false},
                                                BatchSchedule({{0, 4}, {9, 5}})),
                   {numbers(20)})),
               ConfigurationError);
  // Mixtures that differ in a weight alone.
  Loader mixed({numbers(5), numbers(5)}, mixture(2), kAlone, 0);
  EXPECT_THROW(mixed.restore(state(mixture(3), {numbers(5), numbers(5)})), ConfigurationError);
  // A refused state leaves the loader where it was.
  EXPECT_EQ(loader.state(), good);
}

TEST(LoaderAbuse, RanksThatWereConfiguredDifferentlyAllGetTheError) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (const std::string what : {"nothing", "seed", "size", "position", "mapping"})
      run_threads(ranks, [&](DistributedManager& manager) {
        const bool odd = manager.rank() == ranks - 1;
        const std::uint64_t samples = what == "size" && odd ? 9 : 10;
        auto order = std::make_shared<FixedOrder>(
            SampleOrderOptions{.samples = samples, .seed = what == "seed" && odd ? 2u : 1u},
            BatchSchedule(4));
        std::vector<int> devices(4);
        for (int d = 0; d < 4; ++d)
          devices[d] = what == "mapping" && odd ? (d + 1) % ranks : d % ranks;
        Loader loader({numbers(samples)}, order, BatchMapping({4}, devices, {0}), manager.rank(),
                      {.workers = 1});
        if (what == "position" && odd) loader.seek(1);
        if (what == "nothing" || ranks == 1)
          EXPECT_NO_THROW(loader.require_agreement(manager.world()));
        else
          EXPECT_THROW(loader.require_agreement(manager.world()), MismatchError);
      });
}

TEST(LoaderAbuse, DevicesAndPinnedMemoryThatAreNotThereAreRefused) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is a GPU";
  EXPECT_THROW(
      Loader({numbers(10)}, in_order(10, 2), kAlone, 0, {.device = c10::Device(c10::kCUDA)}),
      NotAvailable);
  EXPECT_THROW(Loader({numbers(10)}, in_order(10, 2), kAlone, 0, {.pin_memory = true}),
               NotAvailable);
  EXPECT_EQ(Loader({numbers(10)}, in_order(10, 2), kAlone, 0, {.device = c10::Device(c10::kCPU)})
                .next()
                .rows,
            2);
}

}  // namespace
}  // namespace tessera
