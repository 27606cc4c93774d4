#pragma once
// One call in progress on an MPI communicator, and the c10d::Work that waits for it.

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/backends/mpi/mpi_attempt.h"
#include "tessera/comm/backends/mpi/mpi_context.h"
#include "tessera/comm/backends/mpi/mpi_tags.h"
#include "tessera/comm/backends/own_work.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/call_card.h"

namespace tessera::detail {

/// A receive in progress: what is expected, and where.
struct MpiExpected {
  MPI_Comm comm = MPI_COMM_NULL;
  /// Group rank, or MPI_ANY_SOURCE.
  int peer = -1;
  int tag = 0;
  std::int64_t bytes = 0;
  /// Its place in the call's list of requests.
  std::size_t request = 0;
};

/// Everything that must outlive the MPI requests of one call, and what is left to do when they are
/// complete.
struct MpiCall {
  const char* name = "";
  std::vector<MPI_Request> requests;
  /// Each request must deliver so many bytes, or -1; empty if no request is a receive.
  std::vector<std::int64_t> receives;
  /// One per request, if there are receives.
  std::vector<MPI_Status> statuses;
  /// Tensors that MPI reads or writes.
  std::vector<at::Tensor> tensors;
  /// Counts and displacements that MPI reads until the end.
  std::vector<std::vector<int>> numbers;
  /// Empty, or run once all requests are complete.
  std::function<void()> finish;
  /// Global ranks of the peers, for point-to-point calls.
  std::vector<int> peers;
  std::int64_t bytes = 0;
  std::chrono::milliseconds timeout{0};
  /// The caller waits at once: MPI's blocking calls are used.
  bool blocking = false;
  /// The call has one tensor and its caller waits: its data moves as soon as the ranks have met.
  bool at_once = false;
  /// Group rank of the sender, for a receive from any.
  int source = -1;
  /// Set from the meeting of a blocking call until its last MPI call has returned.
  std::optional<BlockingPhase> phase;
  /// A collective has these: what the ranks must have in common, its hash, and the numbers that
  /// they reduce in their meeting (the smallest of each over the ranks).
  CallCard card;
  std::uint64_t hash = 0;
  std::array<std::int64_t, 6> brought{}, met{};
  MPI_Request gate = MPI_REQUEST_NULL;
  bool has_met = false;
  /// The number of this collective in its group.
  std::uint64_t number = 0;
  /// The MPI calls that move its data, made when the ranks have met. They use addresses only:
  /// `tensors` holds the memory.
  std::vector<std::function<void()>> moves;
  /// The call stands in the queue of its communicator, whose pump alone touches `gate`, `moves`,
  /// `requests` and `error` until it is out.
  std::atomic<bool> queued{false};
  /// Why the data was not moved.
  std::exception_ptr error;
  /// Its receives, in which another message may come than the one that is waited for.
  std::vector<MpiExpected> expected;

  /// False once MPI no longer uses any memory of the call.
  bool pending() const;
  /// Runs `finish`, if there is one.
  void end() const;
  MPI_Request* request() {
    // as long as the list of requests, once there is a receive
    if (!receives.empty()) receives.resize(requests.size() + 1, -1);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
  /// A copy of `values` that lives as long as the call.
  int* keep(std::vector<int> values) { return numbers.emplace_back(std::move(values)).data(); }
};

/// The communicators of one group, and how this process waits on them. Shared by the transport and
/// its works.
///
/// A collective moves no data before the ranks have compared it, since an MPI library may write
/// past the end of memory where sizes differ. They compare on a communicator of its own (the gate),
/// in the order of the calls, and the data moves on the other one, in the same order on all ranks.
/// The data of a started call is issued by the next wait or test of this process on any MPI group,
/// or by the next call on this one.
class MpiComm : Pinned {
 public:
  /// Takes ownership of `comm`. Collective over its ranks, within `limit`.
  MpiComm(std::shared_ptr<MpiContext> context, MPI_Comm comm, std::vector<int> ranks,
          std::string name, std::chrono::milliseconds limit);
  /// Closes it.
  ~MpiComm();

