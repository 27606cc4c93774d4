#pragma once
// MpiTransport: a group's calls as MPI calls. mpi_collectives.cpp makes the collectives,
// mpi_transport.cpp messages, and what all calls share.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/mpi/mpi_reduce.h"
#include "tessera/comm/backends/mpi/mpi_work.h"
#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

/// The memory of a tensor. MPI wants an address that is neither null nor MPI_IN_PLACE, also if
/// there is nothing to move.
void* mpi_address(const at::Tensor& tensor);

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::shared_ptr<MpiComm> comm, const MpiBackendOptions& options);
  // While the reductions, which the moves of adopted calls use, are there.
  ~MpiTransport() override { comm_->close(); }

  const char* name() const override { return "mpi"; }
  Abilities abilities() override;
  // Steps are kept even if the library's thread level allows other threads: the waiting thread
  // makes the progress.
  bool step_in_waits(const std::weak_ptr<const std::function<bool()>>& step) override {
    comm_->library().step_in_waits(step);
    return true;
  }
  /// Makes this process' pending and later calls throw PeerLostError. May be called from any
  /// thread; sends nothing to other ranks.
  void abort() override { comm_->abort(); }

  void broadcast(TransportCall& given) override;
  void all_reduce(TransportCall& given) override;
  void reduce(TransportCall& given) override;
  void all_gather(TransportCall& given) override;
  void reduce_scatter(TransportCall& given) override;
  void gather(TransportCall& given) override;
  void scatter(TransportCall& given) override;
  void all_to_all(TransportCall& given) override;
  void exchange(TransportCall& given) override;
  void barrier(TransportCall& given) override;

 private:
  using Counts = TransportCall::Counts;
  /// Makes one call, from its beginning to its work: `add` adds a collective or messages to it,
  /// before the call is begun. The ranks of a collective first meet and compare their `card`: of
  /// messages only the named peers take part.
  void run(const char* name, TransportCall& given, CallCard card,
           const std::function<void(MpiCall&)>& add);

  /// Where a message goes: a communicator, and a tag that no message of another size has.
  struct Route {
    MPI_Comm comm;
    int tag;
  };
  /// All-reduce (root < 0) or reduce.
  void reduce_to(const char* name, TransportCall& given, int root);
  /// Gather, or scatter.
  void rooted(TransportCall& given, bool gathers);
  /// Sends `data` to a rank, or receives it from one, in one or several messages.
  void post(MpiCall& call, Message::Kind kind, void* data, std::int64_t count,
            std::size_t element_size, int peer, const Route& route);
  /// The same of a collective, numbered by it.
  void post(MpiCall& call, Message::Kind kind, void* data, std::int64_t count,
            c10::ScalarType dtype, int peer);
  /// The route of a message that is in no collective.
  Route route_of(const Message& message, int tag);

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
  /// Does after_meeting() for `count` items of `item` bytes from `begin` on, no more at once than
  /// `piece`: `move(data, n)`.
  template <class Move>
  void in_pieces(MpiCall& call, char* begin, std::int64_t count, std::int64_t item,
                 std::int64_t piece, const Move& move);
  bool fits(std::int64_t count) const { return count <= max_count_; }

  const std::shared_ptr<MpiComm> comm_;
  MpiReductions reductions_;
  const std::int64_t max_count_;
  /// Messages of exchanges, one number per rank.
  std::vector<std::uint64_t> sent_, received_;
};

}  // namespace tessera::detail
