#include "tessera/data/loader.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <future>
#include <mutex>
#include <random>
#include <set>

#include "tessera/base/text.h"

namespace tessera::loader_test {
namespace {

// Samples that are their own index, so that what was read can be seen.
std::shared_ptr<const Dataset> numbers(std::uint64_t n, std::int64_t base = 0) {
  return std::make_shared<TensorDataset>(std::vector<at::Tensor>{
      torch::arange(base, base + static_cast<std::int64_t>(n)),
      torch::arange(static_cast<std::int64_t>(n)).to(torch::kDouble).unsqueeze(1) * 2});
}

std::vector<std::int64_t> values(const LoadedBatch& batch) {
  const auto t = batch.tensors.at(0).contiguous();
  return {t.const_data_ptr<std::int64_t>(), t.const_data_ptr<std::int64_t>() + t.numel()};
}

struct Setup {
  BatchMapping mapping;
  std::vector<int> processes;
};

Setup any_mapping(std::mt19937_64& random) {
  std::vector<int> mesh;
  int devices = 1;
  for (auto n = 1 + random() % 3; n > 0; --n) {
    mesh.push_back(1 + static_cast<int>(random() % 3));
    devices *= mesh.back();
  }
  std::vector<int> process(devices), axes;
  for (int& p : process) p = static_cast<int>(random() % 4);
  for (int a = 0; a < static_cast<int>(mesh.size()); ++a)
    if (random() % 2) axes.push_back(a);
  const std::set<int> all(process.begin(), process.end());
  return {BatchMapping(mesh, process, axes), {all.begin(), all.end()}};
}

std::vector<std::shared_ptr<const Order>> orders(std::uint64_t n, std::uint64_t seed) {
  std::vector<std::uint64_t> lengths;
  for (std::uint64_t i = 0; i < n; ++i) lengths.push_back(1 + keyed_random(1, 2, i) % 5);
  std::vector<double> weights(n, 1.0);
  weights[0] = 7;
  return {
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = n, .seed = seed},
                                   BatchSchedule({{0, 5}, {4, 9}})),
      std::make_shared<FixedOrder>(
          SampleOrderOptions{.samples = n, .seed = seed, .last = LastBatch::pad}, BatchSchedule(6)),
      std::make_shared<FixedOrder>(
          SampleOrderOptions{.samples = n, .seed = seed, .shuffle = false, .last = LastBatch::drop},
          BatchSchedule(4)),
      std::make_shared<WeightedOrder>(weights, seed, BatchSchedule(7), 2 * n),
      std::make_shared<TokenBudgetOrder>(lengths, TokenBudget{12, 0, true}, seed)};
}

TEST(Loader, TheGlobalSequenceIsTheSameForEveryMappingAndNumberOfWorkers) {
  std::mt19937_64 random(1);
  for (int n = 0; n < 60; ++n) {
    const std::uint64_t samples = 9 + random() % 20;
    for (const auto& order : orders(samples, random())) {
      // One process without workers is the reference.
      Loader whole({numbers(samples)}, order, BatchMapping({1}, {0}, {}), 0);
      std::vector<LoadedBatch> reference;
      for (int s = 0; s < 12; ++s) reference.push_back(whole.next());
      const auto setup = any_mapping(random);
      // (step, coordinate) -> samples
      std::map<std::pair<int, int>, std::vector<std::int64_t>> of_coordinate;
      for (int process : setup.processes) {
        Loader loader({numbers(samples)}, order, setup.mapping, process,
                      {.workers = static_cast<int>(random() % 3),
                       .prefetch = static_cast<int>(random() % 4)});
        for (int s = 0; s < 12; ++s) {
          const auto batch = loader.next();
          ASSERT_EQ(batch.step, static_cast<std::uint64_t>(s));
          ASSERT_EQ(batch.global_rows, reference[s].rows);
          ASSERT_EQ(batch.global_real, reference[s].real);
          const auto mine = values(batch), all = values(reference[s]);
          ASSERT_EQ(static_cast<std::int64_t>(mine.size()), batch.rows);
          ASSERT_EQ(batch.tensors[1].sizes(), (std::vector<std::int64_t>{batch.rows, 1}));
          std::int64_t real = 0;
          for (const BatchSlice& slice : batch.slices)
            for (std::int64_t i = 0; i < slice.samples.size(); ++i) {
              const auto row = slice.slot + i, global = slice.samples.begin + i;
              ASSERT_EQ(mine[row], all[global]);
              ASSERT_EQ(batch.tensors[1][row].item<double>(), 2.0 * static_cast<double>(mine[row]));
              real += global < batch.global_real;
              if (batch.mask.defined()) {
                ASSERT_EQ(batch.mask[row].item<bool>(), global < batch.global_real);
              }
            }
          ASSERT_EQ(real, batch.real);
          ASSERT_EQ(batch.mask.defined(), batch.real < batch.rows);
        }
      }
    }
  }
}

