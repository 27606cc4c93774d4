#pragma once
// Group: an ordered set of ranks that communicate. A small value; copies share one state.
//
//   Group g = manager.world();                    // 4 ranks
//   g.all_reduce(t, ReduceOp::sum);               // blocks until t is reduced
//   Request r = g.started().all_reduce(t, ReduceOp::sum);
//   ...computation that does not touch t...
//   r.wait();
//
// Uneven sizes: ranks 0, 1, 2 hold 3, 0 and 2 rows of 8 columns.
//   at::Tensor all = at::empty({5, 8});
//   g.all_gather(all, mine, {3, 0, 2});
//
// Every call below is collective over the group unless it says otherwise, has a time limit, and
// accepts non-contiguous tensors. Sizes are rows along dim 0, one number per rank in group order,
// the same on every rank; empty means that all ranks have the same size. A CPU tensor travels over
// the group's CPU backend, a CUDA tensor over its CUDA backend.
//
// Every call throws InvalidArgument (this rank's arguments; nothing was sent), MismatchError (ranks
// called different things), TimeoutError, PeerLostError, or CommError (types.h).

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/pending.h"
#include "tessera/comm/group/types.h"

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace tessera {

namespace detail {
class GroupState;
}  // namespace detail

using Sizes = std::vector<std::int64_t>;

/// One message of a batch: a send to or a receive from `peer` (group rank).
struct Message {
  enum class Kind : unsigned char { send, receive };
  Kind kind;
  at::Tensor tensor;
  int peer;
};

/// The calls of a group, each declared once: Group is Collectives<void>, whose calls return when
/// they are complete; group.started() is Collectives<Request>: its calls return a Request at once.
template <class Result>
class Collectives {
 public:
  /// Copies `tensor` of `root` into `tensor` of the other ranks.
  Result broadcast(const at::Tensor& tensor, int root, const CallOptions& options = {}) const;
  /// Reduces `tensor` over the ranks, in place: every rank gets the same result.
  Result all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum,
                    const CallOptions& options = {}) const;
  /// Reduces `tensor` over the ranks. The result is on `root` alone; the other ranks' tensors keep
  /// their values.
  Result reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::sum,
                const CallOptions& options = {}) const;
  /// Concatenates the ranks' `input` along dim 0 into `output` on every rank.
  Result all_gather(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes = {},
                    const CallOptions& options = {}) const;
  /// Reduces `input`, which holds the rows of all ranks; `output` gets this rank's rows of the
  /// result.
  Result reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                        ReduceOp op = ReduceOp::sum, const Sizes& sizes = {},
                        const CallOptions& options = {}) const;
  /// Sends rows [sum of input_sizes before r, ...) of `input` to rank r; rows from rank r arrive
  /// likewise in `output`. The sizes are this rank's own.
  Result all_to_all(const at::Tensor& output, const at::Tensor& input,
                    const Sizes& output_sizes = {}, const Sizes& input_sizes = {},
                    const CallOptions& options = {}) const;
  /// Concatenates the ranks' `input` along dim 0 into `output` of `root`, which may be undefined
  /// elsewhere.
  Result gather(const at::Tensor& output, const at::Tensor& input, int root,
                const Sizes& sizes = {}, const CallOptions& options = {}) const;
  /// Distributes the rows of `root`'s `input`: `output` gets this rank's. `input` may be undefined
  /// elsewhere.
  Result scatter(const at::Tensor& output, const at::Tensor& input, int root,
                 const Sizes& sizes = {}, const CallOptions& options = {}) const;
  /// Sends `tensor` to group rank `to`. Not collective.
  Result send(const at::Tensor& tensor, int to, const CallOptions& options = {}) const;
  /// Receives into `tensor` from group rank `from`. Not collective.
  Result receive(const at::Tensor& tensor, int from, const CallOptions& options = {}) const;
  /// Sends and receives all messages at once, deadlock-free in any order; messages between the same
  /// two ranks match in list order. Not collective: only the peers named take part. Empty tensors
  /// are not sent.
  Result exchange(const std::vector<Message>& messages, const CallOptions& options = {}) const;
  /// Returns when all ranks have called it.
  Result barrier(const CallOptions& options = {}) const;

 protected:
  friend class Group;
  explicit Collectives(std::shared_ptr<detail::GroupState> state) : state_(std::move(state)) {}
  std::shared_ptr<detail::GroupState> state_;
};
extern template class Collectives<void>;
extern template class Collectives<Request>;

class Group : public Collectives<void> {
 public:
  /// The group of this process alone: size 1, every call is local.
  Group();
  explicit Group(std::shared_ptr<detail::GroupState> state);

  /// This process' position in ranks().
  int rank() const;
  int size() const;
  /// Global ranks in group order. Never sorted.
  const std::vector<int>& ranks() const;
  const std::string& name() const;
  /// Name of the backend for a device type: "gloo", "shm", "hosts", "mpi", "nccl", "threads",
  /// "self".
  const std::string& backend(c10::DeviceType device = c10::DeviceType::CPU) const;
  /// Why it is that one: what its ranks found out about their hosts. Empty where the program named
  /// the backend.
  const std::string& backend_reason(c10::DeviceType device = c10::DeviceType::CPU) const;
  CheckLevel check_level() const;
  /// Sets how much is checked before data moves. Collective: all ranks must set the same level.
  void set_check_level(CheckLevel level);
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds limit);

  /// The same calls, started: each returns at once with a Request to wait for.
  Collectives<Request> started() const { return Collectives<Request>(state_); }

  // ---- small control messages ----
  std::vector<std::string> all_gather_bytes(const std::string& mine,
                                            const CallOptions& options = {}) const;
  std::string broadcast_bytes(const std::string& bytes, int root,
                              const CallOptions& options = {}) const;
  /// The texts of all ranks on `root`, empty elsewhere.
  std::vector<std::string> gather_bytes(const std::string& mine, int root,
                                        const CallOptions& options = {}) const;
  std::string scatter_bytes(const std::vector<std::string>& parts, int root,
                            const CallOptions& options = {}) const;

  /// Tells the other ranks that this one cannot go on: their pending and later calls throw
  /// PeerLostError with `reason`. The process stays able to exit.
  void abort(const std::string& reason) const;
  /// Number of collective calls made so far (the number of the next one). Messages are not counted:
  /// not all ranks make them.
  std::uint64_t sequence() const;

  /// The c10d view of this group, for code written against libtorch (torch's own DDP, c10d
  /// functional collectives).
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;

  const std::shared_ptr<detail::GroupState>& state() const { return state_; }
  bool operator==(const Group& other) const { return state_ == other.state_; }
};

/// Every rank gets the reduction of the tensors of the ranks up to itself, in place and in rank
/// order: on group rank r it becomes x_0 op ... op x_r. Ranks 0, 1, 2 with 3, 0 and 2 rows get 3, 3
/// and 5, where their rows end among all. Takes and throws what Group's calls do, and moves what an
/// all-gather moves. Throws InvalidArgument for an average, whose number of summands would differ
/// between ranks.
void inclusive_scan(const Group& group, const at::Tensor& tensor, ReduceOp op = ReduceOp::sum,
                    const CallOptions& options = {});
Request start_inclusive_scan(const Group& group, const at::Tensor& tensor,
                             ReduceOp op = ReduceOp::sum, const CallOptions& options = {});

}  // namespace tessera
