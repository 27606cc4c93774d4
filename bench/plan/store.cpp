// A real server, and as many connections as ranks, held by one forked process that speaks the
// protocol by events. What they say is what ranks say: the hello, the comparison of a plan, and
// where they listen, for one group of eight each.

#include "store.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/store/detail/store_server.h"

namespace tessera::bench {
namespace {

using detail::Frame;
using detail::Reader;
using detail::Secret;
using detail::Socket;
using detail::StoreServer;
using detail::Writer;
using Clock = std::chrono::steady_clock;

constexpr int kGroup = 8;
constexpr std::size_t kAddress = 120;  // bytes that Gloo publishes

/// Seconds that pass, and that the processors work for both ends.
struct Phase {
  double passed = 0, worked = 0;
};

struct Phases {
  Phase meeting, agreement, groups;
  double operations = 0, bytes = 0;  // of all ranks
};

/// Of this process and its parent, which is the store's: seconds since boot and of the processors.
class Watch {
 public:
  Phase now() const {
    std::ifstream file(concat("/proc/", parent_, "/stat"));
    std::string text;
    std::getline(file, text);
    std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
    std::string skipped;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    double user = 0, system = 0;
    fields >> user >> system;
    return {std::chrono::duration<double>(Clock::now().time_since_epoch()).count(),
            processor_seconds() + (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK))};
  }
  Phase since(const Phase& begin) const {
    const Phase end = now();
    return {end.passed - begin.passed, end.worked - begin.worked};
  }

 private:
  pid_t parent_ = getppid();
};

class Ranks {
 public:
  Ranks(int world, int port, Secret secret) : world_(world), secret_(std::move(secret)) {
    epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
    ranks_.resize(static_cast<std::size_t>(world));
    const Phase begin = watch_.now();
    for (int r = 0; r < world; ++r) {
      auto& rank = ranks_[static_cast<std::size_t>(r)];
      rank.socket =
          detail::connect_to("127.0.0.1", port, false, Clock::now() + std::chrono::minutes(1));
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.u32 = static_cast<std::uint32_t>(r);
      epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, rank.socket.fd(), &event);
      say(rank, std::string(detail::store_magic));
      handle(0);  // the store does not wait for the last one to connect, so neither do the first
    }
    until([this] { return ready_ == world_; });
    phases_.meeting = watch_.since(begin);
  }

  Phases run() {
    phases_.operations = phases_.bytes = 0;
    phases_.agreement = timed(0);
    phases_.groups = timed(1);
    return phases_;
  }

 private:
  struct Rank {
    Socket socket;
    std::string in;
    bool greeted = false;
    std::string fields;
    int step = 0;
  };

  void say(Rank& rank, const std::string& bytes) {
    phases_.bytes += static_cast<double>(bytes.size());
    detail::send_all(rank.socket, bytes.data(), bytes.size(),
                     Clock::now() + std::chrono::minutes(1));
  }
  template <class Fill>
  void call(Rank& rank, Frame kind, Fill fill) {
    phases_.operations += 1;
    Writer out(kind, 1);
    fill(out);
    say(rank, out.take());
  }

  /// What rank r does next in a phase; false when it is through. `reply` answers the step before.
  bool next(int r, Reader* reply) {
    auto& rank = ranks_[static_cast<std::size_t>(r)];
    const auto one_key = [](const std::string& key) {
      return [key](Writer& out) { out.number(std::uint32_t{1}).text(key); };
    };
    const auto add = [](const std::string& key) {
      return [key](Writer& out) { out.text(key).number(std::int64_t{1}); };
    };
    if (phase_ == 0) switch (rank.step++) {  // agree_at_store()
        case 0:
          return call(rank, Frame::add, add("plans/value")), true;
        case 1:
          return call(rank, Frame::add, add("plans/here")), true;
        case 2:
          if (reply->number<std::int64_t>() == world_)
            call(rank, Frame::set,
                 [](Writer& out) { out.number(std::uint32_t{1}).text("plans/verdict").text("1"); });
          else
            call(rank, Frame::wait, one_key("plans/verdict"));
          return true;
        case 3:
          return call(rank, Frame::get, one_key("plans/verdict")), true;
        case 4:
          return call(rank, Frame::add, add("plans/read")), true;
        default:
          return false;
      }
    const int first = r / kGroup * kGroup, last = std::min(first + kGroup, world_);
    if (const int step = rank.step++; step == 0) {
      call(rank, Frame::set, [&](Writer& out) {
        out.number(std::uint32_t{1})
            .text(concat("group/", first, "/", r))
            .text(std::string(kAddress, 'x'));
      });
    } else if (const int other = first + (step - 1) / 2; other < last) {
      // Gloo waits for each member's address, and reads it.
      call(rank, step % 2 ? Frame::wait : Frame::get, one_key(concat("group/", first, "/", other)));
    } else {
      return false;
    }
    return true;
  }

  Phase timed(int phase) {
    phase_ = phase;
    through_ = 0;
    const Phase begin = watch_.now();
    for (int r = 0; r < world_; ++r) {
      ranks_[static_cast<std::size_t>(r)].step = 0;
      next(r, nullptr);
    }
    until([this] { return through_ == world_; });
    return watch_.since(begin);
  }