TEST(Loader, ResumingAnywhereOnAnyNumberOfProcessesIsAsIfItHadNeverStopped) {
  std::mt19937_64 random(2);
  for (int n = 0; n < 40; ++n) {
    const std::uint64_t samples = 9 + random() % 20;
    for (const auto& order : orders(samples, random())) {
      Loader whole({numbers(samples)}, order, BatchMapping({1}, {0}, {}), 0);
      std::vector<std::vector<std::int64_t>> reference;
      for (int s = 0; s < 14; ++s) reference.push_back(values(whole.next()));
      const int stop = static_cast<int>(random() % 8);
      std::string state;
      {
        const auto before = any_mapping(random);
        Loader loader({numbers(samples)}, order, before.mapping, before.processes[0],
                      {.workers = 2, .prefetch = 3});
        for (int s = 0; s < stop; ++s) loader.next();
        state = loader.state();  // with batches being read ahead
        EXPECT_LT(state.size(), 200u);
      }
      const auto after = any_mapping(random);
      Loader loader({numbers(samples)}, order, after.mapping, after.processes.back(),
                    {.workers = 1});
      if (stop > 2) loader.next();
      loader.restore(state);
      for (int s = stop; s < 14; ++s) {
        const auto batch = loader.next();
        const auto mine = values(batch);
        for (const BatchSlice& slice : batch.slices)
          for (std::int64_t i = 0; i < slice.samples.size(); ++i)
            ASSERT_EQ(mine[slice.slot + i], reference[s][slice.samples.begin + i]);
      }
    }
  }
}

TEST(Loader, MixturesTakeRowsOfSeveralDatasetsAndResume) {
  const Mixture mixture({{"a", 11}, {"b", 5}}, {{0, {2, 1}}, {30, {1, 3}}}, 4);
  auto order = std::make_shared<MixtureOrder>(mixture, BatchSchedule(6));
  Loader loader({numbers(11), numbers(5, 1000)}, order, BatchMapping({1}, {0}, {}), 0,
                {.workers = 2});
  auto cursor = mixture.start();
  std::string state;
  std::vector<std::vector<std::int64_t>> seen;
  for (int s = 0; s < 12; ++s) {
    if (s == 5) state = loader.state();
    seen.push_back(values(loader.next()));
    for (std::int64_t value : seen.back()) {
      const auto draw = mixture.next(cursor);
      EXPECT_EQ(value, static_cast<std::int64_t>(draw.sample) + 1000 * draw.dataset);
    }
  }
  loader.restore(state);
  for (int s = 5; s < 12; ++s) EXPECT_EQ(values(loader.next()), seen[s]);
  EXPECT_THROW(loader.seek(3), InvalidArgument);
}

TEST(Loader, PackedRowsHoldWholeSamples) {
  std::vector<std::uint64_t> lengths;
  for (std::uint64_t i = 0; i < 23; ++i) lengths.push_back(1 + i % 6);
  auto tokens = std::make_shared<FunctionDataset>(23, [&](std::uint64_t i) {
    return Sample{torch::full({static_cast<std::int64_t>(lengths[i])}, static_cast<std::int64_t>(i),
                              torch::kLong)};
  });
  auto order = std::make_shared<PackedOrder>(lengths, 3, 10, 7);
  std::multiset<std::uint64_t> seen;
  Loader first({tokens}, order, BatchMapping({2}, {0, 1}, {0}), 0),
      second({tokens}, order, BatchMapping({2}, {0, 1}, {0}), 1, {.workers = 1});
  while (first.next_epoch() == 0)
    for (Loader* loader : {&first, &second}) {
      const auto batch = loader->next();
      EXPECT_EQ(batch.rows, loader == &first ? 2 : 1);
      std::size_t sample = 0;
      for (std::int64_t row = 0; row < batch.rows; ++row) {
        std::int64_t at = 0;
        const auto number = batch.tensors[1][row];
        for (std::int64_t k = 1; k <= number.max().item<std::int64_t>(); ++k) {
          const auto ref = batch.samples[sample++].index;
          seen.insert(ref);
          const auto part =
              batch.tensors[0][row].narrow(0, at, static_cast<std::int64_t>(lengths[ref]));
          EXPECT_TRUE(part.eq(static_cast<std::int64_t>(ref)).all().item<bool>());
          EXPECT_TRUE(number.narrow(0, at, part.size(0)).eq(k).all().item<bool>());
          at += part.size(0);
        }
        EXPECT_LE(at, 10);
        EXPECT_TRUE(number.slice(0, at).eq(0).all().item<bool>());
      }
      EXPECT_EQ(sample, batch.samples.size());
    }
  EXPECT_EQ(seen.size(), 23u);
  EXPECT_EQ(std::set<std::uint64_t>(seen.begin(), seen.end()).size(), 23u);
}

