#include "tessera/comm/job/detail/manager_state.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/host_lock.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/store/detail/job_store.h"
#include "tessera/comm/store/detail/store_server.h"

namespace tessera::detail {
namespace {

// After a fault, the other ranks may still ask who is missing, through the store that rank 0
// serves.
constexpr std::chrono::seconds kLingerAfterFault{3};

// Another rank knew of a failure before this one, and has ended the making of a group.
constexpr std::chrono::seconds kNewsOfFailure{5};

constexpr auto kMeetingTag = "plans";

/// The prefix of a group's keys in the job's store; its keys follow a slash, which no name has.
std::string store_key_of(const std::string& group) { return "group/" + group; }

}  // namespace

ManagerState::ManagerState(ManagerBase base)
    : base_(std::move(base)), level_(base_.options.check_level) {
  base_.options.timeout = bounded_limit(base_.options.timeout);
  if (base_.rendezvous) {
    base_.store = base_.rendezvous->store;
    base_.address = base_.rendezvous->address;
    base_.faults = base_.rendezvous->connection;
  }
  if (base_.faults)
    base_.faults->listen(
        {[this](const std::string& group, const Poison& poison) { this->poison(group, poison); },
         [this](int rank, bool on_purpose, const std::string& text) {
           lost(rank, on_purpose, text);
         },
         [this](const std::string& group) { return position(group); }});
}

ManagerState::~ManagerState() {
  const WithoutHostLock released;  // an interpreter may be what drops the last mesh
  // While an exception unwinds the stack, the other ranks must not wait for this one.
  const bool unwinding = std::uncaught_exceptions() > 0;
  if (unwinding)
    for (const auto& group : all_made()) group->watch->announce("it ended with an exception");
  shutdown();
  {
    const std::lock_guard lock(delayed_mutex_);
    reporter_stops_ = true;
    delayed_changed_.notify_all();
  }
  if (reporter_.joinable()) reporter_.join();
  if (base_.faults) base_.faults->listen({});
  if (!base_.rendezvous || !base_.rendezvous->connection) return;
  const std::chrono::milliseconds linger =
      unwinding || fault_ ? kLingerAfterFault : base_.options.timeout;
  if (base_.rendezvous->server) base_.rendezvous->server->set_linger(linger);
  base_.rendezvous->connection->leave();
}

std::string name_of_ranks(const std::vector<int>& ranks, int world_size) {
  bool whole = static_cast<int>(ranks.size()) == world_size;
  for (std::size_t i = 0; whole && i < ranks.size(); ++i) whole = ranks[i] == static_cast<int>(i);
  if (whole) return "world";
  std::string name;
  if (ranks.size() <= 8) {
    for (const int rank : ranks) name += concat(name.empty() ? "ranks " : "-", rank);
    return name;
  }
  Hash hash;
  for (const int rank : ranks) hash.number(static_cast<std::uint64_t>(rank));
  return concat(ranks.size(), " ranks ", ranks[0], "-", ranks[1], "-..-", ranks.back(), " #",
                std::hex, hash.value());
}

std::string ManagerState::name_of(const Key& key, int round, std::uint64_t failures) const {
  const auto& [ranks, backend, limit, tag] = key;
  std::string name = name_of_ranks(ranks, base_.launch.world_size);
  if (!backend.empty() && backend != base_.backend) name += concat(" over ", backend);
  if (limit != base_.options.timeout.count()) name += concat(" within ", limit, " ms");
  if (!tag.empty()) name += concat(" of ", tag);
  if (round > 0) name += concat(" ~", round);
  if (failures > 0) name += concat(" after failure ", failures);
  return name;
}

void ManagerState::check_members(const std::vector<int>& ranks) const {
  if (ranks.empty())
    throw InvalidArgument("a group of no ranks was asked for; name at least this rank");
  if (std::ranges::find(ranks, base_.launch.rank) == ranks.end())
    throw InvalidArgument("rank ", base_.launch.rank, " asked for the group of ranks ", list(ranks),
                          ", which it does not belong to; a group is made by its members alone");
  auto sorted = ranks;
  std::ranges::sort(sorted);
  if (sorted.front() < 0 || sorted.back() >= base_.launch.world_size)
    throw InvalidArgument("a group of ranks ", list(ranks), " in a world of ",
                          base_.launch.world_size, "; ranks are 0 to ",
                          base_.launch.world_size - 1);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
    throw InvalidArgument("the group of ranks ", list(ranks), " names rank ", *twice,
                          " more than once; name each rank once");
}

std::shared_ptr<GroupState> ManagerState::group(const std::vector<int>& ranks,
                                                const GroupOptions& options,
                                                const std::string& tag) {
  const auto limit = bounded_limit(options.timeout.value_or(base_.options.timeout));
  const Key key{ranks, options.backend == base_.backend ? "" : options.backend, limit.count(), tag};
  std::shared_ptr<Made> slot;
  std::vector<std::pair<int, std::string>> left;
  std::optional<Poison> known;
  {
    const std::lock_guard lock(mutex_);
    if (!made_.contains(key)) check_members(ranks);
    auto& found = made_[key];
    if (!found) {
      found = std::make_shared<Made>();
      found->watch =
          std::make_shared<GroupWatch>(name_of(key, rounds_[key]++, failures_.count(ranks)), ranks,
                                       base_.launch.rank, base_.faults);
      order_.push_back(found);
      if (const auto early = early_.find(found->watch->group()); early != early_.end())
        known = early->second;
      for (const auto& [rank, how] : lost_) {
        if (std::ranges::find(ranks, rank) == ranks.end()) continue;
        if (how.first)
          left.emplace_back(rank, how.second);
        else if (!known)
          known = Poison{{rank}, how.second, false};
      }
      if (const auto due = failures_.due_failure(ranks); due && !known)
        known = poison_of(due->first, due->second);
    }
    slot = found;
  }
  // Without the lock, since the watch may act at once.
  for (const auto& [rank, text] : left) slot->watch->note_left(rank, text);
  if (known) slot->watch->set_poison(*known);
  const std::lock_guard making(slot->making);
  if (!slot->state) {
    // After a failure the same name is not tried again: what the first try left in the store would
    // mislead it.
    slot->watch->require_healthy("its creation", GroupWatch::creation);
    slot->state = make(key, slot->watch);
  }
  return slot->state;
}

std::shared_ptr<GroupState> ManagerState::meeting_place() {
  const bool at_store = base_.store && met_at_store(base_.backend);
  return group(numbers_below(base_.launch.world_size), {}, at_store ? kMeetingTag : "");
}

std::shared_ptr<GroupState> ManagerState::make(const Key& key,
                                               const std::shared_ptr<GroupWatch>& watch) {
  const auto& [ranks, backend, limit, tag] = key;
  GroupSpec spec;
  spec.name = watch->group();
  spec.ranks = ranks;
  spec.rank = static_cast<int>(std::ranges::find(ranks, base_.launch.rank) - ranks.begin());
  spec.backend = tag == kMeetingTag ? "store" : backend.empty() ? base_.backend : backend;
  spec.device = base_.device;
  spec.address = base_.address;
  spec.timeout = std::chrono::milliseconds(limit);
  spec.watch = watch;
  spec.mpi = base_.mpi;
  spec.between = base_.options.between_hosts;
  {
    const std::lock_guard lock(mutex_);
    spec.check_level = level_;
    spec.trace = trace_;
  }
  std::function<void()> interrupt;
  if (base_.store) {
    auto store = base_.store->clone();
    store->setTimeout(spec.timeout);
    if (auto* job_store = dynamic_cast<JobStore*>(store.get()))
      interrupt = [keep = store, job_store] { job_store->interrupt(); };
    spec.store = c10::make_intrusive<c10d::PrefixStore>(store_key_of(spec.name), std::move(store));
  }
  try {
    if (base_.make_group)
      if (auto made = base_.make_group(spec)) return made;
    // MPI needs its calls on one thread, and has a time limit of its own.
    if (met_at_store(spec.backend) && ranks.size() > 1)
      return make_group_in_time(spec, std::move(interrupt));
    watch->set_interrupt(std::move(interrupt), GroupWatch::Of::creation);
    return make_group_state(spec);
  } catch (const PeerLostError& error) {
    // The watch knows which rank ended the group, and why, or will soon.
    if (error.ranks().empty() && watch->await_news(kNewsOfFailure))
      watch->require_healthy("its creation", GroupWatch::creation);
    throw;
  } catch (const TimeoutError&) {
    throw;
  } catch (const NotAvailable&) {
    throw;
  } catch (const InvalidArgument&) {
    throw;
  } catch (...) {
    watch->fail("its creation", GroupWatch::creation, std::current_exception(), spec.timeout);
  }
}

void ManagerState::shutdown() {
  std::vector<std::shared_ptr<Made>> made;
  {
    const std::lock_guard lock(mutex_);
    made.swap(order_);
    made_.clear();
    if (!made.empty()) generation_.fetch_add(1, std::memory_order_acq_rel);
  }
  for (; !made.empty(); made.pop_back()) {
    Made& last = *made.back();
    const std::lock_guard making(last.making);
    if (const Poison* poison = last.watch->poison(); poison && !poison->on_throw) {
      const std::lock_guard lock(mutex_);
      fault_ = true;
    }
    if (last.state) last.state->close();
    last.watch->set_interrupt({});
    last.watch->set_interrupt({}, GroupWatch::Of::creation);
    forget_keys(*last.watch);
  }
}

// Removes the keys by which the members of a group found each other in the job's store.
void ManagerState::forget_keys(const GroupWatch& watch) const {
  if (!base_.rendezvous || !base_.rendezvous->connection) return;
  const auto& members = watch.members();
  if (members.size() < 2) return;
  // Two members of a large group name all of them: if all did, the bytes would grow with the square
  // of the size.
  constexpr std::size_t kSmall = 64;
  const int rank = base_.launch.rank;
  const bool names = members.size() <= kSmall || rank == members[0] || rank == members[1];
  base_.rendezvous->connection->forget(store_key_of(watch.group()) + "/", members.size(),
                                       names ? members : std::vector<int>());
}

std::shared_ptr<GroupWatch> ManagerState::watch(const std::string& group) const {
  const std::lock_guard lock(mutex_);
  for (const auto& made : order_)
    if (made->watch->group() == group) return made->watch;
  return nullptr;
}

std::vector<std::shared_ptr<ManagerState::Made>> ManagerState::all_made() const {
  const std::lock_guard lock(mutex_);
  return order_;
}

std::uint64_t ManagerState::failures(const std::vector<int>& ranks) const {
  const std::lock_guard lock(mutex_);
  return failures_.count(ranks);
}

std::vector<std::shared_ptr<GroupState>> ManagerState::groups() const {
  std::vector<std::shared_ptr<GroupState>> states;
  for (const auto& group : all_made()) {
    const std::lock_guard making(group->making);
    if (group->state) states.push_back(group->state);
  }
  return states;
}

void ManagerState::set_check_level(CheckLevel level) {
  {
    const std::lock_guard lock(mutex_);
    level_ = level;
  }
  for (const auto& state : groups()) state->set_check_level(level);
}

void ManagerState::set_trace(std::shared_ptr<CommTrace> trace) {
  {
    const std::lock_guard lock(mutex_);
    trace_ = trace;
  }
  for (const auto& state : groups()) state->set_trace(trace);
}

std::vector<std::shared_ptr<GroupWatch>> ManagerState::retire_within(
    const std::vector<int>& ranks) {
  std::vector<std::shared_ptr<GroupWatch>> retired;
  for (auto at = made_.begin(); at != made_.end();) {
    const auto& members = std::get<0>(at->first);
    if (members.size() < 2 || !is_within(members, ranks)) {
      ++at;
      continue;
    }
    retired.push_back(at->second->watch);
    at = made_.erase(at);
  }
  // The count of failures is part of the new names, and the same on all members.
  std::erase_if(rounds_,
                [&](const auto& round) { return is_within(std::get<0>(round.first), ranks); });
  generation_.fetch_add(1, std::memory_order_acq_rel);
  return retired;
}

void ManagerState::fail_within(std::vector<int> ranks, const std::string& reason) {
  std::ranges::sort(ranks);
  const int rank = base_.launch.rank;
  Poison poison;
  poison.ranks = {rank};
  poison.reason = concat("rank ", rank, " failed: ", reason);
  std::optional<Failure> failure;
  std::vector<std::shared_ptr<GroupWatch>> retired;
  {
    const std::lock_guard lock(mutex_);
    failure = failures_.begin(ranks);
    retired = retire_within(ranks);
  }
  if (failure && base_.faults) base_.faults->announce(failure->name(), ranks, poison);
  poison.on_throw = [] {};  // this rank has an error of its own
  for (const auto& watch : retired) watch->set_poison(poison);
}

Poison ManagerState::poison_of(const Failure& failure, Poison news) {
  // The watch may outlive the manager.
  news.on_throw = [self = weak_from_this(), failure] {
    const auto manager = self.lock();
    if (!manager) return;
    const std::lock_guard lock(manager->mutex_);
    if (manager->failures_.mark_thrown(failure)) manager->retire_within(failure.ranks);
  };
  return news;
}

// An error that all ranks meet is thrown by each where it meets it, though the first rank is ahead:
// the others are told only when they had time to get there.
void ManagerState::hear_failure(const Failure& failure, const Poison& poison) {
  {
    const std::lock_guard lock(mutex_);
    if (!failures_.hear(failure, poison)) return;
  }
  const std::lock_guard lock(delayed_mutex_);
  if (reporter_stops_) return;
  delayed_.emplace_back(std::chrono::steady_clock::now() + std::chrono::milliseconds(300), failure);
  if (!reporter_.joinable()) reporter_ = std::thread([this] { report_due_failures(); });
  delayed_changed_.notify_all();
}

// Before a rank that failed is found to be gone, reports what it said about that.
void ManagerState::tell_failures_now() {
  decltype(delayed_) all;
  {
    const std::lock_guard lock(delayed_mutex_);
    all.swap(delayed_);
  }
  for (const auto& [at, failure] : all) tell_failure(failure);
}

void ManagerState::report_due_failures() {
  std::unique_lock lock(delayed_mutex_);
  while (!reporter_stops_) {
    if (delayed_.empty()) {
      delayed_changed_.wait(lock);
    } else if (const auto due = delayed_.front().first; due > std::chrono::steady_clock::now()) {
      // A copy: while this waits, others empty the list.
      delayed_changed_.wait_until(lock, due);
    } else {
      const Failure failure = std::move(delayed_.front().second);
      delayed_.pop_front();
      lock.unlock();
      tell_failure(failure);
      lock.lock();
    }
  }
}

// The groups stay until a call throws: asking for a group is not a call.
void ManagerState::tell_failure(const Failure& failure) {
  std::vector<std::shared_ptr<GroupWatch>> concerned;
  std::optional<Poison> news;
  {
    const std::lock_guard lock(mutex_);
    news = failures_.make_due(failure);
    if (!news) return;
    for (const auto& [key, made] : made_) {
      const auto& members = std::get<0>(key);
      if (members.size() > 1 && is_within(members, failure.ranks)) concerned.push_back(made->watch);
    }
  }
  for (const auto& watch : concerned) watch->set_poison(poison_of(failure, *news));
}

void ManagerState::poison(const std::string& group, const Poison& poison) {
  if (const auto failure = Failure::of_name(group)) return hear_failure(*failure, poison);
  tell_failures_now();
  std::vector<std::shared_ptr<GroupWatch>> concerned;
  {
    const std::lock_guard lock(mutex_);
    fault_ = true;
    for (const auto& made : order_)
      if (group.empty() || made->watch->group() == group) concerned.push_back(made->watch);
    if (!group.empty() && concerned.empty()) early_.emplace(group, poison);
    if (group.empty())
      for (const int rank : poison.ranks) lost_.emplace(rank, std::pair(false, poison.reason));
  }
  for (const auto& watch : concerned) watch->set_poison(poison);
}

void ManagerState::lost(int rank, bool on_purpose, const std::string& text) {
  tell_failures_now();
  std::vector<std::shared_ptr<GroupWatch>> concerned;
  {
    const std::lock_guard lock(mutex_);
    if (!on_purpose) fault_ = true;
    lost_.emplace(rank, std::pair(on_purpose, text));
    for (const auto& made : order_) {
      const auto& members = made->watch->members();
      if (std::ranges::find(members, rank) != members.end()) concerned.push_back(made->watch);
    }
  }
  for (const auto& watch : concerned)
    if (on_purpose)
      watch->note_left(rank, text);
    else
      watch->set_poison({{rank}, text, false});
}

std::optional<Position> ManagerState::position(const std::string& group) const {
  const auto watch = this->watch(group);
  return watch ? std::optional(watch->position()) : std::nullopt;
}

}  // namespace tessera::detail
