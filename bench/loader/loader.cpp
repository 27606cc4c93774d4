// The loader: planning, indices, bytes per second beside memcpy and Python's DataLoader, and what
// is left of a slow source's time.
//
//   bench_loader [--out FILE] [--only PATTERN] [--python PROGRAM --script torch_loader.py]
#include "tessera/data/loader.h"

#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "harness.h"
#include "peer.h"
#include "tessera/base/text.h"

using namespace tessera;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

template <class Work>
double median_seconds(int runs, const Work& work) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) {
    const auto begin = Clock::now();
    work();
    times.push_back(seconds_since(begin));
  }
  return bench::median(times);
}

// --- Who reads what for 100,000 devices: the mapping, and every process' slices of a global batch.

void mapping(bench::Report& report) {
  const std::vector<int> mesh{50, 20, 100};  // data, fsdp, model
  const int devices = 100000;
  std::mt19937_64 random(1);
  struct Case {
    const char* name;
    std::vector<int> axes;
    int each;  // devices of a process
    bool shuffled;
  };
  for (const Case& c : {Case{"100,000 devices, one a process", {0, 1}, 1, false},
                        Case{"100,000 devices, one a process, all axes shard", {0, 1, 2}, 1, false},
                        Case{"100,000 devices, 8 a process", {0, 1}, 8, false},
                        Case{"100,000 devices, 8 a process, anywhere", {0, 1}, 8, true},
                        Case{"100,000 devices, one a process, anywhere", {1, 0}, 1, true}}) {
    if (!report.wants(c.name)) continue;
    std::vector<int> processes(devices);
    for (int d = 0; d < devices; ++d) processes[d] = d / c.each;
    if (c.shuffled)
      for (int i = devices; i > 1; --i)
        std::swap(processes[i - 1], processes[random() % static_cast<unsigned>(i)]);
    std::int64_t rows = 0;
    bool two_functions = false;
    const double ms = 1e3 * median_seconds(11, [&] {
                        const BatchMapping mapping(mesh, processes, c.axes);
                        for (const int process : mapping.processes())
                          for (const BatchSlice& slice : mapping.slices(process, 65536))
                            rows += slice.samples.size();
                        try {
                          two_functions =
                              mapping.process_mesh_mapping().size() == mapping.processes().size();
                          for (const int process : mapping.processes())
                            rows += mapping.local_device_mapping(process).begin()->second;
                        } catch (const InvalidArgument&) {
                          two_functions = false;
                        }
                      });
    report.value(
        c.name,
        two_functions ? "mapping, all slices, two functions" : "mapping, all slices (general form)",
        ms, "ms", 100);
    if (rows == 0) std::printf("nothing was mapped\n");
  }
}

// --- One index after the other, as the loader takes them: a batch of 256 positions of an epoch at
// once.

void indices(bench::Report& report) {
  std::vector<SampleRef> rows(256);
  std::uint64_t sum = 0;
  const auto time = [&](const std::string& name, const Order& order) {
    if (!report.wants(name)) return;
    constexpr int kBatches = 400;
    const double seconds = median_seconds(11, [&] {
      OrderCursor cursor = order.start();
      for (int b = 0; b < kBatches; ++b) {
        const OrderBatch batch = order.next(cursor);
        const auto n = std::min<std::uint64_t>(batch.size, rows.size());
        order.rows(batch, 0, std::span(rows).first(n));
        sum += rows[0].index;
      }
    });
    report.value(name, "next index", 1e9 * seconds / (256.0 * kBatches), "ns", 50);
  };
  for (const auto& [name, samples] :
       std::vector<std::pair<const char*, std::uint64_t>>{{"300", 300},
                                                          {"1,000", 1000},
                                                          {"40,000", 40000},
                                                          {"1,000,003", 1000003},
                                                          {"2^32 + 1", (1ull << 32) + 1},
                                                          {"2^62 + 1", (1ull << 62) + 1},
                                                          {"2^63", 1ull << 63}})
    time(concat("shuffled epoch of ", name, " samples"),
         FixedOrder({.samples = samples, .seed = 3, .last = LastBatch::drop}, BatchSchedule(256)));
  std::vector<double> weights(100000);
  std::iota(weights.begin(), weights.end(), 1.0);
  time("weighted, 100,000 weights", WeightedOrder(weights, 1, BatchSchedule(256), 100000));
  time("mixture of three datasets",
       MixtureOrder(Mixture({{"a", 1000003}, {"b", 40000}, {"c", 1000}}, {{0, {5, 3, 1}}}, 1),
                    BatchSchedule(256)));
  if (sum == 1) std::printf("nothing was drawn\n");
}