  /// It carries the data of collectives, and messages with a tag that the program gave.
  MPI_Comm handle() const { return comm_; }
  /// It carries meetings, and messages that the transport numbers.
  MPI_Comm gate() const { return gate_; }
  const MpiTags& tags() const { return tags_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  MpiLibrary& library() const { return *context_->library(); }
  /// True if all ranks of the group share this host's memory.
  bool one_host() const { return one_host_; }

  /// Throws if a new call is impossible: on a wrong thread, after an abort, or after an earlier
  /// call that never completed.
  void require_usable(const char* operation);
  /// Starts to compare a call that nobody waits for yet with the other ranks', and queues its
  /// moves.
  void begin(MpiCall& call);
  /// Moves the data of the calls at the head of the queue that the ranks have compared. From any
  /// thread; does nothing where another thread is at it. Throws nothing.
  void pump();
  /// Waits until all ranks have come with the same call, and the data of all earlier ones has been
  /// issued; then begins a blocking phase, or makes the call nonblocking on all ranks, if a rank
  /// does not wait at once or a limit is short for the size. Throws TimeoutError, or MismatchError
  /// on all ranks, before data moves.
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
  /// Completes adopted calls within some seconds, if the group is sound. No call moves data from
  /// then on, so that what the moves use may go.
  void close() noexcept;

 private:
  /// Calls `test` until it returns true: at once, then spinning, then yielding the core, then
  /// sleeping.
  template <class Test>
  void poll(MpiCall& call, std::chrono::milliseconds limit, Test&& test);
  /// Starts the comparison: the call's number, and its request on the gate.
  void begin_meeting(MpiCall& call, bool waits);
  /// Tests once whether the ranks have compared the call; queue_mutex_ is held. Then issues its
  /// data, or sets its error.
  bool let_through(MpiCall& call);
  /// Throws FinalMismatch if a peer has sent something else than what the call expects. The receive
  /// is then taken back, and what came is received and dropped.
  void look_for_others(MpiCall& call);
  /// Completes adopted calls within `limit`; returns false if some are left.
  bool drain(std::chrono::milliseconds limit) noexcept;
  bool take_back(MPI_Request& request) const;
  void drop_message(MPI_Comm comm, const MPI_Status& status);
  /// What this rank called, and the range of the ranks' sizes.
  std::string difference(const MpiCall& call, MismatchAt at) const;
  /// Adds to difference() the call of a rank that differs. Collective: all ranks call it and wait.
  std::string tell_difference(MpiCall& call);
  void sweep();

  const std::shared_ptr<MpiContext> context_;
  MPI_Comm comm_;
  MPI_Comm gate_ = MPI_COMM_NULL;
  MpiTags tags_;
  const std::vector<int> ranks_;
  int rank_ = 0;
  bool one_host_ = false;
  /// Number of tests before the core is yielded: few where ranks share cores.
  int spins_ = 0;
  std::shared_ptr<BlockingSlot> slot_;
  std::atomic<bool> aborted_{false};
  /// A call ran into its limit while it still had requests.
  std::atomic<bool> stuck_{false};
  std::atomic<bool> has_adopted_{false};
  bool closed_ = false, drained_ = false;
  /// Collectives whose comparison has begun.
  std::uint64_t calls_ = 0;
  /// Taken before the library's own lock.
  std::mutex queue_mutex_;
  /// Calls whose data has not been issued, in order. Their works, or adopted_, own them.
  std::deque<MpiCall*> queue_;
  std::atomic<std::size_t> queue_size_{0};
  // guards adopted_
  std::mutex mutex_;
  std::vector<std::unique_ptr<MpiCall>> adopted_;
};

/// Makes the communicator of `ranks` of the context, in this order; called by its members alone.
/// MPI_Comm_create_group has no time limit, so the members first report to the group's first rank
/// by messages, which have one. Throws InvalidArgument, and TimeoutError naming the ranks that did
/// not come, or PeerLostError if the attempt is given up.
std::shared_ptr<MpiComm> make_mpi_comm(const std::shared_ptr<MpiContext>& context,
                                       const std::vector<int>& ranks,
                                       const MpiBackendOptions& options,
                                       const MpiAttempt& attempt = {});

/// A call as a c10d::Work. Progress is made inside isCompleted() and wait(), and in other MPI calls
/// of this process.
class MpiWork : public OwnWork {
 public:
  /// `transport` lives as long as the work: the moves of the call use it.
  MpiWork(std::shared_ptr<Transport> transport, std::shared_ptr<MpiComm> comm,
          std::unique_ptr<MpiCall> call, const TransportCall& given);
  ~MpiWork() override;

  bool isCompleted() override;
  /// Throws TimeoutError, CommError. `timeout` <= 0: the call's own limit.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override { comm_->abort(); }
  int sourceRank() const override { return source_; }
  /// Completes the call first: there is no thread that would complete the future later.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void complete();
  void fail();

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<MpiComm> comm_;
  std::unique_ptr<MpiCall> call_;
  int source_ = -1;
};

}  // namespace tessera::detail
