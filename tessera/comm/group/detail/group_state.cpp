#include "tessera/comm/group/detail/group_state.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/internal/any_thread.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/store/detail/job_store.h"

namespace tessera::detail {
namespace {

// Errors while a group ends are dropped: nothing more can be done to wake its callers, whose own
// limits end them.
template <class F>
void quietly(F&& body) {
  try {
    body();
  } catch (...) {
  }
}

// The store, with a short limit if a call may wait for a server: a rank that waits for a collective
// has a time limit of its own to keep.
c10::intrusive_ptr<c10d::Store> at_once(const c10::intrusive_ptr<c10d::Store>& store) {
  constexpr std::chrono::milliseconds kAtOnce{1000};
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (!prefixed || !dynamic_cast<JobStore*>(prefixed->getUnderlyingStore().get())) return store;
  auto quick = store->clone();
  quick->setTimeout(kAtOnce);
  return quick;
}

}  // namespace

GroupState::GroupState(const GroupSpec& spec)
    : name_(spec.name),
      ranks_(spec.ranks),
      rank_(spec.rank),
      timeout_ms_(0),
      level_(spec.check_level),
      store_alone_(spec.backend == "store"),
      watch_(spec.watch),
      store_(spec.store) {
  set_timeout(spec.timeout);
  if (spec.trace) set_trace(spec.trace);
  watch_->set_interrupt([this] {
    for (Endpoint* endpoint : {&cpu_, &cuda_}) {
      if (!endpoint->transport) continue;
      // This thread answers for the rank.
      if (endpoint->abilities.aborts_slowly)
        std::thread([slow = endpoint->transport] { quietly([&] { slow->abort(); }); }).detach();
      else
        quietly([&] { endpoint->transport->abort(); });
    }
    const std::lock_guard lock(waiting_mutex_);
    for (const auto& waiting : waiting_) waiting.work->abort();
  });
}

GroupState::~GroupState() { close(); }

void GroupState::close() {
  if (closed_) return;
  closed_ = true;
  {
    const std::lock_guard lock(waiting_mutex_);
    watcher_stops_ = true;
  }
  waiting_changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  watch_->set_interrupt({});
  process_group_.reset();
  for (Endpoint* endpoint : {&cpu_, &cuda_}) {
    // c10d's destructor aborts what is still on the streams of a sound group.
    if (endpoint->abilities.aborts_slowly)
      quietly([&] {
        watch_->poison() ? endpoint->transport->abort() : endpoint->transport->shutdown();
      });
    // on purpose never freed
    if (endpoint->abilities.may_hang && watch_->poison())
      new std::shared_ptr<Transport>(endpoint->transport);
    *endpoint = {};
  }
}

void GroupState::register_work(c10d::Work& work, const std::optional<MessageCard>& card,
                               const CallCard* call) {
  const std::lock_guard lock(waiting_mutex_);
  auto& entry = waiting_.emplace_back();
  entry.work = &work;
  if (watch_->poison()) work.abort();
  if (!card || !store_) return;
  entry.card = card;
  entry.call = card->of_call ? call : nullptr;
  entry.since = std::chrono::steady_clock::now();
  wake_watcher();
}

void GroupState::guard(Guarded call) {
  const std::lock_guard lock(waiting_mutex_);
  guarded_.push_back(std::move(call));
  wake_watcher();
}

// To be called with the lock held.
void GroupState::wake_watcher() {
  if (!watcher_.joinable() && !watcher_stops_) watcher_ = std::thread([this] { watch_waiting(); });
  if (watcher_sleeps_) waiting_changed_.notify_one();
}

void GroupState::deregister_work(c10d::Work& work) {
  std::vector<std::string> places;
  {
    const std::lock_guard lock(waiting_mutex_);
    const auto entry =
        std::ranges::find_if(waiting_, [&](const Waiting& w) { return w.work == &work; });
    if (entry == waiting_.end()) return;
    places = std::move(entry->places);
    waiting_.erase(entry);
  }
  for (const auto& place : places) withdraw(place);
}

std::string GroupState::place_of(const MessageCard& card) const {
  const int from = card.sends ? rank_ : card.peer, to = card.sends ? card.peer : rank_;
  return concat(card.of_call ? "call " : "message ", card.number, " from rank ", ranks_[from],
                " to rank ", ranks_[to]);
}

void GroupState::watch_waiting() {
  std::unique_lock lock(waiting_mutex_);
  while (!watcher_stops_) {
    if (look_at_guarded(lock) || look_at_waiting(lock)) continue;
    const bool idle = guarded_.empty() && std::ranges::none_of(waiting_, [](const Waiting& w) {
                        return w.card.has_value();
                      });
    watcher_sleeps_ = idle;
    if (idle)
      waiting_changed_.wait(lock);
    else
      waiting_changed_.wait_for(lock, kLong / 4);
    watcher_sleeps_ = false;
  }
}

// True if there was something to do, for which the lock was released.
bool GroupState::look_at_guarded(std::unique_lock<std::mutex>& lock) {
  std::erase_if(guarded_, [](const Guarded& call) { return call.work->isCompleted(); });
  const auto late = std::ranges::find_if(guarded_, [](const Guarded& call) {
    return call.deadline <= std::chrono::steady_clock::now();
  });
  if (late == guarded_.end()) return false;
  const auto call = *late;
  // The group ends here.
  guarded_.clear();
  lock.unlock();
  quietly([&] { watch_->expire(call.call, call.sequence, call.limit, call.collective); });
  lock.lock();
  return true;
}

bool GroupState::look_at_waiting(std::unique_lock<std::mutex>& lock) {
  const auto long_ago = std::chrono::steady_clock::now() - kLong;
  const auto lasting = std::ranges::find_if(
      waiting_, [&](const Waiting& w) { return w.card && w.since <= long_ago; });
  if (lasting == waiting_.end()) return false;
  const auto* work = lasting->work;
  const MessageCard card = *std::exchange(lasting->card, std::nullopt);
  const auto call = lasting->call ? lasting->call->text() : std::string();
  lock.unlock();
  std::vector<std::string> places;
  const auto place = place_of(card);
  if (compare(place, concat(card.sends ? "sends " : "waits for ", place, ": "), card.text()))
    places.push_back(place);
  // A rank that called something else waits for the call, not for this message of it.
  if (!call.empty() && compare_call(card.number, call)) places.push_back(call_place(card.number));
  lock.lock();
  const auto entry =
      std::ranges::find_if(waiting_, [&](const Waiting& w) { return w.work == work; });
  if (entry != waiting_.end()) {
    entry->places = std::move(places);
  } else {
    lock.unlock();
    for (const auto& said : places) withdraw(said);
    lock.lock();
  }
  return true;
}

std::string GroupState::call_place(std::uint64_t sequence) { return concat("call ", sequence); }

bool GroupState::compare_call(std::uint64_t sequence, const std::string& what) noexcept {
  const auto place = call_place(sequence);
  return compare(place, concat("waits in ", place, ": "), what);
}

bool GroupState::compare(const std::string& place, const std::string& how,
                         const std::string& what) noexcept {
  if (!store_ || watch_->poison()) return false;
  try {
    const auto mine = concat(what, '\n', ranks_[rank_], '\n', how);
    const auto found = at_once(store_)->compareSet(concat("waits/", place), "", mine);
    const auto cut = found.find('\n'), end = found.find('\n', cut + 1);
    if (found == mine || end == std::string::npos) return found == mine;
    if (found.substr(0, cut) == what) return false;
    const auto other = found.substr(cut + 1, end - cut - 1);
    Poison poison;
    poison.mismatch = true;
    poison.reason = mismatch_text({{std::stoi(other), found.substr(end + 1) + found.substr(0, cut)},
                                   {ranks_[rank_], how + what}},
                                  MismatchAt::under_way);
    watch_->spread(std::move(poison));
  } catch (const std::exception&) {
    // The store is gone or slow: the call's own limit ends the wait.
  }
  return false;
}

void GroupState::withdraw(const std::string& place) noexcept {
  try {
    at_once(store_)->deleteKey(concat("waits/", place));
  } catch (const std::exception&) {
    // one more key in a store that ends with the job
  }
}

std::uint64_t GroupState::next_message(int peer, bool to_peer) {
  const std::lock_guard lock(messages_mutex_);
  if (messages_.empty()) messages_.resize(ranks_.size());
  return messages_[peer][to_peer ? 1 : 0]++;
}

void GroupState::set_timeout(std::chrono::milliseconds limit) {
  if (limit.count() <= 0)
    throw InvalidArgument("group '", name_, "': a time limit of ", limit.count(),
                          " ms was given; it must be positive");
  timeout_ms_.store(bounded_limit(limit).count(), std::memory_order_relaxed);
}

void GroupState::set_endpoint(c10::Device device, std::shared_ptr<Transport> transport,
                              std::string reason) {
  // One besides the CPU's: CUDA, or a device that another library brings.
  Endpoint& endpoint = device.is_cpu() ? cpu_ : cuda_;
  if (endpoint.transport && endpoint.device.type() != device.type())
    throw InvalidArgument("group '", name_, "' serves ", endpoint.device, " and the CPU, ",
                          "and no third kind of device: ", device);
  endpoint.device = device;
  endpoint.abilities = transport->abilities();
  endpoint.name = transport->name();
  endpoint.reason = std::move(reason);
  endpoint.transport = std::move(transport);
}

bool GroupState::has_endpoint(c10::DeviceType device) const {
  const Endpoint& endpoint = device == c10::DeviceType::CPU ? cpu_ : cuda_;
  return endpoint.transport && endpoint.device.type() == device;
}

void GroupState::require_open() const {
  if (closed_) throw CommError("group '", name_, "' was shut down; get it again from the manager");
}

bool GroupState::meets_at_store() const {
  if (store_alone_) require_open();
  return store_alone_;
}

const Endpoint& GroupState::endpoint(c10::DeviceType device) const {
  if (has_endpoint(device)) return device == c10::DeviceType::CPU ? cpu_ : cuda_;
  require_open();
  throw NotAvailable(
      "group '", name_, "' has no backend for ", c10::DeviceTypeName(device),
      " tensors (it has: ", cpu_.transport ? "CPU over " : "no CPU", cpu_.name,
      cuda_.transport ? concat(", ", c10::DeviceTypeName(cuda_.device.type()), " over ") : "",
      cuda_.name,
      "). Move the tensor to a device the group serves, or build and choose "
      "a backend for it (tessera doctor lists them)");
}

void GroupState::set_trace(std::shared_ptr<CommTrace> trace) {
  const std::lock_guard lock(mutex_);
  trace_raw_.store(trace.get(), std::memory_order_release);
  if (trace) traces_.push_back(std::move(trace));
}

c10::intrusive_ptr<c10d::ProcessGroup> GroupState::process_group() {
  const std::lock_guard lock(mutex_);
  if (!process_group_) {
    auto store =
        store_ ? store_ : c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>());
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank_, size());
    for (const Endpoint* endpoint : {&cpu_, &cuda_})
      if (endpoint->transport)
        group->setBackend(endpoint->device.type(),
                          c10d::ProcessGroup::strToBackendType(endpoint->name),
                          endpoint->transport->backend());
    if (cpu_.transport) group->setDefaultBackend(c10d::ProcessGroup::strToBackendType(cpu_.name));
    group->setGroupName(name_);
    process_group_ = std::move(group);
  }
  return process_group_;
}

}  // namespace tessera::detail

namespace tessera {

bool any_thread_may_call(const Group& group) {
  const auto& state = *group.state();
  return !state.has_endpoint(c10::DeviceType::CPU) ||
         state.endpoint(c10::DeviceType::CPU).abilities.any_thread;
}

}  // namespace tessera
