#pragma once
// The local launcher: N ranks of one program on this host, with nothing left behind however it
// ends. Linux only.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// What run_local() starts and how. Times are seconds.
struct LocalRun {
  static constexpr int automatic = -1;
  static constexpr int off = 0;

  /// Program first, found by PATH.
  std::vector<std::string> command;
  int ranks = 1;
  /// Limit of the whole run; 0: none.
  double timeout = 0;
  /// From SIGTERM (or a forwarded signal) to SIGKILL.
  double grace = 5;
  /// After the first failure, the time that the other ranks get to end by themselves before
  /// SIGTERM.
  double linger = 0;
  /// Made if absent; rank-R.out and rank-R.err get the bytes as they come. Empty: none.
  std::string log_folder;
  /// OMP_NUM_THREADS of a rank: automatic, off (left alone), or a number.
  int threads = automatic;
  /// Each rank to its own block of CPUs, as share_cpus() says.
  bool bind = false;
  /// by_rank: all of rank 0, then all of rank 1, ...
  enum class Output { live, by_rank } output = Output::live;
  /// Bytes of lines that wait for their rank's turn with Output::by_rank, kept in the temporary
  /// folder. Beyond them, or where that folder is full, lines come as they are: ranks that were
  /// held up instead would wait for each other.
  std::int64_t keep_bytes = std::int64_t{1} << 30;
  /// Descriptors that the ranks' standard output and error go to.
  int out = 1;
  int err = 2;
};

/// How a run ended.
struct LocalRunResult {
  /// 0; the first failed rank's exit code, or 128 + its signal; 124 after the time limit; 126 or
  /// 127 where the program could not be started; 128 + signal where ranks had to be killed after a
  /// forwarded signal; 141 where the reader of the output went away; 125 where every rank
  /// succeeded, but output could not be written (a full disk).
  int exit_status = 0;
  /// Rank, or -1.
  int first_failed = -1;
  bool timed_out = false;
  /// At the time limit.
  std::vector<int> still_running;
};

/// Starts `run.ranks` ranks and waits for them. Every rank finds the variables of docs/launching.md
/// ("Our launcher").
///
/// Output: every line with the prefix "[R] " (ranks padded to one width), lines never mixed, both
/// streams kept apart; lines that wait at the same time come in rank order. A line of more than 1
/// MiB comes in pieces of that size. Ranks wait for a reader that is slow. Once a failure, the time
/// limit or a signal has ended them, a reader that takes nothing is waited for as long as `grace`
/// (at least 1 s), and not beyond it after the time limit or a signal. Where the output cannot be
/// written (a full disk), the ranks go on, and a line says how much is missing.
///
/// When a rank fails, the others get SIGTERM, and SIGKILL after `grace`; the report on `err` names
/// the rank that failed first, how, and its last lines. SIGINT, SIGTERM, SIGHUP and SIGQUIT go to
/// every rank, and after `grace` all are killed (a second such signal: at once); SIGUSR1 and
/// SIGUSR2 are passed on and change nothing else. A signal that this process ignores (nohup, jobs
/// of scripts) is left alone. The ranks' descendants end with their rank, and all of them with this
/// process.
///
/// For the time of the call it takes over the process' handling of these signals, of SIGCHLD and of
/// SIGPIPE, makes the process a subreaper, and raises its soft limit of descriptors to the hard one
/// (the ranks get the limit from before); call it from a process with one thread. Throws
/// InvalidArgument for a request that makes no sense and Error where the system refuses.
LocalRunResult run_local(const LocalRun& run);

}  // namespace tessera
