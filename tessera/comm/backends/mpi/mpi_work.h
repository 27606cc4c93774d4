#pragma once
// One call in progress on an MPI communicator, and the c10d::Work that waits for it.

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/backends/mpi/mpi_context.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/detail/mismatch.h"

namespace tessera::detail {

/// Tags of a group's own messages: one for each dtype, so that a message is not taken for one of
/// another dtype. They are below the limit of every MPI library.
inline constexpr int kMessageTags = 0x7c00, kDtypes = 64;

/// Everything that must outlive the MPI requests of one call, and what is left to do when they are
/// complete.
struct MpiCall {
  const char* name = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<MPI_Request> requests;
  /// For each request the bytes it must deliver, or -1; empty if no request is a receive.
  std::vector<std::int64_t> receives;
  /// One per request, if there are receives.
  std::vector<MPI_Status> statuses;
  /// Tensors that MPI reads or writes.
  std::vector<at::Tensor> tensors;
  /// The result of Work::result().
  std::vector<at::Tensor> results;
  /// Counts and displacements that MPI reads until the end.
  std::vector<std::vector<int>> numbers;
  /// Run in order once all requests are complete.
  std::vector<std::function<void()>> finish;
  /// Global ranks of the peers, for point-to-point calls.
  std::vector<int> peers;
  std::int64_t bytes = 0;
  std::chrono::milliseconds timeout{0};
  /// The caller waits at once: MPI's blocking calls are used.
  bool blocking = false;
  /// Group rank of the sender, for a receive from any.
  int source = -1;
  /// Set from the meeting of a blocking call until its last MPI call has returned.
  std::optional<BlockingPhase> phase;
  /// For a collective: what the ranks must have in common, its hash, and the numbers that they
  /// reduce in their meeting (the smallest of each over the ranks).
  CallCard card;
  std::uint64_t hash = 0;
  std::array<std::int64_t, 6> brought{}, met{};
  MPI_Request gate = MPI_REQUEST_NULL;
  bool has_met = false;
  /// For a batch of messages: peer (group rank) and tag of each receive.
  std::vector<std::pair<int, int>> expected;

  /// False once MPI no longer uses any memory of the call.
  bool pending() const;
  MPI_Request* request() {
    // as long as the list of requests, once there is a receive
    if (!receives.empty()) receives.resize(requests.size() + 1, -1);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
  /// A copy of `values` that lives as long as the call.
  int* keep(std::vector<int> values) { return numbers.emplace_back(std::move(values)).data(); }
};

/// The communicator of one group, and how this process waits on it. Shared by the backend and its
/// works.
class MpiComm {
 public:
  /// Takes ownership of `comm`. Collective over its ranks, within `limit`.
  MpiComm(std::shared_ptr<MpiContext> context, MPI_Comm comm, std::vector<int> ranks,
          std::string name, std::chrono::milliseconds limit);
  ~MpiComm();
  MpiComm(const MpiComm&) = delete;
  MpiComm& operator=(const MpiComm&) = delete;

  MPI_Comm handle() const { return comm_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  MpiLibrary& library() const { return *context_->library(); }
  /// True if all ranks of the group share this host's memory.
  bool one_host() const { return one_host_; }

  /// Throws if a new call is impossible: on a wrong thread, after an abort, or after an earlier
  /// call that never completed.
  void require_usable(const char* operation);
  /// Starts to compare the call with the other ranks'. `waits`: the caller waits at once.
  void begin_meeting(MpiCall& call, bool waits);
  /// Waits until all ranks have come with the same call, then begins a blocking phase; or makes the
  /// call nonblocking on all ranks, if a rank does not wait at once or a limit is short for the
  /// size. Throws TimeoutError, or MismatchError on all ranks, before data moves.
  void meet(MpiCall& call);
  /// Tests once; true when all requests are complete. Throws CommError, or FinalMismatch.
  bool test(MpiCall& call);
  /// Waits for the requests within `limit`. Throws TimeoutError, CommError.
  void wait(MpiCall& call, std::chrono::milliseconds limit);
  /// Takes over a call that is no longer waited for, and completes it in later MPI calls.
  void adopt(std::unique_ptr<MpiCall> call) noexcept;
  /// Records that a call failed while MPI still uses its memory: later calls fail, and MPI is not
  /// finalised.
  void set_stuck();
  /// Makes present waits end and later calls fail.
  void abort() { aborted_.store(true, std::memory_order_release); }
  /// Completes adopted calls within `limit`; returns false if some are left.
  bool drain(std::chrono::milliseconds limit) noexcept;

 private:
  /// Calls `test` until it returns true: at once, then spinning, then yielding the core, then
  /// sleeping.
  template <class Test>
  void poll(const MpiCall& call, std::chrono::milliseconds limit, Test&& test);
  /// Throws FinalMismatch if a peer has sent another dtype than the one that is expected.
  void look_for_others(const MpiCall& call) const;
  /// What this rank called, and the range of the ranks' sizes.
  std::string difference(const MpiCall& call, MismatchAt at) const;
  /// As difference(), with the call of a rank that differs. Collective: all ranks call it and wait.
  std::string tell_difference(const MpiCall& call);
  void sweep();

  const std::shared_ptr<MpiContext> context_;
  MPI_Comm comm_;
  const std::vector<int> ranks_;
  int rank_ = 0;
  bool one_host_ = false;
  /// Number of tests before the core is yielded: few where ranks share cores.
  int spins_ = 0;
  const std::shared_ptr<BlockingSlot> slot_;
  std::atomic<bool> aborted_{false};
  /// A call ran into its limit while it still had requests.
  std::atomic<bool> stuck_{false};
  std::atomic<bool> has_adopted_{false};
  // guards adopted_
  std::mutex mutex_;
  std::vector<std::unique_ptr<MpiCall>> adopted_;
};

/// A call as a c10d::Work. Progress is made inside isCompleted() and wait(), and in other MPI calls
/// of this process.
class MpiWork : public c10d::Work, public InterruptibleWork {
 public:
  MpiWork(std::shared_ptr<MpiComm> comm, std::unique_ptr<MpiCall> call);
  ~MpiWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  /// Throws TimeoutError, CommError. `timeout` <= 0: the call's own limit.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override { comm_->abort(); }
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  /// Completes the call first: there is no thread that would complete the future later.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void complete();
  void fail();

  const std::shared_ptr<MpiComm> comm_;
  std::unique_ptr<MpiCall> call_;
  std::vector<at::Tensor> results_;
  int source_ = -1;
};

}  // namespace tessera::detail
