#include "tessera/launch/detail/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/launch/detail/process_tree.h"

namespace tessera::detail {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const auto& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

void send_report(int control, SupervisorReport::Kind kind, int value) {
  const SupervisorReport report{kind, value, monotonic_ns()};
  while (send(control, &report, sizeof report, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

struct RankPipes {
  int out = -1;
  int err = -1;
};

// Runs in the rank's process, up to exec. Returns errno.
int become_rank(const RankCommand& command, const RankPipes& pipes, pid_t supervisor,
                const sigset_t& mask, const struct sigaction& pipe_action) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (getppid() != supervisor) _exit(1);  // The supervisor died between fork and prctl.
  if (setpgid(0, 0) != 0) return errno;
  const int null = open("/dev/null", O_RDONLY);
  if (null < 0 || dup2(null, 0) < 0 || dup2(pipes.out, 1) < 0 || dup2(pipes.err, 2) < 0)
    return errno;
  if (null > 2) close(null);
  if (!command.cpus.empty()) {
    const int size = *std::ranges::max_element(command.cpus) + 1;
    cpu_set_t* set = CPU_ALLOC(size);
    const std::size_t bytes = CPU_ALLOC_SIZE(size);
    CPU_ZERO_S(bytes, set);
    for (int cpu : command.cpus) CPU_SET_S(cpu, bytes, set);
    if (sched_setaffinity(0, bytes, set) != 0) return errno;
  }
  if (command.descriptors.rlim_max > 0) setrlimit(RLIMIT_NOFILE, &command.descriptors);
  const auto arguments = pointers(command.arguments);
  const auto environment = pointers(command.environment);
  sigaction(SIGPIPE, &pipe_action, nullptr);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execvpe(arguments[0], arguments.data(), environment.data());
  return errno;
}

// Forks the rank; 0 and the errno in `failure` if it could not start.
pid_t start_rank(const RankCommand& command, const RankPipes& pipes, const sigset_t& mask,
                 const struct sigaction& pipe_action, int* failure) {
  int verdict[2];  // Closed by exec; otherwise carries errno.
  if (pipe2(verdict, O_CLOEXEC) != 0) {
    *failure = errno;
    return 0;
  }
  const pid_t self = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    const int error = become_rank(command, pipes, self, mask, pipe_action);
    if (write(verdict[1], &error, sizeof error) < 0) _exit(126);
    _exit(127);
  }
  *failure = pid < 0 ? errno : 0;
  close(verdict[1]);
  if (pid > 0) {
    setpgid(pid, pid);  // Both sides do it, so that the group exists whichever comes first.
    int error = 0;
    ssize_t size;
    while ((size = read(verdict[0], &error, sizeof error)) < 0 && errno == EINTR) {
    }
    if (size == sizeof error) *failure = error;
  }
  close(verdict[0]);
  if (*failure && pid > 0) waitpid(pid, nullptr, 0);
  return *failure ? 0 : pid;
}

class Supervisor {
 public:
  Supervisor(int control, int signals, pid_t rank, std::int64_t grace_ms)
      : control_(control), signals_(signals), rank_(rank), grace_ms_(grace_ms) {}

  void run() {
    while (reap()) {
      pollfd fds[2] = {{control_, POLLIN, 0}, {signals_, POLLIN, 0}};
      if (launcher_gone_) fds[0].fd = -1;
      const int ready = poll(fds, 2, wait_ms());
      if (ready > 0 && fds[0].revents) read_commands();
      if (ready > 0 && fds[1].revents) read_signals();
      if (deadline_ns_ && monotonic_ns() >= deadline_ns_) killing_ = true;
      if (killing_ && !kill_all()) return;
    }
  }

 private:
  // False if descendants are left that cannot be seen (no /proc), so that waiting for their end
  // could last for ever.
  bool kill_all() {
    if (signal_descendants(getpid(), SIGKILL) > 0) {
      unseen_since_ns_ = 0;
      return true;
    }
    if (group_) kill(-group_, SIGKILL);
    const std::int64_t now = monotonic_ns();
    if (unseen_since_ns_ == 0) unseen_since_ns_ = now;
    return now - unseen_since_ns_ < unseen_limit_ns;
  }

  void signal_rank(int signal) {
    if (!rank_) return;
    kill(-rank_, signal);
    // A stopped process receives a signal that ends it once it continues.
    if (signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT)
      kill(-rank_, SIGCONT);
  }

  int wait_ms() const {
    if (killing_) return 20;  // What was forked during the last sweep is found by the next.
    if (!deadline_ns_) return -1;
    return static_cast<int>(
        std::max<std::int64_t>(0, (deadline_ns_ - monotonic_ns()) / 1000000 + 1));
  }

  // False once no child, and so no descendant, is left.
  bool reap() {
    for (;;) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG);
      if (pid == 0) return true;
      if (pid < 0 && errno == EINTR) continue;
      if (pid < 0) return false;
      if (pid == rank_) {
        rank_ = 0;
        send_report(control_, SupervisorReport::ended, status);
        // Processes that outlive their rank are ended too.
        signal_descendants(getpid(), SIGTERM);
        signal_descendants(getpid(), SIGCONT);
        if (!deadline_ns_) deadline_ns_ = monotonic_ns() + grace_ms_ * 1000000;
      }
    }
  }

