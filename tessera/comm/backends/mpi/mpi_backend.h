#pragma once
// MpiBackend: a group's collectives as MPI calls. mpi_collectives.cpp makes the MPI calls;
// mpi_backend.cpp implements c10d's interface with them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/mpi/mpi_reduce.h"
#include "tessera/comm/backends/mpi/mpi_work.h"
#include "tessera/comm/backends/own_backend.h"

namespace tessera::detail {

/// True for plain row-major memory, on which MPI can work directly.
inline bool in_order(const at::Tensor& t) {
  return t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

class MpiBackend final : public OwnBackend {
 public:
  MpiBackend(std::shared_ptr<MpiComm> comm, const MpiBackendOptions& options);
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
  // Steps are kept even if the library's thread level allows other threads: the waiting thread
  // makes the progress.
  bool step_in_waits(const std::weak_ptr<const std::function<bool()>>& step) override {
    comm_->library().step_in_waits(step);
    return true;
  }
  /// Makes this process' pending and later calls throw PeerLostError. May be called from any
  /// thread; sends nothing to other ranks.
  void abort() override { comm_->abort(); }

  Abilities abilities() override;

  /// The root's outputs may have different numbers of elements.
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  /// The root's inputs may have different numbers of elements.
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

 private:
  WorkPtr broadcast_one(OwnCall call) override;
  WorkPtr all_reduce_one(OwnCall call) override;
  WorkPtr reduce_one(OwnCall call) override;
  WorkPtr all_gather_counts(OwnCall call) override;
  WorkPtr reduce_scatter_counts(OwnCall call) override;
  WorkPtr gather_counts(OwnCall call) override;
  WorkPtr scatter_counts(OwnCall call) override;
  WorkPtr all_to_all_counts(OwnCall call) override;
  WorkPtr all_reduce_each(OwnCall call) override;
  WorkPtr all_gather_each(const Tensors& inputs, OwnCall call) override;
  WorkPtr reduce_scatter_each(const Tensors& inputs, OwnCall call) override;
  WorkPtr all_to_all_each(const Tensors& inputs, OwnCall call) override;

  /// Only the ranks of a collective meet first: of messages only the named peers take part.
  enum class Kind { collective, messages };
  /// Makes one call, from its beginning to its work: `add` adds collectives or messages to it,
  /// before the call is begun. The ranks of a collective compare their `card` before data moves.
  WorkPtr run(const char* name, c10d::OpType type, CallLimit limit, Kind kind, CallCard card,
              const std::function<void(MpiCall&)>& add);
  WorkPtr run(const char* name, OwnCall& how, CallCard card,
              const std::function<void(MpiCall&)>& add);

  /// Where a message goes: a communicator, and a tag that no message of another size has.
  struct Route {
    MPI_Comm comm;
    int tag;
  };

  // Each adds one collective to a call: prepares it, and hands its MPI calls to after_meeting().
  void add_all_reduce(MpiCall& call, const at::Tensor& tensor, const c10d::ReduceOp& op);
  void add_broadcast(MpiCall& call, const at::Tensor& tensor, int root);
  void add_reduce(MpiCall& call, const at::Tensor& tensor, int root, const c10d::ReduceOp& op);
  void add_all_gather(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                      const Counts& counts);
  void add_reduce_scatter(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                          const Counts& counts, const c10d::ReduceOp& op);
  void add_gather(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                  const Counts& counts, int root);
  void add_scatter(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                   const Counts& counts, int root);
  void add_all_to_all(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                      const Counts& output_counts, const Counts& input_counts);
  void add_send(MpiCall& call, const at::Tensor& tensor, int to, const Route& route);
  void add_receive(MpiCall& call, const at::Tensor& tensor, int from, const Route& route);
  /// One or several messages of a collective, numbered by it.
  void post_send(MpiCall& call, const void* data, std::int64_t count, c10::ScalarType dtype,
                 int to);
  void post_receive(MpiCall& call, void* data, std::int64_t count, c10::ScalarType dtype, int from);
  void post_send(MpiCall& call, const void* data, std::int64_t count, std::size_t element_size,
                 int to, const Route& route);
  void post_receive(MpiCall& call, void* data, std::int64_t count, std::size_t element_size,
                    int from, const Route& route);
  Route numbered(const MpiCall& call, c10::ScalarType dtype, std::int64_t count) const {
    return {comm_->gate(), comm_->tags().numbered(true, call.number, dtype, count)};
  }
  Route numbered(const MpiCall& call, const at::Tensor& tensor) const {
    return numbered(call, tensor.scalar_type(), tensor.numel());
  }
  Route users(int tag, const at::Tensor& tensor) const {
    return {comm_->handle(),
            comm_->tags().users(user_tag(tag), static_cast<std::int64_t>(tensor.nbytes()))};
  }

  /// Hands over `move`, the MPI calls that move a collective's data: makes them at once where the
  /// caller waits, after the ranks have met and compared the call; else when the call is let
  /// through. Do what needs no other rank, and what may be refused, before it.
  template <class Move>
  void after_meeting(MpiCall& call, Move&& move) {
    if (!call.at_once) {
      call.moves.emplace_back(std::forward<Move>(move));
      return;
    }
    comm_->meet(call);
    move();
  }
  /// A tensor that MPI may read: `tensor` itself if its bytes are in row-major order, else a copy.
  at::Tensor readable(MpiCall& call, const at::Tensor& tensor) const;
  /// A tensor that MPI may write; if it is not `tensor` itself, it is copied there at the end.
  at::Tensor writable(MpiCall& call, const at::Tensor& tensor) const;
  int user_tag(int tag) const;
  bool fits(std::int64_t count) const { return count <= max_count_; }
  int rank() const { return comm_->rank(); }

  const std::shared_ptr<MpiComm> comm_;
  MpiReductions reductions_;
  const std::int64_t max_count_;
  /// Messages of exchanges, one number per rank.
  std::vector<std::uint64_t> sent_, received_;
};

}  // namespace tessera::detail
