#pragma once
// GroupState: the state that copies of a Group share, with one endpoint for each device type.
// make_group_state() makes it.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/base/pinned.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/types.h"

namespace c10d {
class ProcessGroup;
}

namespace tessera {
class Group;
}  // namespace tessera

namespace tessera::detail {

class RequestState;

/// The transport for tensors of one device type.
struct Endpoint {
  std::shared_ptr<Transport> transport;
  /// "gloo", "shm", "hosts", "mpi", "nccl", "threads".
  std::string name;
  /// Why it is this one; empty where the program named it.
  std::string reason;
  Abilities abilities;
  /// With an index: the only device whose tensors this endpoint takes.
  c10::Device device{c10::DeviceType::CPU};
};

class GroupState : Pinned {
 public:
  explicit GroupState(const GroupSpec& spec);
  ~GroupState();

  const std::string& name() const { return name_; }
  /// Global ranks in group order.
  const std::vector<int>& ranks() const { return ranks_; }
  /// This process' position in ranks().
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  GroupWatch& watch() const { return *watch_; }

  /// Sets the transport for tensors of a device type. Only before the first call.
  void set_endpoint(c10::Device device, std::shared_ptr<Transport> transport,
                    std::string reason = "");
  bool has_endpoint(c10::DeviceType device) const;
  /// Throws NotAvailable if the group has no backend for that device type.
  const Endpoint& endpoint(c10::DeviceType device) const;
  /// The store of this group alone; null where the backend needs none.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  /// True for a group that only meets at its store (GroupSpec::backend "store"). Throws CommError
  /// if it was closed.
  bool meets_at_store() const;
  /// Destroys the backends; later calls fail with CommError. The Gloo backend of a poisoned group
  /// is not destroyed: its threads may be in a call that nothing but Gloo's own limit ends, and its
  /// destructor would wait for them.
  void close();

  /// Registers a work that only its own abort() can wake (Gloo's messages): it is aborted when the
  /// group is poisoned, or at once if it is already. With a `card`, if the wait lasts long, the
  /// peer is asked whether it waits for the same message (compare()), and, for a message of a
  /// collective `call`, whether all ranks are in that call. `call` must stay valid until
  /// deregister_work().
  void register_work(c10d::Work& work, const std::optional<MessageCard>& card,
                     const CallCard* call);
  void deregister_work(c10d::Work& work);

  /// A call that no host thread waits for (a stream of its device does), with its own time limit.
  struct Guarded {
    c10::intrusive_ptr<c10d::Work> work;
    Deadline deadline;
    std::string call;
    std::uint64_t sequence = 0;
    std::chrono::milliseconds limit{0};
    bool collective = true;
  };
  /// Watches the call until it is complete; if its time limit runs out first, ends the group as a
  /// wait would.
  void guard(Guarded call);

  /// A wait longer than this is investigated: the other ranks may have called something else.
  static constexpr std::chrono::milliseconds kLong{1000};
  /// Publishes in the store that this rank has waited for long at `place` ("call 7"). `what` is
  /// compared with what other ranks publish there, and `how` is shown in errors. If another rank
  /// waits there for something else, ends the group with a MismatchError on all ranks. Returns true
  /// if this rank was the first to publish; withdraw() must follow then. Never throws.
  bool compare(const std::string& place, const std::string& how, const std::string& what) noexcept;
  /// compare() for a collective call, at call_place(sequence).
  bool compare_call(std::uint64_t sequence, const std::string& what) noexcept;
  static std::string call_place(std::uint64_t sequence);
  void withdraw(const std::string& place) noexcept;

  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  void set_timeout(std::chrono::milliseconds limit);
  CheckLevel check_level() const { return level_.load(std::memory_order_relaxed); }
  void set_check_level(CheckLevel level) { level_.store(level, std::memory_order_relaxed); }

  /// Number of collective calls begun so far. Sends, receives and exchanges are not counted: not
  /// all ranks make them.
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  std::uint64_t next_sequence() { return sequence_.fetch_add(1, std::memory_order_relaxed); }

  /// The number of the next message between this rank and `peer`, in one direction.
  std::uint64_t next_message(int peer, bool to_peer);

  /// Calls that wait for their turn (RequestState::queue()), the oldest first. All are made by one
  /// thread.
  std::deque<RequestState*>& queued() { return queued_; }

  /// The trace that records this group's calls; null while nothing is traced.
  CommTrace* trace() const { return trace_raw_.load(std::memory_order_acquire); }
  /// Attaches a trace; null detaches it. A trace that was attached stays alive as long as the
  /// group, since calls in progress may still write to it.
  void set_trace(std::shared_ptr<CommTrace> trace);

  c10::intrusive_ptr<c10d::ProcessGroup> process_group();

 private:
  struct Waiting {
    c10d::Work* work;
    // what is still to be compared
    std::optional<MessageCard> card;
    const CallCard* call = nullptr;
    // the places in the store where this rank was the first to say what it waits for
    std::vector<std::string> places;
    std::chrono::steady_clock::time_point since;
  };

  void require_open() const;
  std::string place_of(const MessageCard& card) const;
  void wake_watcher();
  void watch_waiting();
  bool look_at_guarded(std::unique_lock<std::mutex>& lock);
  bool look_at_waiting(std::unique_lock<std::mutex>& lock);

  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  std::atomic<std::int64_t> timeout_ms_;
  std::atomic<CheckLevel> level_;
  std::atomic<std::uint64_t> sequence_{0};
  Endpoint cpu_, cuda_;
  bool closed_ = false;
  bool store_alone_;
  std::mutex messages_mutex_;
  // numbers of messages per peer: received, sent
  std::vector<std::array<std::uint64_t, 2>> messages_;
  std::deque<RequestState*> queued_;
  std::mutex waiting_mutex_;
  std::vector<Waiting> waiting_;
  std::vector<Guarded> guarded_;
  // of the thread that investigates long waits; it starts with the first of them
  std::condition_variable waiting_changed_;
  bool watcher_sleeps_ = false, watcher_stops_ = false;
  std::thread watcher_;
  std::shared_ptr<GroupWatch> watch_;
  c10::intrusive_ptr<c10d::Store> store_;
  // guards traces_ and process_group_
  std::mutex mutex_;
  std::atomic<CommTrace*> trace_raw_{nullptr};
  std::vector<std::shared_ptr<CommTrace>> traces_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

/// The device for control messages: the CPU if the group has a backend for it.
c10::Device control_device(const Group& group);

}  // namespace tessera::detail