  void read_commands() {
    for (;;) {
      SupervisorCommand command;
      const ssize_t size = recv(control_, &command, sizeof command, MSG_DONTWAIT);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno == EAGAIN) return;
      if (size != sizeof command) {
        launcher_gone_ = true;
        killing_ = true;
        return;
      }
      if (command.kind == SupervisorCommand::kill_all) killing_ = true;
      if (command.kind == SupervisorCommand::forward) signal_rank(command.signal);
    }
  }

  void read_signals() {
    signalfd_siginfo info;
    while (read(signals_, &info, sizeof info) == static_cast<ssize_t>(sizeof info))
      if (info.ssi_signo != SIGCHLD) signal_rank(static_cast<int>(info.ssi_signo));
  }

  // How long descendants are waited for that /proc does not show.
  static constexpr std::int64_t unseen_limit_ns = 3'000'000'000;

  int control_;
  int signals_;
  pid_t rank_;
  // The rank's process group, which may outlive it.
  pid_t group_ = rank_;
  std::int64_t unseen_since_ns_ = 0;
  std::int64_t grace_ms_;
  std::int64_t deadline_ns_ = 0;
  bool killing_ = false;
  bool launcher_gone_ = false;
};

[[noreturn]] void supervise(const RankCommand& command, const RankPipes& pipes, int control,
                            const sigset_t& mask, const struct sigaction& pipe_action) {
  setsid();
  prctl(PR_SET_NAME, "tessera-keeper");
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  signal(SIGCHLD, SIG_DFL);  // An inherited SIG_IGN would make the system reap the children itself.
  sigset_t watched;
  sigemptyset(&watched);
  for (int signal : {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT}) sigaddset(&watched, signal);
  sigprocmask(SIG_BLOCK, &watched, nullptr);
  const int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  int failure = signals < 0 ? errno : 0;
  const pid_t rank = failure ? 0 : start_rank(command, pipes, mask, pipe_action, &failure);
  // Its own copies of the pipes and of the terminal would keep readers waiting.
  close(pipes.out);
  close(pipes.err);
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd = 0; null >= 0 && fd < 3; ++fd) dup2(null, fd);
  if (rank == 0) {
    send_report(control, SupervisorReport::not_started, failure);
    _exit(0);
  }
  send_report(control, SupervisorReport::started, rank);
  Supervisor(control, signals, rank, command.grace_ms).run();
  _exit(0);
}

void close_all(std::initializer_list<int> fds) {
  for (int fd : fds)
    if (fd >= 0) close(fd);
}

}  // namespace

std::int64_t monotonic_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

SupervisedRank start_supervised(const RankCommand& command, const std::vector<int>& inherited,
                                const sigset_t& mask, const struct sigaction& pipe_action) {
  int control[2] = {-1, -1};
  int out[2] = {-1, -1};
  int err[2] = {-1, -1};
  pid_t pid = -1;
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) == 0 &&
      pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0)
    pid = fork();
  if (pid == 0) {
    for (int fd : inherited) close(fd);
    close_all({control[0], out[0], err[0]});
    supervise(command, {out[1], err[1]}, control[1], mask, pipe_action);
  }
  const int error = errno;
  close_all({control[1], out[1], err[1]});
  if (pid < 0) {
    close_all({control[0], out[0], err[0]});
    throw Error("cannot start a process: ", std::strerror(error),
                " (see ulimit -u and ulimit -n: a rank takes two processes and four descriptors)");
  }
  for (int fd : {control[0], out[0], err[0]}) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  return {pid, control[0], out[0], err[0]};
}

}  // namespace tessera::detail
