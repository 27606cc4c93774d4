#pragma once
// Ranks as forked processes, for tests in which a rank dies or is stopped. The parent only forks,
// reads and waits: it must not have started threads, and each child ends by std::exit, so that a
// crash while static objects are destroyed is seen.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../support/free_port.h"
#include "tessera/launch/launch.h"

namespace tessera::testing {

struct RankEnd {
  /// By itself, within the limit.
  bool ended = false;
  /// -1: ended by a signal, or not at all.
  int exit_code = -1;
  int signal = 0;
  /// What the body returned, or "uncaught: ...".
  std::string report;
};

inline Launch local_launch(int rank, int world, int port) {
  Launch launch;
  launch.launcher = "code";
  launch.rank = launch.local_rank = rank;
  launch.world_size = launch.local_size = world;
  launch.address = "127.0.0.1";
  launch.port = port;
  return launch;
}

/// Runs `body(launch)` in `world` processes. Its text comes back as the report, and the exit code
/// is 0; an exception that leaves it gives exit code 9. Ranks that are not in `wait_for` (empty:
/// all) are killed when the others have ended; after `limit` all are.
inline std::vector<RankEnd> fork_ranks(int world,
                                       const std::function<std::string(const Launch&)>& body,
                                       std::chrono::milliseconds limit,
                                       const std::vector<bool>& wait_for = {}) {
  const int port = free_port();
  std::vector<pid_t> pids(world);
  std::vector<int> pipes(world);
  std::fflush(nullptr);
  for (int rank = 0; rank < world; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    pids[rank] = ::fork();
    if (pids[rank] == 0) {
      ::close(ends[0]);
      std::string report;
      int code = 0;
      try {
        report = body(local_launch(rank, world, port));
      } catch (const std::exception& error) {
        report = std::string("uncaught: ") + error.what();
        code = 9;
      }
      [[maybe_unused]] const auto written = ::write(ends[1], report.data(), report.size());
      ::close(ends[1]);
      std::exit(code);
    }
    ::close(ends[1]);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    pipes[rank] = ends[0];
  }

  std::vector<RankEnd> results(world);
  std::vector<bool> reaped(world, false);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  auto drain = [&](int rank) {
    char part[4096];
    for (ssize_t n; (n = ::read(pipes[rank], part, sizeof part)) > 0;)
      results[rank].report.append(part, n);
  };
  auto reap = [&](int rank, bool by_itself) {
    int status = 0;
    if (reaped[rank] || ::waitpid(pids[rank], &status, by_itself ? WNOHANG : 0) != pids[rank])
      return;
    reaped[rank] = true;
    results[rank].ended = by_itself;
    if (WIFEXITED(status)) results[rank].exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) results[rank].signal = WTERMSIG(status);
  };
  for (bool pending = true; pending && std::chrono::steady_clock::now() < deadline;) {
    pending = false;
    for (int rank = 0; rank < world; ++rank) {
      drain(rank);
      reap(rank, true);
      if (!reaped[rank] && (wait_for.empty() || wait_for[rank])) pending = true;
    }
    if (pending) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (int rank = 0; rank < world; ++rank) {
    if (!reaped[rank]) {
      ::kill(pids[rank], SIGKILL);
      reap(rank, false);
    }
    drain(rank);
    ::close(pipes[rank]);
  }
  return results;
}

}  // namespace tessera::testing
