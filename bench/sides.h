#pragma once
// Two ways to train, timed in turn in one run: each side is a program of some ranks, processes of
// the driver that are started once; it tells the ranks of one side at a time to step, over pipes,
// so that the two never compute together. What a rank prints: "ready LOSS" after some steps, then
// for each line "N" on its input "SECONDS LOSS", N steps later.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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
      if (std::sscanf(rank->line().c_str(), "ready %lf", &loss) != 1)
        throw Error("a rank said something else than 'ready LOSS'");
      losses_.push_back(loss);
    }
  }
  const std::vector<double>& losses() const { return losses_; }

  /// Seconds of one step, of the slower rank.
  double steps(int count) {
    for (auto& rank : ranks_) rank->tell(count);
    double slowest = 0;
    for (auto& rank : ranks_) slowest = std::max(slowest, std::atof(rank->line().c_str()));
    return slowest / count;
  }

 private:
  std::vector<std::unique_ptr<Process>> ranks_;
  std::vector<double> losses_;
};

/// Records `name`: the step of `ours` beside that of `theirs`, at most `limit` of it. Throws Error
/// where their losses differ.
inline void compare(Report& report, const std::string& name, Side& ours, Side& theirs,
                    const std::string& reference, double limit) {
  for (std::size_t r = 0; r < ours.losses().size(); ++r) {
    const double a = ours.losses()[r], b = theirs.losses()[r];
    if (!(std::abs(a - b) <= 1e-4 * std::abs(b)))
      throw Error(concat(name, ": rank ", r, " has loss ", a, " here and ", b,
                         " there: not the same training"));
  }
  const int steps =
      std::max(1, static_cast<int>(kSampleSeconds / std::max(ours.steps(3), theirs.steps(3))));
  report.time(name,
              alternate(
                  kPairs, [&] { return ours.steps(steps); }, [&] { return theirs.steps(steps); }),
              reference, limit);
}

}  // namespace tessera::bench
