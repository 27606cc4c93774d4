#pragma once
// Two ways to train, timed in turn in one run: each side is a program of some ranks, processes of
// the driver that are started once; it tells the ranks of one side at a time to step, over pipes,
// so that the two never compute together. What a rank prints: "ready LOSS" after some steps, then
// for each line "N" on its input "SECONDS LOSS", N steps later.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
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

class Process {
 public:
  Process(const std::vector<std::string>& command, const std::vector<std::string>& environment) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw Error("pipe failed");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    const auto pointers = [](const std::vector<std::string>& list) {
      std::vector<char*> result;
      for (const auto& text : list) result.push_back(const_cast<char*>(text.c_str()));
      result.push_back(nullptr);
      return result;
    };
    const int code = posix_spawnp(&pid_, command.front().c_str(), &actions, nullptr,
                                  pointers(command).data(), pointers(environment).data());
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = fdopen(in[1], "w");
    from_ = fdopen(out[0], "r");
    if (code != 0) throw Error(concat("cannot start ", command.front()));
    what_ = command.back();
  }
  ~Process() {
    std::fclose(to_);  // The end of its input: it leaves.
    std::fclose(from_);
    for (int i = 0; i < 100; ++i) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
      usleep(50000);  // it leaves by itself in a moment; nothing is timed here any more
    }
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void tell(int steps) {
    std::fprintf(to_, "%d\n", steps);
    std::fflush(to_);
  }
  std::string line() {
    char text[256];
    if (!std::fgets(text, sizeof text, from_))
      throw Error(concat("a rank of ", what_, " ended; see above"));
    return text;
  }

 private:
  pid_t pid_ = -1;
  std::FILE *to_ = nullptr, *from_ = nullptr;
  std::string what_;
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