  void take(int r, Reader in) {
    auto& rank = ranks_[static_cast<std::size_t>(r)];
    if (in.kind == Frame::challenge) {
      in.number<std::uint8_t>();
      in.text();
      const std::string store_nonce(in.text()), nonce(32, '0');
      const std::int64_t limit = 60'000;
      auto hello = detail::hello_fields(r, world_, limit, "process 1 on host", "", nonce);
      rank.fields = Writer(hello).take();
      say(rank, hello.text(detail::rank_proof(secret_, store_nonce, rank.fields)).take());
    } else if (in.kind == Frame::ready) {
      ++ready_;
    } else if (in.kind == Frame::reply) {
      if (!next(r, &in)) ++through_;
    } else if (in.kind != Frame::welcome) {
      std::_Exit(3);
    }
  }

  void handle(int wait_ms) {
    epoll_event events[256];
    const int n = epoll_wait(epoll_.fd(), events, 256, wait_ms);
    for (int i = 0; i < n; ++i) {
      const int r = static_cast<int>(events[i].data.u32);
      auto& rank = ranks_[static_cast<std::size_t>(r)];
      char part[4096];
      const auto got = ::recv(rank.socket.fd(), part, sizeof part, MSG_DONTWAIT);
      if (got <= 0) std::_Exit(2);
      phases_.bytes += static_cast<double>(got);
      rank.in.append(part, static_cast<std::size_t>(got));
      if (!rank.greeted && rank.in.size() >= detail::store_magic.size()) {
        rank.in.erase(0, detail::store_magic.size());
        rank.greeted = true;
      }
      std::uint32_t size;
      while (rank.greeted && rank.in.size() >= sizeof size) {
        std::memcpy(&size, rank.in.data(), sizeof size);
        if (rank.in.size() < sizeof size + size) break;
        const std::string frame = rank.in.substr(sizeof size, size);
        rank.in.erase(0, sizeof size + size);
        take(r, Reader(frame));
      }
    }
  }
  template <class Condition>
  void until(Condition holds) {
    while (!holds()) handle(1000);
  }

  const Watch watch_;
  int world_;
  Secret secret_;
  Socket epoll_;
  std::vector<Rank> ranks_;
  Phases phases_;
  int ready_ = 0, through_ = 0, phase_ = 0;
};

double resident_kib() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_maxrss);
}

}  // namespace

void store_at_scale(Report& report) {
  // A process holds one end of each connection; both have the same limit.
  const std::size_t limit = detail::allow_descriptors(10'000 + 1'000);
  const int world = static_cast<int>(std::min<std::size_t>(10'000, limit - 1'000));
  const Secret secret = Secret::given(new_secret());
  Socket listener = detail::listen_on("127.0.0.1", 0);
  const int port = detail::local_port(listener);
  int ends[2];
  if (::pipe(ends) != 0) return;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    Ranks ranks(world, port, secret);
    const Phases phases = ranks.run();
    [[maybe_unused]] const auto written = ::write(ends[1], &phases, sizeof phases);
    ::_exit(0);
  }
  ::close(ends[1]);
  Phases phases;
  const double memory_before = resident_kib(), cpu_before = processor_seconds();
  bool ended = false;
  {
    const StoreServer server(std::move(listener), world, "", secret);
    ended = ::read(ends[0], &phases, sizeof phases) == static_cast<ssize_t>(sizeof phases);
    int status = 0;
    ::waitpid(child, &status, 0);
  }
  ::close(ends[0]);
  const double cpu = processor_seconds() - cpu_before;
  const std::string name = concat("the job's store, ", world, " ranks");
  const auto add = [&](const char* metric, double value, const char* unit, double most = 0) {
    Record r{.name = name, .metric = metric, .value = value, .unit = unit, .reference = ""};
    if (most > 0) {
      r.limit = most;
      r.holds = ended && value <= most;
    }
    report.add(r);
  };
  const double ranks = world;
  // Seconds that pass are for the reader; those of the processors do not depend on what else runs.
  const auto phase = [&](const char* metric, const char* worked, const Phase& of, double most) {
    add(metric, of.passed, "s");
    add(worked, of.worked, "s", most);
  };
  phase("all ranks met", "all ranks met, work of both ends", phases.meeting, 20);
  phase("all ranks compared a plan", "all ranks compared a plan, work of both ends",
        phases.agreement, 10);
  phase("all ranks made a group of 8", "all ranks made a group of 8, work of both ends",
        phases.groups, 20);
  add("operations a rank", phases.operations / ranks, "");
  add("bytes a rank, both ways", phases.bytes / ranks, "B");
  add("operations served", phases.operations / (phases.agreement.passed + phases.groups.passed),
      "1/s");
  add("processor time of rank 0", cpu, "s");
  add("memory of rank 0, a rank", (resident_kib() - memory_before) / ranks, "KiB");
  // Where rank 0 becomes the bottleneck. A rank's operations do not grow with the world, so beyond
  // this world the start takes longer in proportion, and nothing else does.
  add("ranks that make a group each within a minute",
      60 * ranks / std::max(phases.groups.passed, 1e-9), "");
}

}  // namespace tessera::bench
