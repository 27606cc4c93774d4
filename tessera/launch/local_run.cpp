#include "tessera/launch/local_run.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/launch/detail/process_tree.h"
#include "tessera/launch/detail/rank_outputs.h"
#include "tessera/launch/detail/run_scope.h"
#include "tessera/launch/detail/supervisor.h"
#include "tessera/launch/internal/cores.h"

namespace tessera {
namespace detail {
namespace {

// A process that survives SIGKILL for so long hangs inside the system.
constexpr std::int64_t give_up_after_ns = 10'000'000'000;
// The least time that a reader of the output gets once the ranks have ended.
constexpr double least_reader_seconds = 1;

std::string describe(int status) {
  if (WIFSIGNALED(status))
    return concat("signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return concat("exit code ", WEXITSTATUS(status));
}

int exit_code(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

struct Rank {
  SupervisedRank process;
  // The rank itself has ended.
  bool ended = false;
  // Its supervisor has ended too, and so everything below it.
  bool gone = false;
  // The supervisor died before it could say how the rank ended.
  bool lost = false;
  int status = 0;
  std::int64_t ended_ns = 0;
};

void check(const LocalRun& run) {
  if (run.command.empty()) throw InvalidArgument("run_local: no program to run");
  if (run.ranks < 1)
    throw InvalidArgument("run_local: ", run.ranks, " ranks; at least 1 is needed");
  if (run.threads < LocalRun::automatic)
    throw InvalidArgument("run_local: ", run.threads, " threads; give automatic, off or a number");
  if (std::vector<int> slots = run.slot_of; !slots.empty()) {
    std::ranges::sort(slots);
    for (int r = 0; r < run.ranks; ++r)
      if (slots.size() != static_cast<std::size_t>(run.ranks) || slots[r] != r)
        throw InvalidArgument("run_local: slots ", list(run.slot_of), " for ", run.ranks,
                              " ranks; give each slot from 0 once");
  }
  for (double seconds : {run.timeout, run.grace, run.linger})
    if (!(seconds >= 0 && seconds < 1e9))
      throw InvalidArgument("run_local: ", seconds, " s is no time; give 0 to 1e9");
  if (run.keep_bytes < 0)
    throw InvalidArgument("run_local: ", run.keep_bytes, " bytes to keep; at least 0");
}

class Runner {
 public:
  explicit Runner(const LocalRun& run) : run_(run), outputs_(run_) {
    for (pid_t pid : children(getpid())) older_children_.insert(pid);
  }

  LocalRunResult run() {
    begin_ns_ = monotonic_ns();
    prepare();
    start_all();
    while (!done()) step();
    report();
    finish_output();
    return result_;
  }

  ~Runner() {
    for (Rank& rank : ranks_) {
      if (rank.process.control >= 0) close(rank.process.control);
      // Closing the socket ends it and everything below it.
      if (!rank.gone && rank.process.supervisor > 0) waitpid(rank.process.supervisor, nullptr, 0);
    }
  }

 private:
  static std::int64_t nanoseconds(double seconds) {
    return static_cast<std::int64_t>(seconds * 1e9);
  }
  void say(const std::string& text) { outputs_.say(text); }

  void prepare() {
    const CpuBudget budget = cpu_budget();
    const int usable = budget.usable();
    if (run_.ranks > usable) {
      say(concat(run_.ranks, " ranks on ", usable, usable == 1 ? " core" : " cores",
                 ": ranks take turns, so times measured in this run say little"));
    }
    if (run_.bind) shares_ = share_cpus(budget.cpus, run_.ranks);
    winsize size{};
    const bool terminal = outputs_.error_is_terminal() && ioctl(run_.err, TIOCGWINSZ, &size) == 0;
    environment_ = shared_environment(run_, usable, port_, terminal ? size.ws_col : 0);
  }

  // Thousands of ranks take minutes to start: a signal, a failure or the end of the time is noticed
  // meanwhile, and the others are not started any more. To look for reports costs a call per rank,
  // so that it is done more rarely the more have been started.
  void start_all() {
    int look = 32;
    for (int r = 0; r < run_.ranks; ++r) {
      start(r);
      if (ranks_.size() >= static_cast<std::size_t>(look)) {
        read_reports();
        look += std::max(32, look / 32);
      }
      if (ending_ || (timeout_ns() > 0 && monotonic_ns() >= timeout_ns()) || asked_to_end()) break;
    }
    not_started_ = run_.ranks - static_cast<int>(ranks_.size());
  }

  // True if a signal that ends the run waits to be read.
  static bool asked_to_end() {
    sigset_t waiting;
    sigpending(&waiting);
    for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) {
      // One that is ignored waits all the same while it is blocked.
      struct sigaction now{};
      if (sigismember(&waiting, signal) == 1 && sigaction(signal, nullptr, &now) == 0 &&
          now.sa_handler != SIG_IGN)
        return true;
    }
    return false;
  }

  void start(int r) {
    Rank& rank = ranks_.emplace_back();
    outputs_.add_rank();
    RankCommand command;
    command.arguments = run_.command;
    command.environment = environment_;
    const int slot = run_.slot_of.empty() ? r : run_.slot_of[r];
    for (const char* name : {"TESSERA_RANK", "RANK"})
      command.environment.push_back(concat(name, "=", r));
    for (const char* name : {"TESSERA_LOCAL_RANK", "LOCAL_RANK"})
      command.environment.push_back(concat(name, "=", slot));
    if (run_.bind) command.cpus = shares_[slot];
    command.grace_ms = static_cast<std::int64_t>(run_.grace * 1000);
    command.descriptors = descriptors_.before();
    std::vector<int> mine{signals_.fd(), port_.fd()};
    for (const Rank& other : ranks_)
      if (other.process.control >= 0) mine.push_back(other.process.control);
    outputs_.append_descriptors(mine);
    rank.process = start_supervised(command, mine, signals_.mask(), signals_.pipe_action());
    outputs_.attach(rank.process.out, rank.process.err);
  }

  bool all_gone() const {
    return std::ranges::all_of(ranks_, [](const Rank& r) { return r.gone; });
  }
  bool done() const { return all_gone() && outputs_.all_read(); }

  void step() {
    std::vector<pollfd> fds;
    fds.push_back({signals_.fd(), POLLIN, 0});
    for (const Rank& rank : ranks_)
      if (rank.process.control >= 0) fds.push_back({rank.process.control, POLLIN, 0});
    outputs_.watch(fds);
    poll(fds.data(), fds.size(), wait_ms());
    read_reports();
    read_signals();
    reap();
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      outputs_.read(static_cast<int>(r), ranks_[r].gone);
    pass_on();
    if (outputs_.reader_gone()) end_ranks(141);
    check_time();
  }

  void pass_on() {
    if (outputs_.pass_on()) taken_ns_ = monotonic_ns();
  }

  int wait_ms() const {
    if (outputs_.ready_to_pass_on()) return 0;
    std::int64_t next = 0;
    for (std::int64_t at : {timeout_ns(), terminate_ns_, kill_ns_, give_up_ns_, reader_ns()})
      if (at > 0 && (next == 0 || at < next)) next = at;
    if (next == 0) return -1;
    return static_cast<int>(
        std::clamp<std::int64_t>((next - monotonic_ns()) / 1000000 + 1, 0, 60000));
  }

  std::int64_t timeout_ns() const {
    return run_.timeout > 0 && !ending_ ? begin_ns_ + nanoseconds(run_.timeout) : 0;
  }

  // Until when the reader of the output is waited for; 0: as long as it takes, as any program does.
  // A run that has to end waits for a reader that still takes output; one whose time is up, or that
  // was asked to end, waits the grace and no longer.
  std::int64_t reader_ns() const {
    if (gone_ns_ == 0 || !ending_) return 0;
    const std::int64_t begin =
        result_.timed_out || forwarded_ ? gone_ns_ : std::max(gone_ns_, taken_ns_);
    const double seconds = at_once_ ? least_reader_seconds : run_.grace;
    return begin + nanoseconds(std::max(seconds, least_reader_seconds));
  }

  // True once the reader need not be waited for any more.
  bool leave_reader() {
    if (reader_ns() == 0 || monotonic_ns() < reader_ns()) return false;
    outputs_.give_up();
    return true;
  }

  void check_time() {
    const std::int64_t now = monotonic_ns();
    if (timeout_ns() > 0 && now >= timeout_ns()) {
      result_.timed_out = true;
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        if (!ranks_[r].ended) result_.still_running.push_back(static_cast<int>(r));
      end_ranks(124);
    }
    if (terminate_ns_ > 0 && now >= terminate_ns_) {
      terminate_ns_ = 0;
      forward(SIGTERM);
      kill_ns_ = now + nanoseconds(run_.grace);
    }
    if (kill_ns_ > 0 && now >= kill_ns_) kill_all();
    if (gone_ns_ == 0 && all_gone()) gone_ns_ = now;
    leave_reader();
    if (give_up_ns_ > 0 && now >= give_up_ns_) {
      give_up_ns_ = 0;
      // A process that survives SIGKILL hangs in the kernel; its supervisor stays and ends it when
      // it can.
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (ranks_[r].gone) continue;
        say(concat("rank ", r,
                   " does not end even on SIGKILL (it hangs inside the system); not waiting for it "
                   "any longer"));
        outputs_.close_rank(static_cast<int>(r));
        ranks_[r].ended = ranks_[r].gone = true;
      }
    }
  }

  // Starts to end every rank: SIGTERM now or after `linger`, but not beyond the time limit, and
  // SIGKILL `grace` later. The first cause determines the exit status.
  void end_ranks(int status, double linger = 0) {
    if (ending_) return;
    terminate_ns_ = monotonic_ns() + nanoseconds(linger);
    if (timeout_ns() > 0) terminate_ns_ = std::min(terminate_ns_, timeout_ns());
    ending_ = true;
    result_.exit_status = status;
  }

  void forward(int signal) { command(SupervisorCommand{SupervisorCommand::forward, signal}); }

  void kill_all() {
    kill_ns_ = terminate_ns_ = 0;
    if (give_up_ns_ == 0) give_up_ns_ = monotonic_ns() + give_up_after_ns;
    for (const Rank& rank : ranks_) killed_ = killed_ || !rank.ended;
    command(SupervisorCommand{SupervisorCommand::kill_all, SIGKILL});
  }

  void command(const SupervisorCommand& command) {
    for (const Rank& rank : ranks_)
      if (rank.process.control >= 0)
        send(rank.process.control, &command, sizeof command, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void read_signals() {
    signalfd_siginfo info;
    while (read(signals_.fd(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) continue;
      if (signal == SIGUSR1 || signal == SIGUSR2) {
        forward(signal);
      } else if (forwarded_ || killed_) {
        at_once_ = true;
        kill_all();
      } else {
        forwarded_ = signal;
        if (!ending_ && all_gone() && result_.exit_status == 0) result_.exit_status = 128 + signal;
        ending_ = true;
        terminate_ns_ = 0;
        say(concat("got signal ", signal, " (", strsignal(signal),
                   "); passing it on, and killing what is left after ", run_.grace, " s"));
        forward(signal);
        if (kill_ns_ == 0) kill_ns_ = monotonic_ns() + nanoseconds(run_.grace);
      }
    }
  }

  void read_reports() {
    std::vector<int> just_ended;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      SupervisorReport message;
      while (rank.process.control >= 0 &&
             recv(rank.process.control, &message, sizeof message, MSG_DONTWAIT) == sizeof message) {
        if (message.kind == SupervisorReport::started) continue;
        rank.ended = true;
        rank.ended_ns = message.time_ns;
        if (message.kind == SupervisorReport::not_started) {
          if (!start_error_) start_error_ = message.value;
          rank.lost = true;
          end_ranks(message.value == ENOENT ? 127 : 126);
          continue;
        }
        rank.status = message.value;
        just_ended.push_back(static_cast<int>(r));
      }
    }
    std::ranges::stable_sort(just_ended,
                             [&](int a, int b) { return ranks_[a].ended_ns < ranks_[b].ended_ns; });
    for (int r : just_ended) note_end(r);
  }

  void note_end(int r) {
    Rank& rank = ranks_[r];
    if (rank.status == 0 && !rank.lost) return;
    // After a time limit, a closed output or a program that cannot be started, this process has
    // ended the ranks.
    if (result_.first_failed >= 0 || (ending_ && !forwarded_)) return;
    result_.first_failed = r;
    result_.exit_status = rank.lost ? 128 + SIGKILL : exit_code(rank.status);
    if (forwarded_ && killed_) result_.exit_status = 128 + forwarded_;
    if (forwarded_) return;
    if (run_.ranks > 1) say(concat("rank ", r, " failed: ", how(rank), "; ending the others"));
    end_ranks(result_.exit_status, run_.linger);
  }

  std::string how(const Rank& rank) const {
    return rank.lost ? "its supervisor was killed" : describe(rank.status);
  }

  void reap() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      if (rank.gone || waitpid(rank.process.supervisor, nullptr, WNOHANG) == 0) continue;
      read_reports();  // Its last reports came before its end.
      rank.gone = true;
      close(rank.process.control);
      rank.process.control = -1;
      if (rank.ended) continue;
      rank.ended = rank.lost = true;
      rank.ended_ns = monotonic_ns();
      end_orphans();
      note_end(static_cast<int>(r));
    }
  }

  // The children of a supervisor that was killed belong to this process now.
  void end_orphans() {
    for (int round = 0; round < 500; ++round) {
      bool found = false;
      for (pid_t child : children(getpid())) {
        if (is_supervisor(child) || older_children_.count(child)) continue;
        found = true;
        signal_descendants(child, SIGKILL);
        kill(child, SIGKILL);
        waitpid(child, nullptr, WNOHANG);
      }
      if (!found) return;
      poll(nullptr, 0, 2);
    }
  }

  bool is_supervisor(pid_t pid) const {
    return std::ranges::any_of(ranks_, [&](const Rank& r) { return r.process.supervisor == pid; });
  }

  void report() {
    if (start_error_) {
      say(concat("cannot start '", run_.command[0], "': ", std::strerror(start_error_)));
    } else if (result_.timed_out) {
      say(concat("the time limit of ", run_.timeout, " s was reached; ",
                 result_.still_running.empty() && not_started_ == 0
                     ? std::string("the ranks had ended, but their output was not taken")
                     : concat("still running: ranks ", list(result_.still_running))));
      for (int r : result_.still_running) outputs_.say_last_lines(r, 3);
    } else if (result_.first_failed >= 0) {
      const Rank& first = ranks_[result_.first_failed];
      say(concat(run_.ranks > 1 ? "first failure: rank " : "rank ", result_.first_failed, ": ",
                 how(first), " after ",
                 fixed(static_cast<double>(first.ended_ns - begin_ns_) / 1e9, 2), " s"));
      outputs_.say_last_lines(result_.first_failed, RankOutputs::last_lines_kept);
    }
    if (not_started_ > 0) {
      say(concat(not_started_, " of ", run_.ranks, " ranks had not been started"));
      // Ranks that end well on the signal are no whole run.
      if (result_.exit_status == 0 && forwarded_) result_.exit_status = 128 + forwarded_;
    }
    if (outputs_.reader_gone()) say("the reader of the output went away; the ranks were ended");
    // One may have ended by itself while the others were about to be killed.
    std::vector<int> killed;
    for (int r = 0; killed_ && !start_error_ && r < static_cast<int>(ranks_.size()); ++r)
      if (const int status = ranks_[r].status; WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        killed.push_back(r);
    if (killed.empty()) return;
    const std::string which = concat(killed.size() == 1 ? "rank " : "ranks ",
                                     killed.size() == 1 ? std::to_string(killed[0]) : list(killed));
    say(at_once_ ? concat(which, killed.size() == 1 ? " was" : " were", " killed")
                 : concat(which, " did not end within ", run_.grace, " s and ",
                          killed.size() == 1 ? "was" : "were", " killed"));
  }

  void finish_output() {
    pass_on();
    while (outputs_.pending() && !leave_reader()) {
      std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
      outputs_.watch(fds);
      poll(fds.data(), fds.size(), wait_ms());
      signalfd_siginfo info;
      while (read(signals_.fd(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        if (info.ssi_signo == SIGCHLD || info.ssi_signo == SIGUSR1 || info.ssi_signo == SIGUSR2)
          continue;
        if (result_.exit_status == 0) result_.exit_status = 128 + static_cast<int>(info.ssi_signo);
        return;
      }
      pass_on();
      check_time();
    }
    if (outputs_.lost() == 0) return;
    say(concat(outputs_.lost(),
               " bytes of output could not be written: ", std::strerror(outputs_.failure())));
    pass_on();
    if (result_.exit_status == 0) result_.exit_status = 125;
  }

  const LocalRun& run_;
  SignalScope signals_;
  DescriptorScope descriptors_;
  ReservedPort port_;
  RankOutputs outputs_;
  std::vector<std::string> environment_;
  std::vector<std::vector<int>> shares_;
  std::deque<Rank> ranks_;
  std::set<pid_t> older_children_;
  LocalRunResult result_;
  int start_error_ = 0;
  // Ranks that were not started any more, since the run was to end.
  int not_started_ = 0;
  int forwarded_ = 0;
  bool ending_ = false;
  bool killed_ = false;
  // A second signal arrived.
  bool at_once_ = false;
  std::int64_t begin_ns_ = 0;
  std::int64_t terminate_ns_ = 0;
  std::int64_t kill_ns_ = 0;
  std::int64_t give_up_ns_ = 0;
  // When the last of the ranks and their descendants had ended.
  std::int64_t gone_ns_ = 0;
  // When a reader of the output took something for the last time.
  std::int64_t taken_ns_ = 0;
};

}  // namespace
}  // namespace detail

LocalRunResult run_local(const LocalRun& run) {
  detail::check(run);
  return detail::Runner(run).run();
}

std::optional<int> start_local_ranks(int ranks, int argc, char** argv,
                                     const Environment& environment) {
  if (ranks < 1) throw InvalidArgument("a program was to start ", ranks, " ranks of itself");
  if (ranks == 1 || detect_launch(environment).launcher != "single") return std::nullopt;
  LocalRun run;
  run.ranks = ranks;
  // The file that runs, wherever argv[0] would be looked for.
  run.command = {"/proc/self/exe"};
  for (int i = 1; i < argc; ++i) run.command.emplace_back(argv[i]);
  return run_local(run).exit_status;
}

}  // namespace tessera
