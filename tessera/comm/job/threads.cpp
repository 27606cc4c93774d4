#include "tessera/comm/job/threads.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/threads/threads_transport.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/job/detail/manager_state.h"

namespace tessera::detail {

// What the ranks of one run share: the rooms of their groups, and their managers, which report
// faults to each other.
struct ThreadsHub {
  struct Member {
    std::map<std::string, int> rounds;
    FaultChannel::Listener listener;
    bool left = false;
    std::vector<std::pair<std::string, Poison>> news;  // from before it had a listener
  };
  explicit ThreadsHub(int ranks) : members(ranks) {}
  int size() const { return static_cast<int>(members.size()); }

  std::mutex mutex;
  std::optional<Poison> failed;  // for every group: the first rank that failed
  std::vector<Member> members;
  std::map<std::pair<std::string, int>, std::shared_ptr<ThreadsRoom>> rooms;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
};

// One rank's way to the others.
class HubChannel final : public FaultChannel {
 public:
  HubChannel(std::shared_ptr<ThreadsHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  // The room of the group that this rank is making. A group made again (after shutdown) is a new
  // room, so each rank's count is part of the key.
  std::shared_ptr<ThreadsRoom> room(const std::string& name, const std::vector<int>& ranks) const {
    const std::lock_guard lock(hub_->mutex);
    const int round = hub_->members[rank_].rounds[name]++;
    auto& room = hub_->rooms[{name, round}];
    if (!room) room = make_threads_room(name, ranks);
    return room;
  }

  void listen(Listener listener) override {
    const std::lock_guard lock(hub_->mutex);
    ThreadsHub::Member& member = hub_->members[rank_];
    member.listener = std::move(listener);
    member.left = !member.listener.poisoned;
    if (member.left) return;
    for (const auto& [group, poison] : std::exchange(member.news, {}))
      member.listener.poisoned(group, poison);
    // a rank that enters late must not wait for one that has failed
    const auto& failed = hub_->failed;
    if (failed && *failed->ranks.begin() != rank_) member.listener.poisoned("", *failed);
  }

  // `group` empty: every group. Under the lock, so that a rank that leaves is not called
  // afterwards.
  void announce(const std::string& group, const std::vector<int>& to,
                const Poison& poison) noexcept override {
    const std::lock_guard lock(hub_->mutex);
    if (group.empty() && !hub_->failed) hub_->failed = poison;
    for (const int rank : to) {
      ThreadsHub::Member& member = hub_->members[rank];
      if (rank == rank_ || member.left) continue;
      if (member.listener.poisoned)
        member.listener.poisoned(group, poison);
      else if (!group.empty())  // it has not entered yet
        member.news.emplace_back(group, poison);
    }
  }
  // The rank's manager may live on, and answers roll calls then.
  void leave() const {
    const std::lock_guard lock(hub_->mutex);
    hub_->members[rank_].left = true;
  }

  std::vector<RollEntry> roll_call(const std::string& group, const std::vector<int>& ranks,
                                   std::chrono::milliseconds) noexcept override {
    using Answer = RollEntry::Answer;
    const std::lock_guard lock(hub_->mutex);
    return mapped(ranks, [&](int rank) {
      // A rank without the group answers too: it is alive and has made no call.
      const auto& position = hub_->members[rank].listener.position;
      return RollEntry{rank, position ? Answer::here : Answer::gone,
                       position ? position(group).value_or(Position()) : Position()};
    });
  }

 private:
  const std::shared_ptr<ThreadsHub> hub_;
  const int rank_;
};

}  // namespace tessera::detail

namespace tessera {
namespace {

using detail::GroupSpec;
using detail::GroupState;
using detail::HubChannel;
using detail::ManagerState;
using detail::ThreadsHub;

DistributedManager make_manager(const std::shared_ptr<ThreadsHub>& hub, int rank,
                                const ManagerOptions& options) {
  detail::ManagerBase base;
  base.options = options;
  base.backend = options.backend.empty() ? "threads" : options.backend;
  base.launch.launcher = "threads";
  base.launch.rank = base.launch.local_rank = rank;
  base.launch.world_size = base.launch.local_size = hub->size();
  const auto channel = std::make_shared<HubChannel>(hub, rank);
  base.faults = channel;
  if (base.backend == "threads") {
    base.make_group = [channel](const GroupSpec& spec) {
      auto state = std::make_shared<GroupState>(spec);
      if (spec.ranks.size() > 1) {
        state->set_endpoint(c10::DeviceType::CPU,
                            detail::make_threads_transport(
                                channel->room(spec.name, spec.ranks), spec.rank,
                                static_cast<int>(spec.ranks.size()), spec.watch, spec.timeout));
      }
      return state;
    };
  } else {
    base.store = hub->store;
    base.address = "127.0.0.1";
  }
  return DistributedManager(std::make_shared<ManagerState>(std::move(base)));
}

// Rethrows with the rank in the message, as the same type if it is a tessera::Error.
[[noreturn]] void rethrow_with_rank(const std::exception_ptr& error, int rank) {
  const std::string where = concat("rank ", rank, ": ");
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError& e) {
    throw TimeoutError(where + e.what(), e.missing());
  } catch (const PeerFailedError& e) {
    throw PeerFailedError(where + e.what(), e.ranks());
  } catch (const PeerLostError& e) {
    throw PeerLostError(where + e.what(), e.ranks());
  } catch (const MismatchError& e) {
    throw MismatchError(where + e.what());
  } catch (const CommError& e) {
    throw CommError(where + e.what());
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(where + e.what());
  } catch (const ConfigurationError& e) {
    throw ConfigurationError(where + e.what());
  } catch (const NotAvailable& e) {
    throw NotAvailable(where + e.what());
  } catch (const Error& e) {
    throw Error(where + e.what());
  }
}

}  // namespace

struct ThreadRanks::State {
  State(int ranks, ManagerOptions options)
      : hub(std::make_shared<ThreadsHub>(ranks)),
        options(std::move(options)),
        cast_cache_before(static_cast<std::size_t>(ranks)) {}
  std::shared_ptr<ThreadsHub> hub;
  ManagerOptions options;
  // For each rank that has entered: whether its thread had autocast's cache on. Each rank uses its
  // own entry only.
  std::vector<std::optional<bool>> cast_cache_before;
};

ThreadRanks::ThreadRanks(int ranks, const ManagerOptions& options) {
  if (ranks < 1)
    throw InvalidArgument("run_threads was asked for ", ranks, " ranks; at least 1 is needed");
  if (!options.backend.empty() && options.backend != "threads" && options.backend != "gloo" &&
      options.backend != "shm" && options.backend != "auto") {
    throw InvalidArgument(
        "run_threads with backend '", options.backend,
        "': ranks that are threads of one process can use 'threads', 'gloo', 'shm' or 'auto'");
  }
  state_ = std::make_shared<State>(ranks, options);
}

int ThreadRanks::size() const { return state_->hub->size(); }

DistributedManager ThreadRanks::enter(int rank) const {
  if (rank < 0 || rank >= size())
    throw InvalidArgument("rank ", rank, " of ", size(), " ranks as threads");
  auto manager = make_manager(state_->hub, rank, state_->options);
  // libtorch has one cache of autocast's results per process: the rank that leaves its region first
  // would clear it under the others, which would then differ in what they reduce. Whether it is
  // used is set per thread.
  auto& before = state_->cast_cache_before[rank];
  if (!before) before = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(false);
  return manager;
}

void ThreadRanks::fail(int rank, const std::string& what) const {
  HubChannel(state_->hub, rank)
      .announce("", numbers_below(size()),
                {{rank}, concat("rank ", rank, " threw: ", what), false});
}

void ThreadRanks::leave(int rank) const {
  HubChannel(state_->hub, rank).leave();
  auto& before = state_->cast_cache_before[rank];
  if (before) at::autocast::set_autocast_cache_enabled(*before);
  before.reset();
}

void run_threads(int ranks, const std::function<void(DistributedManager&)>& body,
                 const ManagerOptions& options) {
  const ThreadRanks all(ranks, options);
  std::mutex mutex;
  std::exception_ptr first;
  int first_rank = -1;
  const auto note = [&](int rank) {
    const std::lock_guard lock(mutex);
    if (first) return;
    first = std::current_exception();
    first_rank = rank;
  };

  auto run = [&](int rank) {
    try {
      auto manager = all.enter(rank);
      try {
        body(manager);
      } catch (...) {
        note(rank);
        std::string what = "an exception of unknown type";
        try {
          throw;
        } catch (const std::exception& e) {
          what = e.what();
        } catch (...) {  // keeps the text above
        }
        all.fail(rank, what);
      }
      all.leave(rank);
    } catch (...) {
      note(rank);
    }
  };

  // No rank begins before all have a thread: the system may have too few.
  std::promise<bool> all_started;
  const std::shared_future<bool> begin = all_started.get_future().share();
  std::vector<std::thread> threads;
  std::string problem;
  try {
    threads.reserve(static_cast<std::size_t>(ranks));
    for (int rank = 1; rank < ranks; ++rank)
      threads.emplace_back([&run, begin, rank] {
        if (begin.get()) run(rank);
      });
  } catch (const std::exception& error) {  // std::system_error, std::bad_alloc
    problem =
        concat("run_threads was asked for ", ranks, " ranks, and the system gave only ",
               threads.size() + 1, " threads (", error.what(),
               "); ask for fewer, or raise the limits of processes and memory (ulimit -u, -v)");
  }
  all_started.set_value(problem.empty());
  if (problem.empty()) run(0);
  for (auto& thread : threads) thread.join();
  if (!problem.empty()) throw Error(problem);
  if (first) rethrow_with_rank(first, first_rank);
}

}  // namespace tessera