TEST(Loader, EpochLoopsEndWithTheEpoch) {
  auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 10, .seed = 1}, BatchSchedule(4));
  for (int workers : {0, 2}) {
    Loader loader({numbers(10)}, order, BatchMapping({1}, {0}, {}), 0, {.workers = workers});
    std::vector<std::vector<std::int64_t>> epochs;
    for (int e = 0; e < 3; ++e) {
      epochs.emplace_back();
      for (auto& batch : loader.epoch()) {
        EXPECT_EQ(batch.epoch, static_cast<std::uint64_t>(e));
        for (auto v : values(batch)) epochs.back().push_back(v);
      }
      EXPECT_EQ(std::set<std::int64_t>(epochs.back().begin(), epochs.back().end()).size(), 10u);
    }
    EXPECT_NE(epochs[0], epochs[1]);
    loader.seek(4);
    int rest = 0;
    for (auto& batch : loader.epoch()) rest += static_cast<int>(batch.rows);
    EXPECT_EQ(rest, 6);  // steps 4 and 5 of epoch 1
  }
}

TEST(Loader, AWorkersExceptionReachesTheCallerWithTheIndexAndCanBeTriedAgain) {
  std::atomic<bool> broken{true};
  auto dataset = std::make_shared<FunctionDataset>(10, [&](std::uint64_t i) {
    if (i == 5 && broken) throw std::runtime_error("the disk is on fire");
    return Sample{torch::tensor(static_cast<std::int64_t>(i))};
  });
  auto order = std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 10, .shuffle = false},
                                            BatchSchedule(4));
  for (int workers : {0, 1, 3}) {
    broken = true;
    Loader loader({dataset}, order, BatchMapping({1}, {0}, {}), 0, {.workers = workers});
    EXPECT_EQ(values(loader.next()), (std::vector<std::int64_t>{0, 1, 2, 3}));
    const auto state = loader.state();
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        loader.next();
        ADD_FAILURE();
      } catch (const SampleError& e) {
        EXPECT_EQ(e.index(), 5u);
        EXPECT_NE(std::string(e.what()).find("the disk is on fire"), std::string::npos);
      }
      EXPECT_EQ(loader.state(), state);
    }
    broken = false;
    EXPECT_EQ(values(loader.next()), (std::vector<std::int64_t>{4, 5, 6, 7}));
    EXPECT_EQ(values(loader.next()), (std::vector<std::int64_t>{8, 9}));
  }
}

TEST(Loader, AStalledSourceIsReportedAndReadAheadIsBounded) {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int begun = 0;
  auto dataset = std::make_shared<FunctionDataset>(1000, [&](std::uint64_t i) {
    std::unique_lock lock(mutex);
    ++begun;
    changed.notify_all();
    changed.wait(lock, [&] { return open; });
    return Sample{torch::tensor(static_cast<std::int64_t>(i))};
  });
  auto order = std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 1000, .shuffle = false},
                                            BatchSchedule(1));
  Loader loader({dataset}, order, BatchMapping({1}, {0}, {}), 0,
                {.workers = 8, .prefetch = 3, .stall_limit = std::chrono::milliseconds(50)});
  EXPECT_THROW(loader.next(), StalledError);
  {
    std::unique_lock lock(mutex);
    // the one waited for and three ahead, though eight workers are there
    changed.wait(lock, [&] { return begun == 4; });
  }
  EXPECT_THROW(loader.next(), StalledError);
  {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(begun, 4);
    open = true;
  }
  changed.notify_all();
  for (std::int64_t s = 0; s < 20; ++s)
    for (;;) {
      try {
        EXPECT_EQ(values(loader.next()), std::vector<std::int64_t>{s});
        break;
      } catch (const StalledError&) {  // a busy machine: wait on
      }
    }
}

TEST(Loader, CopiesToItsDevice) {
  const auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 10}, BatchSchedule(4));
  const BatchMapping two({2, 2}, {0, 0, 1, 1}, {1});
  EXPECT_TRUE(Loader({numbers(10)}, order, two, 0, {.device = c10::Device(c10::kMeta)})
                  .next()
                  .tensors[0]
                  .is_meta());
  if (!torch::cuda::is_available()) {
    EXPECT_THROW(Loader({numbers(10)}, order, two, 0, {.device = c10::Device(c10::kCUDA, 1)}),
                 NotAvailable);
  }
}

