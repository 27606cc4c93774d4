#pragma once
// run_local(): N ranks of one program on this host, with no process left behind however it ends.
// Linux only.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/launch/launch.h"

namespace tessera {

/// What run_local() starts and how. Times are seconds.
struct LocalRun {
  static constexpr int automatic = -1;
  static constexpr int off = 0;

  /// The program, searched in PATH, and its arguments.
  std::vector<std::string> command;
  int ranks = 1;
  /// Time limit of the whole run; 0: none.
  double timeout = 0;
  /// Time from SIGTERM (or a forwarded signal) to SIGKILL.
  double grace = 5;
  /// The time that the other ranks get after the first failure to end by themselves before SIGTERM.
  double linger = 0;
  /// Folder for rank-R.out and rank-R.err, which get the ranks' bytes unchanged; made if absent.
  /// Empty: no log files.
  std::string log_folder;
  /// OMP_NUM_THREADS of a rank: automatic, off (left alone), or a number.
  int threads = automatic;
  /// Where the ranks' memory comes from. "system": as everywhere. "keep": the C library's malloc,
  /// told to keep what is freed for the next tensor instead of giving it back: fewer page faults,
  /// at the price of memory that no other process gets until the rank ends (GLIBC_TUNABLES; needs
  /// glibc). Else the path of an allocator's shared library, which each rank loads before all
  /// others (LD_PRELOAD; not by programs that are linked statically).
  std::string allocator = "system";
  /// Bind each rank to its own block of CPUs, as share_cpus() divides them.
  bool bind = false;
  /// The slot of each rank on this host, which is its local rank: the number of its device and,
  /// with `bind`, of its block of CPUs. Empty: rank r is on slot r.
  std::vector<int> slot_of = {};
  /// live: lines as they come. by_rank: all of rank 0, then all of rank 1, ...
  enum class Output { live, by_rank } output = Output::live;
  /// The number of bytes of lines that may wait for their rank's turn with Output::by_rank, in the
  /// temporary folder. Beyond that, or if that folder is full, lines are written as they come:
  /// ranks that were held up instead would wait for each other.
  std::int64_t keep_bytes = std::int64_t{1} << 30;
  /// Descriptors that the ranks' standard output and error go to.
  int out = 1;
  int err = 2;
};

/// How a run ended.
struct LocalRunResult {
  /// 0; the first failed rank's exit code, or 128 + its signal; 124 after the time limit; 126 or
  /// 127 if the program could not be started; 128 + signal if ranks had to be killed after a
  /// forwarded signal, or it came before all were started; 141 if the reader of the output went
  /// away; 125 if every rank succeeded, but output could not be written (a full disk).
  int exit_status = 0;
  /// The rank that failed first, or -1.
  int first_failed = -1;
  bool timed_out = false;
  /// Ranks that were running at the time limit.
  std::vector<int> still_running;
};

/// Starts `run.ranks` ranks and waits for them. Every rank gets the variables of docs/launching.md
/// ("Our launcher").
///
/// Output: every line gets the prefix "[R] " (ranks padded to one width), lines are never mixed,
/// and the two streams stay separate; lines that wait at the same time come in rank order. A line
/// of more than 1 MiB is split into lines of that size. Ranks wait for a slow reader. Once a
/// failure, the time limit or a signal has ended them, a reader that takes nothing is waited for as
/// long as `grace` (at least 1 s), and not beyond it after the time limit or a signal. If the
/// output cannot be written (a full disk), the ranks continue, and a line says how much is missing.
///
/// When a rank fails, the others get SIGTERM, and SIGKILL after `grace`; the report on `err` names
/// the rank that failed first, how, and its last lines. SIGINT, SIGTERM, SIGHUP and SIGQUIT go to
/// every rank, and after `grace` all are killed (after a second such signal: at once); SIGUSR1 and
/// SIGUSR2 are passed on and change nothing else. A signal that this process ignores (nohup, jobs
/// of scripts) stays ignored. The ranks' descendants end with their rank, and all of them with this
/// process. Once the run is to end, ranks that have not been started yet are not started any more,
/// and the report says how many.
///
/// During the call it takes over the process' handling of these signals, of SIGCHLD and of SIGPIPE,
/// makes the process a subreaper, and raises its soft limit of descriptors to the hard one (the
/// ranks get the limit from before); call it from a process with one thread. Throws InvalidArgument
/// for a request that makes no sense and Error if the system refuses.
LocalRunResult run_local(const LocalRun& run);

/// For a program that starts its own ranks where no launcher has:
///
///   int main(int argc, char** argv) {
///     if (const auto status = tessera::start_local_ranks(4, argc, argv)) return *status;
///     auto manager = tessera::DistributedManager::initialize();   // one of four ranks
///     ...
///
/// Where a launcher has started this process, or `ranks` is 1: nothing. Otherwise runs this program
/// again, `ranks` times with the same arguments, waits for them as `tessera run` does (run_local),
/// and returns the exit status for main() to return. Call it before anything else: the process has
/// one thread then. `environment`: where to look for a launcher. Throws InvalidArgument for less
/// than one rank, ConfigurationError as detect_launch() does.
std::optional<int> start_local_ranks(int ranks, int argc, char** argv,
                                     const Environment& environment = Environment::of_process());

}  // namespace tessera
