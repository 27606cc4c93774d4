#include "tessera/launch/local_run.h"

#include <errno.h>
#include <fcntl.h>
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
#include <filesystem>
#include <iomanip>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/cores.h"
#include "tessera/launch/detail/output.h"
#include "tessera/launch/detail/process_tree.h"
#include "tessera/launch/detail/run_scope.h"
#include "tessera/launch/detail/supervisor.h"

namespace tessera {
namespace detail {
namespace {

// Above this the ranks wait for the launcher's reader.
constexpr std::size_t max_backlog = 1 << 20;
constexpr std::size_t last_lines_kept = 12;
constexpr std::size_t last_line_width = 400;

std::string system_error(const std::string& what) {
  return concat(what, ": ", std::strerror(errno));
}

std::string describe(int status) {
  if (WIFSIGNALED(status))
    return concat("signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return concat("exit code ", WEXITSTATUS(status));
}

int exit_code(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

struct Stream {
  int fd = -1;
  int log = -1;
  LineSplitter splitter;
  std::deque<std::string> last;
};

struct Rank {
  SupervisedRank process;
  Stream streams[2];  // Output, error.
  std::string prefix;
  LineSpool spool;
  bool ended = false;  // The rank itself.
  bool gone = false;   // Its supervisor too, and so everything below it.
  bool lost = false;   // The supervisor died before it could say how the rank ended.
  int status = 0;
  std::int64_t ended_ns = 0;
  bool finished() const { return gone && streams[0].fd < 0 && streams[1].fd < 0; }
};

class Runner {
 public:
  explicit Runner(const LocalRun& run) : run_(run), out_(run.out), err_(run.err) {
    if (run.command.empty()) throw InvalidArgument("run_local: no program to run");
    if (run.ranks < 1)
      throw InvalidArgument(concat("run_local: ", run.ranks, " ranks; at least 1 is needed"));
    if (run.threads < LocalRun::automatic)
      throw InvalidArgument(
          concat("run_local: ", run.threads, " threads; give automatic, off or a number"));
    for (double seconds : {run.timeout, run.grace, run.linger}) {
      if (!(seconds >= 0 && seconds < 1e9))
        throw InvalidArgument(concat("run_local: ", seconds, " s is no time; give 0 to 1e9"));
    }
    shared_sink_ = out_.same_file(err_);
    for (pid_t pid : children(getpid())) older_children_.insert(pid);
  }

  LocalRunResult run() {
    begin_ns_ = monotonic_ns();
    prepare();
    for (int r = 0; r < run_.ranks; ++r) start(r);
    while (!done()) step();
    report();
    finish_output();
    return result_;
  }

  ~Runner() {
    for (Rank& rank : ranks_) {
      for (Stream& s : rank.streams) {
        if (s.fd >= 0) close(s.fd);
        if (s.log >= 0) close(s.log);
      }
      if (rank.process.control >= 0) close(rank.process.control);
      // The closed socket ends it and all below it.
      if (!rank.gone && rank.process.supervisor > 0) waitpid(rank.process.supervisor, nullptr, 0);
    }
  }

 private:
  OutputStream& sink(int channel) { return channel == 1 && !shared_sink_ ? err_ : out_; }
  std::string seconds_since_begin(std::int64_t now_ns) const {
    TextStream out;
    out << std::fixed << std::setprecision(2) << static_cast<double>(now_ns - begin_ns_) / 1e9
        << " s";
    return out.str();
  }
  void say(const std::string& text) { sink(1).put("tessera: ", text); }

  void prepare() {
    const CpuBudget budget = cpu_budget();
    const int usable = budget.usable();
    if (run_.ranks > usable) {
      say(concat(run_.ranks, " ranks on ", usable, usable == 1 ? " core" : " cores",
                 ": ranks take turns, so times measured in this run say little"));
    }
    if (run_.bind) shares_ = share_cpus(budget.cpus, run_.ranks);
    if (!run_.log_folder.empty()) {
      std::error_code error;
      std::filesystem::create_directories(run_.log_folder, error);
      if (error)
        throw Error(
            concat("cannot make the log folder '", run_.log_folder, "': ", error.message()));
    }
    winsize size{};
    const bool terminal = err_.is_terminal() && ioctl(run_.err, TIOCGWINSZ, &size) == 0;
    environment_ = shared_environment(run_, usable, port_.port(), terminal ? size.ws_col : 0);
  }

  int open_log(int r, const char* ending) {
    const std::string path = concat(run_.log_folder, "/rank-", r, ending);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) throw Error(system_error(concat("cannot write the log file '", path, "'")));
    return fd;
  }

  void start(int r) {
    ranks_.emplace_back();
    Rank& rank = ranks_.back();
    if (!run_.log_folder.empty()) {
      rank.streams[0].log = open_log(r, ".out");
      rank.streams[1].log = open_log(r, ".err");
    }
    RankCommand command;
    command.arguments = run_.command;
    command.environment = environment_;
    for (const char* name : {"TESSERA_RANK", "TESSERA_LOCAL_RANK", "RANK", "LOCAL_RANK"})
      command.environment.push_back(concat(name, "=", r));
    if (run_.bind) command.cpus = shares_[r];
    command.grace_ms = static_cast<std::int64_t>(run_.grace * 1000);
    std::vector<int> mine{signals_.fd(), port_.fd()};
    for (const Rank& other : ranks_) {
      for (int fd : {other.process.control, other.streams[0].fd, other.streams[1].fd,
                     other.streams[0].log, other.streams[1].log}) {
        if (fd >= 0) mine.push_back(fd);
      }
    }
    rank.process = start_supervised(command, mine, signals_.mask(), signals_.pipe_action());
    rank.streams[0].fd = rank.process.out;
    rank.streams[1].fd = rank.process.err;
    const int width = static_cast<int>(std::to_string(run_.ranks - 1).size());
    TextStream prefix;
    prefix << '[' << std::setw(width) << r << "] ";
    rank.prefix = prefix.str();
    for (int channel = 0; channel < 2; ++channel)
      rank.streams[channel].splitter = LineSplitter(sink(channel).is_terminal());
  }

  bool done() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& r) { return r.finished() && r.spool.empty(); });
  }