// --- Samples a second from a memory-mapped file.

class TokenFile {
 public:
  TokenFile()
      : path_(std::filesystem::temp_directory_path() /
              concat("tessera_bench_tokens_", ::getpid())) {
    std::vector<std::int32_t> block(1 << 20);
    std::ofstream file(path_, std::ios::binary);
    for (int i = 0; i < kMegabytes / 4; ++i) {
      std::iota(block.begin(), block.end(), i << 20);
      file.write(reinterpret_cast<const char*>(block.data()), 4 << 20);
    }
    if (!file) throw Error("'", path_.string(), "' cannot be written");
  }
  ~TokenFile() { std::filesystem::remove(path_); }
  static constexpr int kMegabytes = 256;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

struct Epochs {
  Epochs(const TokenFile& file, std::uint64_t row, std::uint64_t batch, int workers)
      : data(std::make_shared<TokenFileDataset>(file.path(), at::kInt, row)),
        order(std::make_shared<FixedOrder>(SampleOrderOptions{.samples = data->size(), .seed = 1},
                                           BatchSchedule(batch))),
        loader({data}, order, BatchMapping({1}, {0}, {}), 0, {.workers = workers}) {}
  double operator()() {
    const auto begin = Clock::now();
    for (auto& batch : loader.epoch()) rows += batch.rows;
    return seconds_since(begin);
  }
  std::shared_ptr<TokenFileDataset> data;
  std::shared_ptr<FixedOrder> order;
  Loader loader;
  std::int64_t rows = 0;
};

// The same rows in the same order, copied by memcpy from the mapping into as many buffers, one
// after the other, as the loader holds batches: what is read ahead cannot lie where the batch in
// use lies. Huge pages for both.
struct Copies {
  Copies(const TokenFile& file, std::uint64_t row, std::uint64_t batch, std::size_t buffers)
      : tokens(at::from_file(file.path(), /*shared=*/true, TokenFile::kMegabytes * (1ll << 18),
                             at::TensorOptions(at::kInt))),
        bytes(row * 4),
        batch(batch),
        samples(static_cast<std::uint64_t>(tokens.numel()) / row),
        index(batch) {
    for (std::size_t b = 0; b < buffers; ++b) {
      const std::size_t huge = std::size_t{2} << 20,
                        size = (bytes * batch + huge - 1) / huge * huge;
      memory.emplace_back(static_cast<char*>(std::aligned_alloc(huge, size)), &std::free);
      ::madvise(memory.back().get(), size, MADV_HUGEPAGE);
    }
  }
  double operator()() {
    const auto begin = Clock::now();
    const KeyedPermutation order(samples, 1, epoch++);
    const char* from = static_cast<const char*>(tokens.const_data_ptr());
    for (std::uint64_t first = 0; first < samples; first += batch) {
      index.resize(std::min(batch, samples - first));
      order.fill(first, index);
      char* to = memory[turn++ % memory.size()].get();
      for (std::size_t i = 0; i < index.size(); ++i)
        std::memcpy(to + i * bytes, from + index[i] * bytes, bytes);
    }
    return seconds_since(begin);
  }
  at::Tensor tokens;
  std::uint64_t bytes, batch, samples, epoch = 0;
  std::size_t turn = 0;
  std::vector<std::unique_ptr<char, decltype(&std::free)>> memory;
  std::vector<std::uint64_t> index;
};

void throughput(bench::Report& report, const std::vector<std::string>& python) {
  const TokenFile file;
  const double bytes = TokenFile::kMegabytes * double(1 << 20);
  for (const auto& [size, row, batch] :
       std::vector<std::tuple<const char*, std::uint64_t, std::uint64_t>>{
           {"64 KiB", 16384, 64}, {"256 KiB", 65536, 32}, {"1 MiB", 262144, 8}}) {
    for (const int workers : {0, 1, 2}) {
      const std::string name =
          concat("rows of ", size, ", ", workers, workers == 1 ? " worker" : " workers");
      if (!report.wants(name)) continue;
      Copies copy(file, row, batch, workers == 0 ? 1 : 4);  // the one in use, the next, two ahead
      Epochs ours(file, row, batch, workers);
      ours();  // every page of the mappings touched
      copy();
      report.bandwidth(name, bench::alternate(31, std::ref(ours), std::ref(copy)), bytes, "memcpy",
                       1 / 0.9);
    }
  }
  if (python.empty()) {
    std::printf("no Python with torch: the comparison with DataLoader is left out\n");
    return;
  }
  for (const auto& [size, row, batch] :
       std::vector<std::tuple<const char*, std::uint64_t, std::uint64_t>>{{"64 KiB", 16384, 64},
                                                                          {"256 KiB", 65536, 32}}) {
    // Without workers either side is little but one memcpy a row, of which no copy in one thread
    // has five times the speed.
    for (const int workers : {2, 0}) {
      const std::string name = concat("rows of ", size, ", ", workers, " workers");
      if (!report.wants(name)) continue;
      auto command = python;
      for (const std::uint64_t number : {row, batch, static_cast<std::uint64_t>(workers)})
        command.push_back(std::to_string(number));
      command.insert(command.begin() + 2, file.path());
      bench::Peer peer(command);
      std::uint64_t epoch = 0;
      auto theirs = [&] {
        const auto answer = peer.ask(std::to_string(epoch++));
        double seconds = 0;
        unsigned long long rows = 0;
        if (std::sscanf(answer.c_str(), "%lf %llu", &seconds, &rows) != 2 ||
            rows != TokenFile::kMegabytes * (1ull << 18) / row)
          throw Error("the Python reference answered '", answer, "'");
        return seconds;
      };
      Epochs ours(file, row, batch, workers);
      ours();
      theirs();
      report.bandwidth(name, bench::alternate(31, std::ref(ours), theirs), bytes,
                       concat("DataLoader, ", workers, " workers"), 1 / 5.0);
    }
  }
}

// --- A source that takes `read` seconds a batch and a step that takes `compute`: with W workers
// the loop should wait max(0, read / W - compute) a step.

void stall(bench::Report& report) {
  for (const auto& [workers, read, compute] :
       std::vector<std::tuple<int, double, double>>{{0, 0.004, 0.006},
                                                    {1, 0.004, 0.006},
                                                    {1, 0.010, 0.004},
                                                    {2, 0.010, 0.004},
                                                    {4, 0.010, 0.004}}) {
    const std::string name = concat(1e3 * read, " ms to read, ", 1e3 * compute, " ms to compute, ",
                                    workers, workers == 1 ? " worker" : " workers");
    if (!report.wants(name)) continue;
    auto data = std::make_shared<FunctionDataset>(1u << 20, [read = read](std::uint64_t i) {
      std::this_thread::sleep_for(std::chrono::duration<double>(read));
      return Sample{at::scalar_tensor(static_cast<std::int64_t>(i), at::kLong)};
    });
    Loader loader(
        {data},
        std::make_shared<FixedOrder>(SampleOrderOptions{.samples = data->size()}, BatchSchedule(1)),
        BatchMapping({1}, {0}, {}), 0, {.workers = workers, .prefetch = 2 * workers});
    const int steps = 150;
    double waited = 0;
    for (int s = -20; s < steps; ++s) {  // the first ones fill the queue
      const auto begin = Clock::now();
      loader.next();
      if (s >= 0) waited += seconds_since(begin);
      std::this_thread::sleep_for(std::chrono::duration<double>(compute));
    }
    const double theory = workers == 0 ? read : std::max(0.0, read / workers - compute);
    bench::Record r;
    r.name = name;
    r.metric = "wait a step";
    r.value = 1e3 * waited / steps;
    r.unit = "ms";
    r.reference = "theoretical wait";
    r.reference_value = 1e3 * theory;
    // Of the whole step, since the theoretical wait may be none; a sleep of the system itself is
    // late by some 0.1 ms.
    r.ratio = r.median_ratio = (compute + waited / steps) / (compute + theory);
    r.limit = 1.1;
    r.holds = *r.ratio <= *r.limit;
    report.add(r);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench::Output output;
  std::string python, script;
  CLI::App app{"What loading costs"};
  bench::add_output(app, output);
  app.add_option("--python", python, "A Python that has torch");
  app.add_option("--script", script, "torch_loader.py");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  bench::Report report("loader", output);
  try {
    mapping(report);
    indices(report);
    stall(report);
    throughput(report, python.empty() ? std::vector<std::string>{}
                                      : std::vector<std::string>{python, script});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_loader: %s\n", error.what());
    return 2;
  }
  return report.finish();
}
