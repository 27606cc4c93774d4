// The loader with arguments, datasets and orders that it does not expect.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/stat.h>
#include <unistd.h>

#include <clocale>
#include <condition_variable>
#include <fstream>
#include <future>
#include <locale>
#include <mutex>
#include <set>

#include "tessera/base/hash.h"
#include "tessera/comm/group/types.h"
#include "tessera/comm/job/threads.h"
#include "tessera/data/loader.h"
#include "tessera/data/sources/safetensors_source.h"
#include "tessera/data/stream_loader.h"

namespace tessera::loader_abuse_test {
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
      if (i == 7) throw 42;  // NOLINT(bugprone-std-exception-baseclass)
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

// What an order of the user's own may say: batches of two rows, of which the second is `named`.
struct OrderThatNames : Order {
  explicit OrderThatNames(SampleRef named) : named(named) {}
  OrderCursor start() const override { return {}; }
  OrderBatch next(OrderCursor& cursor) const override {
    OrderBatch batch;
    batch.step = cursor.step++;
    batch.size = batch.real = 2;
    batch.rows = {{0, 1}, named};
    return batch;
  }
  std::string describe() const override { return "an order of the user's own"; }
  SampleRef named;
};

TEST(LoaderAbuse, SamplesThatNoDatasetHasAreRefused) {
  const std::vector<std::shared_ptr<const Dataset>> two{numbers(5), numbers(3)};
  const LoaderOptions collating{
      .collate = [](const std::vector<Sample>& s) { return pad_collate(s); }};
  for (const SampleRef ref : {SampleRef{7, 0}, SampleRef{-3, 0}, SampleRef{2, 0}, SampleRef{1, 3},
                              SampleRef{0, 5}, SampleRef{0, ~0ull}}) {
    auto order = std::make_shared<OrderThatNames>(ref);
    EXPECT_THROW(Loader(two, order, kAlone, 0).next(), InvalidArgument);
    EXPECT_THROW(Loader(two, order, kAlone, 0, {.workers = 2}).next(), InvalidArgument);
    EXPECT_THROW(Loader(two, order, kAlone, 0, collating).next(), InvalidArgument);
  }
  EXPECT_EQ(Loader(two, std::make_shared<OrderThatNames>(SampleRef{1, 2}), kAlone, 0).next().rows,
            2);
}

struct PackedThatNames : OrderThatNames {
  using OrderThatNames::OrderThatNames;
  OrderBatch next(OrderCursor& cursor) const override {
    OrderBatch batch = OrderThatNames::next(cursor);
    batch.capacity = 4;
    batch.packed = rows;
    return batch;
  }
  std::vector<std::vector<Packed>> rows;
};

TEST(LoaderAbuse, PackedBatchesThatDoNotFitTogetherAreRefused) {
  auto ragged = std::make_shared<FunctionDataset>(
      3, [](std::uint64_t i) { return Sample{torch::ones({static_cast<std::int64_t>(i) + 1})}; });
  auto loaded = [&](SampleRef named, std::vector<std::vector<Packed>> rows) {
    auto order = std::make_shared<PackedThatNames>(named);
    order->rows = std::move(rows);
    return Loader({ragged}, order, kAlone, 0).next();
  };
  EXPECT_EQ(loaded({0, 0}, {{{0, 0, 2}}, {{1, 0, 1}}}).rows, 2);
  EXPECT_THROW(loaded({0, 0}, {{{0, 0, 2}}}), InvalidArgument);
  EXPECT_THROW(loaded({0, 0}, {{{0, 0, 2}}, {{9, 0, 1}}}), InvalidArgument);
  EXPECT_THROW(loaded({0, 0}, {{{0, 0, 2}, {1, 2, 3}}, {}}), InvalidArgument);
  EXPECT_THROW(loaded({0, 9}, {{{0, 0, 2}}, {{1, 0, 1}}}), InvalidArgument);
}

TEST(LoaderAbuse, AHugePrefetchIsNotPlannedBeforeTheFirstBatch) {
  Loader loader({numbers(100)}, in_order(100, 10), kAlone, 0, {.workers = 2, .prefetch = 1 << 30});
  EXPECT_EQ(loader.next().step, 0u);
  EXPECT_EQ(loader.next().step, 1u);
}

// Throws at the third batch, as often as it is asked for it.
struct OrderThatThrows : OrderThatNames {
  OrderThatThrows() : OrderThatNames(SampleRef{0, 0}) {}
  OrderBatch next(OrderCursor& cursor) const override {
    if (cursor.step == 2) throw std::runtime_error("no third batch");
    return OrderThatNames::next(cursor);
  }
};

TEST(LoaderAbuse, WhatAnOrderThrowsComesWithItsBatch) {
  for (int workers : {0, 2}) {
    Loader loader({numbers(5)}, std::make_shared<OrderThatThrows>(), kAlone, 0,
                  {.workers = workers, .prefetch = 8});
    EXPECT_EQ(loader.next().step, 0u);
    EXPECT_EQ(loader.next().step, 1u);
    EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_THROW(loader.next(), std::runtime_error);
    loader.seek(0);
    EXPECT_EQ(loader.next().step, 0u);
  }
}

TEST(LoaderAbuse, TheLongestLimitIsNotOverAtOnce) {
  const auto longest = std::chrono::milliseconds::max();
  Loader loader({numbers(10)}, in_order(10, 2), kAlone, 0, {.workers = 1, .stall_limit = longest});
  for (int step = 0; step < 20; ++step) EXPECT_EQ(loader.next().rows, 2);
  run_threads(1, [&](DistributedManager& manager) {
    struct Stream : IterableDataset {
      std::optional<Sample> next() override { return Sample{torch::zeros({1})}; }
    };
    StreamLoader stream(std::make_shared<Stream>(), 2, manager.world(),
                        {.workers = 1, .stall_limit = longest});
    for (int step = 0; step < 20; ++step) EXPECT_TRUE(stream.next().has_value());
  });
}

// Of an application that writes 1.234.567,5.
struct Grouped : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

std::shared_ptr<const Order> long_mixture() {
  return std::make_shared<MixtureOrder>(
      Mixture({{"a", 50'000}, {"b", 70'000}}, {{0, {0.35, 0.65}}}, 1), BatchSchedule(1111));
}

TEST(LoaderAbuse, StatesAreTheSameInEveryLocale) {
  auto loader = [] {
    return std::make_unique<Loader>(
        std::vector<std::shared_ptr<const Dataset>>{numbers(50'000), numbers(70'000)},
        long_mixture(), kAlone, 0);
  };
  auto state = [&] {
    auto one = loader();
    for (int step = 0; step < 5; ++step) one->next();
    return one->state();
  };
  const std::string plain = state();
  const auto next = [&](const std::string& from) {
    auto one = loader();
    one->restore(from);
    return one->next().samples;
  };
  const auto samples = next(plain);
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouped));
  const std::string grouped = state();
  EXPECT_EQ(grouped, plain);
  EXPECT_EQ(next(plain), samples);
  std::locale::global(before);
  for (const char* name : {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8"}) {
    if (!std::setlocale(LC_ALL, name)) continue;
    EXPECT_EQ(next(plain), samples) << name;
    EXPECT_EQ(state(), plain) << name;
  }
  std::setlocale(LC_ALL, "C");
}

