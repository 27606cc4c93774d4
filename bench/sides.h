#pragma once
// Two ways to train, timed in turn in one run: each side is a program of some ranks, processes of
// the driver that are started once; it tells the ranks of one side at a time to step, over pipes,
// so that the two never compute together. What a rank prints (side_rank.h, side_rank.py): "ready
// LOSS" after some steps, then for each line "N" on its input, N steps later, "SECONDS LOSS CPU
// PEAK": CPU are the seconds that its main thread computed, PEAK the most bytes of tensors that it
// held, 0 where it does not count them. A rank that lacks what its options ask for (a GPU) says
// "skipped: WHY" instead.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "process.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::bench {

inline constexpr int kRanks = 2;
inline constexpr int kPairs = 61;
inline constexpr double kSampleSeconds = 0.06;

/// A port of the loopback that is free now.
inline int free_port() {
  const int s = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (s < 0 || bind(s, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(s, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw Error("no free port on the loopback");
  close(s);
  return ntohs(address.sin_port);
}

/// What some steps of a side took: of its slowest rank, and of the one that held most.
struct Steps {
  double seconds = 0;
  /// Of the main thread.
  double cpu_seconds = 0;
  double peak_bytes = 0;
};

/// The ranks of one way to train.
class Side {
 public:
  Side(std::vector<std::string> command, const std::string& name) {
    const int port = free_port();
    command.push_back(name);
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<std::string> environment;
      for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
      for (const auto& [key, value] : {std::pair<const char*, int>{"RANK", rank},
                                       {"LOCAL_RANK", rank},
                                       {"WORLD_SIZE", kRanks},
                                       {"LOCAL_WORLD_SIZE", kRanks},
                                       {"MASTER_PORT", port},
                                       {"OMP_NUM_THREADS", 1}}) {
        std::erase_if(environment,
                      [&](const std::string& e) { return e.starts_with(concat(key, "=")); });
        environment.push_back(concat(key, "=", value));
      }
      environment.push_back("MASTER_ADDR=127.0.0.1");
      ranks_.push_back(std::make_unique<Process>(command, environment));
    }
    for (auto& rank : ranks_) {
      double loss = 0;
      const std::string line = rank->line();
      if (line.starts_with("skipped: ")) throw NotAvailable(line.substr(9, line.find('\n') - 9));
      if (std::sscanf(line.c_str(), "ready %lf", &loss) != 1)
        throw Error("a rank said something else than 'ready LOSS'");
      losses_.push_back(loss);
    }
  }
  const std::vector<double>& losses() const { return losses_; }

  /// `count` steps of all ranks.
  Steps run(int count) {
    for (auto& rank : ranks_) rank->tell(count);
    Steps most;
    for (auto& rank : ranks_) {
      Steps one;
      double loss = 0;
      if (std::sscanf(rank->line().c_str(), "%lf %lf %lf %lf", &one.seconds, &loss,
                      &one.cpu_seconds, &one.peak_bytes) != 4)
        throw Error("a rank said something else than 'SECONDS LOSS CPU PEAK'");
      most.seconds = std::max(most.seconds, one.seconds);
      most.cpu_seconds = std::max(most.cpu_seconds, one.cpu_seconds);
      most.peak_bytes = std::max(most.peak_bytes, one.peak_bytes);
    }
    return most;
  }

  /// Seconds of one step, of the slower rank.
  double steps(int count) { return run(count).seconds / count; }

 private:
  std::vector<std::unique_ptr<Process>> ranks_;
  std::vector<double> losses_;
};

/// Throws Error where the losses of the two sides differ.
inline void check_same_training(const std::string& name, const Side& ours, const Side& theirs) {
  for (std::size_t r = 0; r < ours.losses().size(); ++r) {
    const double a = ours.losses()[r], b = theirs.losses()[r];
    if (!(std::abs(a - b) <= 1e-4 * std::abs(b)))
      throw Error(name, ": rank ", r, " has loss ", a, " here and ", b,
                  " there: not the same training");
  }
}

/// Throws Error where the losses of two sides differ by a bit (what sides print says all of them).
inline void check_equal_training(const std::string& name, const Side& ours, const Side& theirs) {
  for (std::size_t r = 0; r < ours.losses().size(); ++r) {
    if (static_cast<float>(ours.losses()[r]) != static_cast<float>(theirs.losses()[r]))
      throw Error(name, ": rank ", r, " has loss ", ours.losses()[r], " and ", theirs.losses()[r],
                  ", which must be equal");
  }
}

/// Records `name`: the step of `ours` beside that of `theirs`, at most `limit` of it, in `pairs`
/// samples of each. Throws Error where their losses differ.
inline void compare(Report& report, const std::string& name, Side& ours, Side& theirs,
                    const std::string& reference, double limit, int pairs = kPairs) {
  check_same_training(name, ours, theirs);
  const int steps =
      std::max(1, static_cast<int>(kSampleSeconds / std::max(ours.steps(3), theirs.steps(3))));
  report.time(name,
              alternate(
                  pairs, [&] { return ours.steps(steps); }, [&] { return theirs.steps(steps); }),
              reference, limit);
}

/// What the sides of a benchmark are made of.
struct Programs {
  /// One rank of ours, in C++.
  std::string rank;
  /// One rank of Python's: `python script`.
  std::string python, script;
};

/// main() of a driver: bench_NAME --rank-program R --python P --script S [--out FILE] [--only
/// PATTERN]. `cases` measures what the report wants, in `pairs` samples of each side; `more` adds
/// options to the command line. The status is 77, as of a skipped test, where a rank says that it
/// is skipped.
inline int drive(int argc, char** argv, const std::string& name, const std::string& about,
                 const std::function<void(Report&, const Programs&)>& cases,
                 const std::function<void(CLI::App&)>& more = {}, int pairs = kPairs) {
  CLI::App app(about);
  Programs programs;
  Output output;
  app.add_option("--rank-program", programs.rank, concat("bench_", name, "_rank"))->required();
  app.add_option("--python", programs.python, "Python that has torch")->required();
  app.add_option("--script", programs.script, "rank.py")->required();
  add_output(app, output);
  if (more) more(app);
  CLI11_PARSE(app, argc, argv);
  // A rank that has ended is an error of the call that talks with it.
  signal(SIGPIPE, SIG_IGN);
  try {
    Report report(name, output);
    report.meta("ranks", kRanks);
    report.meta("threads_per_rank", 1);
    report.meta("backend", "gloo");
    report.meta("pairs", pairs);
    cases(report, programs);
    return report.finish();
  } catch (const NotAvailable& e) {
    std::printf("bench_%s: skipped: %s\n", name.c_str(), e.what());
    return 77;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_%s: %s\n", name.c_str(), e.what());
    return 2;
  }
}

}  // namespace tessera::bench
