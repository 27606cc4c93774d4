#pragma once
// GroupState: what the copies of a Group share. make_group_state() makes it, one endpoint for each
// device type.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/detail/uneven.h"
#include "tessera/comm/group/types.h"

namespace c10d {
class ProcessGroup;
}

namespace tessera::detail {

class RequestState;

/// A backend of the group and what it can do.
struct Endpoint {
  c10::intrusive_ptr<c10d::Backend> backend;
  /// "gloo", "mpi", "nccl", "threads".
  std::string name;
  /// Null where the backend has no such collectives.
  UnevenBackend* uneven = nullptr;
  /// Null: treated as Gloo.
  ReducingBackend* reducing = nullptr;
};

class GroupState {
 public:
  explicit GroupState(const GroupSpec& spec);
  ~GroupState();
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  const std::string& name() const { return name_; }
  /// Global, in group order.
  const std::vector<int>& ranks() const { return ranks_; }
  /// In the group.
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  GroupWatch& watch() const { return *watch_; }

  /// Before the first call only.
  void set_endpoint(c10::DeviceType device, std::string name,
                    c10::intrusive_ptr<c10d::Backend> backend);
  bool has_endpoint(c10::DeviceType device) const;
  /// Throws NotAvailable if the group has no backend for that device type.
  const Endpoint& endpoint(c10::DeviceType device) const;
  /// Of this group alone; null where the backend needs none.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  /// A group that only meets at its store (GroupSpec::backend "store"). Throws CommError if it was
  /// closed.
  bool meets_at_store() const;
  /// Destroys the backends; later calls fail with CommError. The Gloo backend of a poisoned group
  /// is not destroyed: its threads may be in a call that nothing but Gloo's own limit ends, and its
  /// destructor would wait for them.
  void close();

  /// Works that only their own abort() can wake (Gloo's messages): aborted when the group is
  /// poisoned, at once if it is already.
  void enlist(c10d::Work& work);
  void strike(c10d::Work& work);

  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  void set_timeout(std::chrono::milliseconds limit);
  CheckLevel check_level() const { return level_.load(std::memory_order_relaxed); }
  void set_check_level(CheckLevel level) { level_.store(level, std::memory_order_relaxed); }

  /// Number of collective calls begun. Sends, receives and exchanges are not counted: not all ranks
  /// make them.
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  std::uint64_t next_sequence() { return sequence_.fetch_add(1, std::memory_order_relaxed); }

  /// The number of the next message between this rank and `peer`, in one direction. Counted with
  /// CheckLevel::collective only.
  std::uint64_t next_message(int peer, bool to_peer);

  /// Calls that wait for their turn (RequestState::queue()), the first one first. All are made by
  /// one thread.
  std::deque<RequestState*>& queued() { return queued_; }

  /// Null while nothing is traced.
  CommTrace* trace() const { return trace_raw_.load(std::memory_order_acquire); }
  /// Null ends it. A trace that was attached stays alive as long as the group, since calls under
  /// way may still write to it.
  void set_trace(std::shared_ptr<CommTrace> trace);

  c10::intrusive_ptr<c10d::ProcessGroup> process_group();

 private:
  void require_open() const;

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
  std::vector<std::array<std::uint64_t, 2>> messages_;  // for each peer: received, sent
  std::deque<RequestState*> queued_;
  std::mutex waiting_mutex_;
  std::vector<c10d::Work*> waiting_;
  std::shared_ptr<GroupWatch> watch_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;  // guards traces_ and process_group_
  std::atomic<CommTrace*> trace_raw_{nullptr};
  std::vector<std::shared_ptr<CommTrace>> traces_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

}  // namespace tessera::detail