TEST(LoaderAbuse, StatesAreReadToTheirEnd) {
  Loader loader({numbers(50'000), numbers(70'000)}, long_mixture(), kAlone, 0);
  loader.next();
  const std::string state = loader.state();
  const std::string body = state.substr(0, state.rfind(' '));
  // With a checksum that is right: what a reader may have stopped at.
  auto with_checksum = [](const std::string& text) {
    return text + " " + std::to_string(Hash().text(text).value() & 0xffffffffu);
  };
  ASSERT_EQ(with_checksum(body), state);
  const auto point = body.rfind('p');
  for (const std::string& text :
       {body + " 0x1p+0", body + " x", body + "x", body.substr(0, body.rfind(' ')),
        body.substr(0, point), body.substr(0, point) + "," + body.substr(point),
        body.substr(0, body.rfind(' ')) + " nan", body.substr(0, body.rfind(' ')) + " 0.5"})
    EXPECT_THROW(loader.restore(with_checksum(text)), ConfigurationError) << text;
  EXPECT_NO_THROW(loader.restore(state));
}

TEST(LoaderAbuse, ATokenFileThatShrinksIsAnError) {
  const std::string path = ::testing::TempDir() + "tessera_tokens_" + std::to_string(getpid());
  std::ofstream(path) << std::string(64 * 1024, 'x');
  auto data = std::make_shared<TokenFileDataset>(path, torch::kByte, 1024);
  Loader loader({data}, in_order(64, 16), kAlone, 0, {.workers = 1});
  EXPECT_EQ(loader.next().tensors[0].sum().item<std::int64_t>(), 16 * 1024 * 'x');
  ASSERT_EQ(truncate(path.c_str(), 20 * 1024), 0);
  loader.seek(3);
  try {
    loader.next();
    ADD_FAILURE() << "no error";
  } catch (const SampleError& error) {
    EXPECT_NE(std::string(error.what()).find("was truncated or replaced"), std::string::npos)
        << error.what();
  }
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(TokenFileDataset(path, torch::kByte, 4), FileError);
  EXPECT_THROW(SafetensorsSource{path}, FileError);
  unlink(path.c_str());
}

TEST(LoaderAbuse, TokenRowsAreReadInAnyOrder) {
  const std::string path = ::testing::TempDir() + "tessera_rows_" + std::to_string(getpid());
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(i % 251);
  std::ofstream(path, std::ios::binary) << bytes;
  const std::vector<std::uint64_t> indices{3, 4, 5, 5, 0, 1, 9, 8, 10, 11};
  for (const std::uint64_t stride : {10u, 3u}) {
    const TokenFileDataset data(path, torch::kByte, 10, stride);
    const at::Tensor batch = data.get_batch(indices)[0];
    for (std::size_t r = 0; r < indices.size(); ++r)
      for (int c = 0; c < 10; ++c)
        ASSERT_EQ(batch[static_cast<std::int64_t>(r)][c].item<int>(),
                  static_cast<int>((indices[r] * stride + static_cast<std::uint64_t>(c)) % 251));
  }
  unlink(path.c_str());
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

TEST(LoaderAbuse, PinnedBatchesReachTheDevice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const auto data = std::make_shared<TensorDataset>(
      std::vector<at::Tensor>{torch::arange(24, torch::kDouble).view({12, 2})});
  for (const int workers : {0, 2}) {
    Loader plain({data}, in_order(12, 4), kAlone, 0, {.workers = workers});
    Loader pinned({data}, in_order(12, 4), kAlone, 0, {.workers = workers, .pin_memory = true});
    Loader device({data}, in_order(12, 4), kAlone, 0,
                  {.workers = workers,
                   .pin_memory = true,
                   .device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(0))});
    for (int step = 0; step < 5; ++step) {  // into the next epoch
      const at::Tensor expected = plain.next().tensors[0], here = pinned.next().tensors[0],
                       there = device.next().tensors[0];
      EXPECT_TRUE(here.is_pinned() && here.equal(expected)) << "step " << step;
      EXPECT_TRUE(there.is_cuda() && there.cpu().equal(expected)) << "step " << step;
    }
  }
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
}  // namespace tessera::loader_abuse_test