  void step() {
    std::vector<pollfd> fds;
    fds.push_back({signals_.fd(), POLLIN, 0});
    const bool reading = out_.backlog() < max_backlog && err_.backlog() < max_backlog;
    for (Rank& rank : ranks_) {
      if (rank.process.control >= 0) fds.push_back({rank.process.control, POLLIN, 0});
      for (Stream& s : rank.streams) {
        if (s.fd >= 0 && reading) fds.push_back({s.fd, POLLIN, 0});
      }
    }
    for (const OutputStream* s : {&out_, &err_}) {
      if (s->pending()) fds.push_back({s->fd(), POLLOUT, 0});
    }
    poll(fds.data(), fds.size(), wait_ms());
    read_reports();
    read_signals();
    reap();
    for (std::size_t r = 0; r < ranks_.size(); ++r) read_output(static_cast<int>(r));
    if (run_.output == LocalRun::Output::by_rank) release_spools();
    out_.flush();
    err_.flush();
    if (out_.broken() && !broken_noted_) {
      broken_noted_ = true;
      end_ranks(141);
    }
    check_time();
  }

  int wait_ms() const {
    if (spools_stopped_ && !out_.pending() && !err_.pending()) return 0;
    std::int64_t next = 0;
    for (std::int64_t at : {timeout_ns(), terminate_ns_, kill_ns_, give_up_ns_}) {
      if (at > 0 && (next == 0 || at < next)) next = at;
    }
    if (next == 0) return -1;
    return static_cast<int>(
        std::clamp<std::int64_t>((next - monotonic_ns()) / 1000000 + 1, 0, 60000));
  }

  std::int64_t timeout_ns() const {
    return run_.timeout > 0 && !ending_ ? begin_ns_ + static_cast<std::int64_t>(run_.timeout * 1e9)
                                        : 0;
  }

