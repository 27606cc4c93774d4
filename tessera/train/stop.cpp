#include "tessera/train/stop.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>

extern char** environ;

namespace tessera {

namespace {

// A signal belongs to the process: these are its handlers' state, and a handler reaches no other.
std::atomic<unsigned char> received_stop{0};
static_assert(std::atomic<unsigned char>::is_always_lock_free);

extern "C" void note_stop(int number) {
  const auto stop = static_cast<unsigned char>(number == SIGTERM ? Stop::terminated : Stop::usr1);
  unsigned char before = received_stop.load(std::memory_order_relaxed);
  while (before < stop && !received_stop.compare_exchange_weak(before, stop)) {
  }
}

struct Handlers {
  std::mutex mutex;
  int users = 0;
  struct sigaction before[2];
};

Handlers& stop_handlers() {
  static Handlers all;
  return all;
}

constexpr int kStopSignals[] = {SIGTERM, SIGUSR1};

}  // namespace

std::string to_string(Stop stop) {
  constexpr const char* names[] = {"none", "requested", "SIGUSR1", "SIGTERM"};
  const auto i = static_cast<std::size_t>(stop);
  return i < std::size(names) ? names[i] : "?";
}

StopSignals::StopSignals() {
  Handlers& all = stop_handlers();
  const std::lock_guard lock(all.mutex);
  if (all.users++ > 0) return;
  received_stop = 0;
  for (int i = 0; i < 2; ++i) {
    struct sigaction action{};
    action.sa_handler = note_stop;
    action.sa_flags = SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(kStopSignals[i], nullptr, &all.before[i]);
    if (all.before[i].sa_handler != SIG_IGN) ::sigaction(kStopSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  Handlers& all = stop_handlers();
  const std::lock_guard lock(all.mutex);
  if (--all.users > 0) return;
  for (int i = 0; i < 2; ++i) ::sigaction(kStopSignals[i], &all.before[i], nullptr);
}

Stop StopSignals::received() const {
  return static_cast<Stop>(received_stop.load(std::memory_order_relaxed));
}

PeriodicVote::PeriodicVote(Strategy& strategy, std::chrono::milliseconds interval)
    : strategy_(strategy), interval_(interval), last_(std::chrono::steady_clock::now()) {}

bool PeriodicVote::poll(bool mine) {
  mine_ = mine_ || mine;
  if (stopped_) return true;
  if (strategy_.size() == 1) return stopped_ = mine_;
  if (++calls_since_ < due_in_) return false;
  const auto now = std::chrono::steady_clock::now();
  const double pace = std::chrono::duration<double, std::milli>(now - last_).count() / calls_since_;
  const auto all = strategy_.reduced({mine_ ? 1.0 : 0.0, pace}, ReduceOp::max);
  ++votes_;
  const double slowest = std::max(all[1], 1e-3);
  const double calls = std::clamp(static_cast<double>(interval_.count()) / slowest, 1.0, 1e6);
  // Not much more than before, since the pace may have been measured while nothing was to do.
  due_in_ = std::min(static_cast<std::uint64_t>(calls), 2 * due_in_);
  calls_since_ = 0;
  last_ = now;
  return stopped_ = all[0] > 0;
}

void requeue_slurm_job(const std::string& job_id) {
  const bool plain = !job_id.empty() && std::ranges::all_of(job_id, [](char c) {
    return (c >= '0' && c <= '9') || c == '_';
  });
  if (!plain)
    throw InvalidArgument("'", job_id, "' is no identifier of a Slurm job to be requeued");
  std::string command = "scontrol", verb = "requeue", id = job_id;
  char* words[] = {command.data(), verb.data(), id.data(), nullptr};
  pid_t child = 0;
  const int problem = ::posix_spawnp(&child, command.c_str(), nullptr, nullptr, words, environ);
  if (problem != 0) throw Error("scontrol requeue ", job_id, ": ", std::strerror(problem));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) throw Error("scontrol requeue ", job_id, ": ", std::strerror(errno));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw Error("scontrol requeue ", job_id, " failed with status ",
                WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

}  // namespace tessera