TEST(Loader, StatesOfOtherOrdersAndOptionsOutOfRangeAreRefused) {
  auto order = [](std::uint64_t seed) {
    return std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 10, .seed = seed},
                                        BatchSchedule(4));
  };
  Loader a({numbers(10)}, order(1), BatchMapping({1}, {0}, {}), 0),
      b({numbers(10)}, order(2), BatchMapping({1}, {0}, {}), 0);
  EXPECT_THROW(b.restore(a.state()), ConfigurationError);
  EXPECT_THROW(b.restore("nonsense"), ConfigurationError);
  EXPECT_THROW(a.restore(a.state().substr(0, a.state().size() - 2)), ConfigurationError);
  EXPECT_THROW(Loader({}, order(1), BatchMapping({1}, {0}, {}), 0), InvalidArgument);
  EXPECT_THROW(Loader({numbers(10)}, order(1), BatchMapping({1}, {0}, {}), 1), InvalidArgument);
  EXPECT_THROW(Loader({numbers(10)}, order(1), BatchMapping({1}, {0}, {}), 0, {.workers = -1}),
               InvalidArgument);
  EXPECT_THROW(TokenBudgetOrder({3, 9}, {8}, 1), InvalidArgument);
}

// Stacked, one integer among floating-point samples would change the dtype of its batch, and one
// without data would take the data of all.
TEST(Loader, ASampleOfAnotherDtypeOrDeviceIsRefusedByItsIndex) {
  const at::Tensor others[] = {torch::zeros({2}, torch::kLong),
                               torch::zeros({2}, torch::TensorOptions(torch::kMeta))};
  for (const at::Tensor& other : others) {
    const auto of = [&](std::uint64_t at) {
      return std::make_shared<FunctionDataset>(
          4, [=](std::uint64_t i) { return Sample{i == at ? other : torch::zeros({2})}; });
    };
    auto order = std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 4, .shuffle = false},
                                              BatchSchedule(4));
    try {
      Loader({of(2)}, order, BatchMapping({1}, {0}, {}), 0).next();
      ADD_FAILURE() << other.options();
    } catch (const SampleError& e) {
      EXPECT_EQ(e.index(), 2u);
      EXPECT_NE(std::string(e.what()).find("dtype and device"), std::string::npos) << e.what();
    }
  }
}

TEST(Loader, SamplesOfOtherShapesAreRefusedOrCollated) {
  auto ragged = std::make_shared<FunctionDataset>(
      4, [](std::uint64_t i) { return Sample{torch::arange(static_cast<std::int64_t>(i) + 1)}; });
  auto order = std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 4, .shuffle = false},
                                            BatchSchedule(4));
  EXPECT_THROW(Loader({ragged}, order, BatchMapping({1}, {0}, {}), 0).next(), SampleError);
  Loader padded(
      {ragged}, order, BatchMapping({1}, {0}, {}), 0,
      {.collate = [](const std::vector<Sample>& samples) { return pad_collate(samples, -1); }});
  const auto batch = padded.next();
  EXPECT_EQ(batch.tensors[0].sizes(), (std::vector<std::int64_t>{4, 4}));
  EXPECT_EQ(batch.tensors[0][1].sum().item<std::int64_t>(), 0 + 1 - 1 - 1);
  EXPECT_TRUE(batch.tensors[1].equal(torch::tensor({1, 2, 3, 4}, torch::kLong)));
}

TEST(TokenFile, RowsAreThoseOfTheFile) {
  const std::string path = concat(::testing::TempDir(), "tessera_tokens_", ::getpid(), ".bin");
  std::vector<std::int32_t> tokens(103);
  for (int i = 0; i < 103; ++i) tokens[i] = 3 * i;
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()), 103 * 4);
  for (const std::uint64_t row : {1, 10, 103})
    for (const std::uint64_t stride : {0, 1, 7}) {
      const TokenFileDataset file(path, torch::kInt, row, stride);
      const auto step = stride ? stride : row;
      EXPECT_EQ(file.size(), (103 - row) / step + 1);
      for (std::uint64_t i = 0; i < file.size(); ++i) {
        const auto sample = file.get(i)[0];
        ASSERT_EQ(sample.size(0), static_cast<std::int64_t>(row));
        EXPECT_EQ(sample[0].item<int>(), static_cast<int>(3 * i * step));
        EXPECT_EQ(sample[-1].item<int>(), static_cast<int>(3 * (i * step + row - 1)));
      }
      const std::uint64_t beyond[] = {file.size()};
      EXPECT_THROW(file.get_batch(beyond), SampleError);
    }
  EXPECT_THROW(TokenFileDataset(path, torch::kInt, 104), InvalidArgument);
  EXPECT_THROW(TokenFileDataset(path, torch::kLong, 1), FileError);
  EXPECT_THROW(TokenFileDataset(path + ".absent", torch::kInt, 1), FileError);
  std::remove(path.c_str());
}

}  // namespace
}  // namespace tessera::loader_test