  void check_time() {
    const std::int64_t now = monotonic_ns();
    if (timeout_ns() > 0 && now >= timeout_ns()) {
      result_.timed_out = true;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (!ranks_[r].ended) result_.still_running.push_back(static_cast<int>(r));
      }
      end_ranks(124);
    }
    if (terminate_ns_ > 0 && now >= terminate_ns_) {
      terminate_ns_ = 0;
      forward(SIGTERM);
      kill_ns_ = now + static_cast<std::int64_t>(run_.grace * 1e9);
    }
    if (kill_ns_ > 0 && now >= kill_ns_) kill_all();
    if (give_up_ns_ > 0 && now >= give_up_ns_) {
      // A process that survives SIGKILL hangs in the kernel; its supervisor stays and ends it when
      // it can.
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (ranks_[r].finished()) continue;
        say(concat("rank ", r,
                   " does not end even on SIGKILL (it hangs inside the system); not waiting for it "
                   "any longer"));
        abandon(ranks_[r]);
      }
    }
  }

  void abandon(Rank& rank) {
    for (Stream& s : rank.streams) end_stream(s);
    rank.ended = rank.gone = true;
  }

  // Begins the end of every rank: SIGTERM now or after `linger`, SIGKILL `grace` later. The first
  // cause decides the exit status.
  void end_ranks(int status, double linger = 0) {
    if (ending_) return;
    ending_ = true;
    result_.exit_status = status;
    terminate_ns_ = monotonic_ns() + static_cast<std::int64_t>(linger * 1e9);
  }

  void forward(int signal) { command(SupervisorCommand{SupervisorCommand::forward, signal}); }

  void kill_all() {
    kill_ns_ = terminate_ns_ = 0;
    give_up_ns_ = monotonic_ns() + 10'000'000'000;
    for (const Rank& rank : ranks_) killed_ = killed_ || !rank.ended;
    command(SupervisorCommand{SupervisorCommand::kill_all, SIGKILL});
  }

  void command(const SupervisorCommand& command) {
    for (const Rank& rank : ranks_) {
      if (rank.process.control >= 0)
        send(rank.process.control, &command, sizeof command, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  void read_signals() {
    signalfd_siginfo info;
    while (read(signals_.fd(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) continue;
      if (signal == SIGUSR1 || signal == SIGUSR2) {
        forward(signal);
      } else if (forwarded_ || killed_) {
        out_.drop();  // Whoever asks twice does not wait for a reader either.
        kill_all();
      } else {
        forwarded_ = signal;
        ending_ = true;
        terminate_ns_ = 0;
        say(concat("got signal ", signal, " (", strsignal(signal),
                   "); passing it on, and killing what is left after ", run_.grace, " s"));
        forward(signal);
        if (kill_ns_ == 0) kill_ns_ = monotonic_ns() + static_cast<std::int64_t>(run_.grace * 1e9);
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
    std::stable_sort(just_ended.begin(), just_ended.end(),
                     [&](int a, int b) { return ranks_[a].ended_ns < ranks_[b].ended_ns; });
    for (int r : just_ended) note_end(r);
  }

  void note_end(int r) {
    Rank& rank = ranks_[r];
    if (rank.status == 0 && !rank.lost) return;
    // After a time limit, a closed output or a program that cannot be started, the ranks end
    // because of us.
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
      read_reports();  // Its last words came before its end.
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

  // The children of a supervisor that was killed are ours now.
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
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [&](const Rank& r) { return r.process.supervisor == pid; });
  }

  void read_output(int r) {
    Rank& rank = ranks_[r];
    for (int channel = 0; channel < 2; ++channel) {
      Stream& s = rank.streams[channel];
      if (s.fd < 0 || sink(channel).backlog() >= max_backlog) continue;
      char buffer[65536];
      const ssize_t size = read(s.fd, buffer, sizeof buffer);
      if (size > 0) {
        if (s.log >= 0) write_log(r, s, buffer, static_cast<std::size_t>(size));
        emit(r, channel, s.splitter.add({buffer, static_cast<std::size_t>(size)}));
      } else if (size == 0 || (errno != EAGAIN && errno != EINTR) || rank.gone) {
        // Whoever still holds the pipe after the rank and its descendants are gone is none of ours.
        emit(r, channel, s.splitter.finish());
        end_stream(s);
      }
    }
  }

  void write_log(int r, Stream& s, const char* data, std::size_t size) {
    while (size > 0) {
      const ssize_t written = write(s.log, data, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) {
        say(concat("cannot write the log of rank ", r, " any more: ", std::strerror(errno)));
        close(s.log);
        s.log = -1;
        return;
      }
      data += written;
      size -= static_cast<std::size_t>(written);
    }
  }

  void end_stream(Stream& s) {
    if (s.fd >= 0) close(s.fd);
    s.fd = -1;
  }

  void emit(int r, int channel, std::vector<LineSplitter::Line> lines) {
    Rank& rank = ranks_[r];
    const bool waits =
        run_.output == LocalRun::Output::by_rank && (r > turn_ || !rank.spool.empty());
    for (LineSplitter::Line& line : lines) {
      if (waits) {
        if (line.end == '\n') rank.spool.put(channel, line.text);
      } else {
        sink(channel).put(rank.prefix, line.text, line.end);
      }
      if (line.end != '\n' || line.text.empty()) continue;
      auto& last = rank.streams[channel].last;
      last.push_back(line.text.size() > last_line_width
                         ? line.text.substr(0, last_line_width) + " ..."
                         : std::move(line.text));
      if (last.size() > last_lines_kept) last.pop_front();
    }
  }

  void release_spools() {
    auto full = [&] { return out_.backlog() >= max_backlog || err_.backlog() >= max_backlog; };
    for (;;) {
      const int last = static_cast<int>(ranks_.size()) - 1;
      LineSpool::Item item;
      while (!full() && ranks_[turn_].spool.get(&item)) {
        sink(item.channel).put(ranks_[turn_].prefix, item.text);
      }
      spools_stopped_ = full();
      if (spools_stopped_ || turn_ >= last || !ranks_[turn_].finished()) return;
      ++turn_;
    }
  }

  void report() {
    std::vector<int> others;
    if (start_error_) {
      say(concat("cannot start '", run_.command[0], "': ", std::strerror(start_error_)));
    } else if (result_.timed_out) {
      say(concat("the time limit of ", run_.timeout, " s was reached; still running: ranks ",
                 list(result_.still_running)));
      for (int r : result_.still_running) last_lines(r, 3);
    } else if (result_.first_failed >= 0) {
      const Rank& first = ranks_[result_.first_failed];
      say(concat(run_.ranks > 1 ? "first failure: rank " : "rank ", result_.first_failed, ": ",
                 how(first), " after ", seconds_since_begin(first.ended_ns)));
      last_lines(result_.first_failed, last_lines_kept);
    }
    if (broken_noted_) say("the reader of the output went away; the ranks were ended");
    if (killed_ && !start_error_)
      say(concat("ranks that did not end within ", run_.grace, " s were killed"));
  }

  void last_lines(int r, std::size_t count) {
    for (int channel : {1, 0}) {
      const auto& lines = ranks_[r].streams[channel].last;
      if (lines.empty()) continue;
      say(concat("last lines of rank ", r, " on its standard ", channel ? "error:" : "output:"));
      for (std::size_t i = lines.size() > count ? lines.size() - count : 0; i < lines.size(); ++i)
        sink(1).put("  | ", lines[i]);
    }
  }

  void finish_output() {
    while (out_.pending() || err_.pending()) {
      pollfd fds[3] = {{signals_.fd(), POLLIN, 0},
                       {out_.pending() ? out_.fd() : -1, POLLOUT, 0},
                       {err_.pending() ? err_.fd() : -1, POLLOUT, 0}};
      poll(fds, 3, -1);
      signalfd_siginfo info;
      while (read(signals_.fd(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        if (info.ssi_signo == SIGCHLD || info.ssi_signo == SIGUSR1 || info.ssi_signo == SIGUSR2)
          continue;
        if (result_.exit_status == 0) result_.exit_status = 128 + static_cast<int>(info.ssi_signo);
        return;
      }
      out_.flush();
      err_.flush();
    }
  }

  const LocalRun& run_;
  SignalScope signals_;
  ReservedPort port_;
  OutputStream out_;
  OutputStream err_;
  bool shared_sink_ = false;
  std::vector<std::string> environment_;
  std::vector<std::vector<int>> shares_;
  std::deque<Rank> ranks_;
  std::set<pid_t> older_children_;
  LocalRunResult result_;
  int turn_ = 0;  // The rank whose lines go out at once, for Output::by_rank.
  int start_error_ = 0;
  int forwarded_ = 0;
  bool ending_ = false;
  bool killed_ = false;
  bool broken_noted_ = false;
  bool spools_stopped_ = false;  // Kept lines wait for the reader of the output.
  std::int64_t begin_ns_ = 0;
  std::int64_t terminate_ns_ = 0;
  std::int64_t kill_ns_ = 0;
  std::int64_t give_up_ns_ = 0;
};

}  // namespace
}  // namespace detail

LocalRunResult run_local(const LocalRun& run) { return detail::Runner(run).run(); }

}  // namespace tessera
