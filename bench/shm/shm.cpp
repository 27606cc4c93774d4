// Calls of ranks that share memory, beside what the hardware asks and beside Open MPI, in one run.
//
// The roof of a call that fits into a line is the way of one flag from a core to another: each rank
// writes a line and waits for the other's. That of some KiB is the same with as many bytes, which
// each writes before the flag and copies after it: caches move lines one by one, and 4 KiB are 64.
// The roof of a large one is the copy of as many bytes that another core has just written. Data are
// written anew before each call, as a program does that computes them: what a benchmark only reads
// stays in the wrong cache.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/shm/group.h"

#ifdef TESSERA_BENCH_MPI
#include <mpi.h>
#endif

namespace {

using tessera::bench::Output;
using tessera::bench::Report;
using tessera::shm::Element;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMost = std::size_t{64} << 20;
/// Calls of a sample, where one alone would be lost in the clock's own time.
constexpr int kCallsOfSmall = 50;
constexpr std::size_t kSmall = 4096;

struct alignas(64) Flag {
  std::atomic<std::uint64_t> value;
};

/// What two ranks share for the roof.
struct Roof {
  Flag* flags;
  std::byte* data[2];
  std::uint64_t turn = 0;
};

struct Bench {
  int rank, ranks;
  tessera::shm::Group& group;
  tessera::shm::Group& with_arena;
  Report& report;
  Roof roof;
  std::byte *in, *out;
};

double seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// One sample of `call`, which works on `bytes` bytes.
double sample(Bench& bench, std::byte* data, std::size_t bytes, const std::function<void()>& call) {
  const int calls = bytes <= kSmall ? kCallsOfSmall : 1;
  for (std::size_t i = 0; i < bytes; i += 64) data[i] = std::byte(bench.rank);
  bench.group.barrier();
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return seconds(begin) / calls;
}

void flag_turn(Bench& bench) {
  const std::uint64_t turn = ++bench.roof.turn;
  bench.roof.flags[bench.rank].value.store(turn, std::memory_order_release);
  while (bench.roof.flags[1 - bench.rank].value.load(std::memory_order_acquire) < turn) {
  }
}

/// The flag with data: four places in turn, as slots are.
void data_turn(Bench& bench, std::size_t bytes) {
  const std::size_t place = bench.roof.turn % 4 * kSmall;
  std::memcpy(bench.roof.data[bench.rank] + place, bench.in, bytes);
  flag_turn(bench);
  std::memcpy(bench.out, bench.roof.data[1 - bench.rank] + place, bytes);
}

double copy_sample(Bench& bench, std::size_t bytes) {
  std::byte* mine = bench.roof.data[bench.rank];
  for (std::size_t i = 0; i < bytes; i += 64) mine[i] = std::byte(bench.rank);
  bench.group.barrier();
  const auto begin = Clock::now();
  std::memcpy(bench.out, bench.roof.data[1 - bench.rank], bytes);
  return seconds(begin);
}

struct Size {
  const char* name;
  std::size_t bytes;
};
constexpr Size kSizes[] = {{"4 B", 4},         {"56 B", 56},      {"1 KiB", 1024},
                           {"4 KiB", 4096},    {"64 KiB", 65536}, {"1 MiB", 1 << 20},
                           {"4 MiB", 4 << 20}, {"64 MiB", kMost}};

struct Operation {
  const char* name;
  const char* mpi;
  std::function<void(Bench&, std::size_t)> ours, theirs;
};

std::vector<Operation> operations() {
  std::vector<Operation> all = {
      {"all_reduce",
       "MPI_Allreduce",
       [](Bench& b, std::size_t n) { b.group.all_reduce(b.in, b.in, n / 4, Element::float32, {}); },
       {}},
      {"broadcast",
       "MPI_Bcast",
       [](Bench& b, std::size_t n) { b.group.broadcast(b.in, n, 0); },
       {}},
      {"all_gather",
       "MPI_Allgather",
       [](Bench& b, std::size_t n) {
         b.group.all_gather(b.in, b.out, n / static_cast<std::size_t>(b.ranks));
       },
       {}},
      {"reduce_scatter",
       "MPI_Reduce_scatter_block",
       [](Bench& b, std::size_t n) {
         b.group.reduce_scatter(b.in, b.out, n / 4 / static_cast<std::size_t>(b.ranks),
                                Element::float32, {});
       },
       {}},
      {"exchange",
       "MPI_Sendrecv",
       [](Bench& b, std::size_t n) {
         using tessera::shm::Message;
         b.group.exchange(
             {{Message::Kind::send, b.in, n, (b.rank + 1) % b.ranks, 0},
              {Message::Kind::receive, b.out, n, (b.rank + b.ranks - 1) % b.ranks, 0}});
       },
       {}},
  };
#ifdef TESSERA_BENCH_MPI
  all[0].theirs = [](Bench& b, std::size_t n) {
    MPI_Allreduce(MPI_IN_PLACE, b.in, static_cast<int>(n / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  all[1].theirs = [](Bench& b, std::size_t n) {
    MPI_Bcast(b.in, static_cast<int>(n), MPI_BYTE, 0, MPI_COMM_WORLD);
  };
  all[2].theirs = [](Bench& b, std::size_t n) {
    const int each = static_cast<int>(n) / b.ranks;
    MPI_Allgather(b.in, each, MPI_BYTE, b.out, each, MPI_BYTE, MPI_COMM_WORLD);
  };
  all[3].theirs = [](Bench& b, std::size_t n) {
    MPI_Reduce_scatter_block(b.in, b.out, static_cast<int>(n / 4) / b.ranks, MPI_FLOAT, MPI_SUM,
                             MPI_COMM_WORLD);
  };
  all[4].theirs = [](Bench& b, std::size_t n) {
    MPI_Sendrecv(b.in, static_cast<int>(n), MPI_BYTE, (b.rank + 1) % b.ranks, 0, b.out,
                 static_cast<int>(n), MPI_BYTE, (b.rank + b.ranks - 1) % b.ranks, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
  };
#endif
  return all;
}

void measure(Bench& bench) {
  const bool beside_mpi = operations()[0].theirs != nullptr;
  for (const auto& operation : operations()) {
    for (const Size& size : kSizes) {
      if (bench.ranks > 2 && size.bytes > (4 << 20)) continue;
      const int pairs = size.bytes > (1 << 20) ? 31 : 61;
      const auto ours = [&] {
        return sample(bench, bench.in, size.bytes, [&] { operation.ours(bench, size.bytes); });
      };
      const std::string name =
          tessera::concat(bench.ranks == 2 ? "" : tessera::concat(bench.ranks, " ranks "),
                          operation.name, " ", size.name);
      if (bench.ranks == 2 && operation.name == std::string("all_reduce")) {
        const bool small = size.bytes <= kSmall, in_line = size.bytes <= 56;
        const std::string roof_name = name + " roof";
        if (bench.report.wants(roof_name)) {
          const auto roof = [&] {
            if (!small) return copy_sample(bench, size.bytes);
            return sample(bench, bench.in, size.bytes,
                          [&] { in_line ? flag_turn(bench) : data_turn(bench, size.bytes); });
          };
          bench.report.time(roof_name, tessera::bench::alternate(pairs, ours, roof),
                            in_line ? "one flag"
                            : small ? "flag and data"
                                    : "copy from a core",
                            small ? 3 : 1.5);
        }
        const std::string arena_name = name + " arena";
        if (!small && bench.report.wants(arena_name)) {
          float* data = reinterpret_cast<float*>(bench.with_arena.arena().allocate(size.bytes));
          std::memset(data, 0, size.bytes);
          const auto in_arena = [&] {
            return sample(bench, reinterpret_cast<std::byte*>(data), size.bytes, [&] {
              bench.with_arena.all_reduce(data, data, size.bytes / 4, Element::float32, {});
            });
          };
          bench.report.time(arena_name, tessera::bench::alternate(pairs, in_arena, ours),
                            "elsewhere", 1.1);
          bench.group.barrier();
          bench.with_arena.arena().deallocate(reinterpret_cast<std::byte*>(data));
        }
      }
      if (beside_mpi && bench.report.wants(name)) {
        const auto theirs = [&] {
          return sample(bench, bench.in, size.bytes, [&] { operation.theirs(bench, size.bytes); });
        };
        bench.report.time(name, tessera::bench::alternate(pairs, ours, theirs), operation.mpi, 1.1);
      }
    }
  }
}

/// Files in `folder` as the directory in which ranks meet.
tessera::shm::Directory files(const std::filesystem::path& folder) {
  const auto at = [folder](std::string key) {
    std::ranges::replace(key, '/', '.');
    return folder / key;
  };
  return {[at](const std::string& key, const std::string& bytes) {
            const auto draft = at(key + ".draft");
            std::ofstream(draft, std::ios::binary) << bytes;
            std::filesystem::rename(draft, at(key));
          },
          [at](const std::string& key, std::chrono::milliseconds limit) {
            const auto deadline = tessera::deadline_after(limit);
            while (!std::filesystem::exists(at(key))) {
              if (Clock::now() > deadline) throw std::runtime_error("no " + key);
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            std::ostringstream text;
            text << std::ifstream(at(key), std::ios::binary).rdbuf();
            return text.str();
          }};
}

int run(int rank, int ranks, const std::string& folder, const Output& output) {
  if (ranks == 2) {
    // Each on a core of its own, as launchers place them.
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) >= 2) {
      int nth = 0;
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed) || nth++ != rank) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
      }
    }
  }
  tessera::shm::Options options;
  options.name = "bench";
  auto group = tessera::shm::Group::meet(rank, ranks, files(folder), options);
  options.name = "arena";
  options.arena_bytes = kMost + 65536;
  auto with_arena = tessera::shm::Group::meet(rank, ranks, files(folder), options);
  Report report("shm", output, rank);
  report.meta("ranks", static_cast<std::int64_t>(ranks));
  report.meta("describe", tessera::shm::to_string(group.describe()));

  // The roof's memory is a file that both map: nothing of the library.
  const std::string path = folder + "/roof";
  if (rank == 0) {
    std::ofstream(path).put('\0');
    std::filesystem::resize_file(path, 4096 + 2 * kMost);
  }
  group.barrier();
  const int fd = ::open(path.c_str(), O_RDWR);
  void* memory = ::mmap(nullptr, 4096 + 2 * kMost, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap");
  auto* begin = static_cast<std::byte*>(memory);
  std::vector<std::byte> sent(kMost), received(kMost);
  const Roof roof{reinterpret_cast<Flag*>(begin), {begin + 4096, begin + 4096 + kMost}};
  Bench bench{rank, ranks, group, with_arena, report, roof, sent.data(), received.data()};
  measure(bench);
  group.barrier();
  return rank == 0 ? report.finish() : 0;
}

std::string new_folder() {
  std::string name = (std::filesystem::temp_directory_path() / "bench-shm-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
  return name;
}

int run_all(const Output& output) {
#ifdef TESSERA_BENCH_MPI
  MPI_Init(nullptr, nullptr);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks > 1) {
    char name[4096] = {};
    if (rank == 0) std::snprintf(name, sizeof name, "%s", new_folder().c_str());
    MPI_Bcast(name, sizeof name, MPI_BYTE, 0, MPI_COMM_WORLD);
    const int status = run(rank, ranks, name, output);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) std::filesystem::remove_all(name);
    MPI_Finalize();
    return status;
  }
  MPI_Finalize();
#endif
  const std::string folder = new_folder();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(run(1, 2, folder, output));
  const int status = run(0, 2, folder, output);
  ::waitpid(child, nullptr, 0);
  std::filesystem::remove_all(folder);
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Calls of ranks that share memory, beside the hardware's roof and Open MPI");
  Output output{.shared = true};
  tessera::bench::add_output(app, output);
  CLI11_PARSE(app, argc, argv);
  try {
    return run_all(output);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_shm: %s\n", error.what());
    return 1;
  }
}
