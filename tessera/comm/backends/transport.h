#pragma once
// Transport: how the ranks of a group move data, as ten functions on counts. Group calls nothing
// else. as_c10d.h makes a transport a c10d::Backend, of_c10d.h a c10d::Backend a transport.
//
//   TransportCall call;                  // ranks 0, 1, 2 have 3, 0 and 2 elements
//   call.input = mine, call.output = all, call.counts = {3, 0, 2};
//   transport.all_gather(call);
//   call.wait();

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "tessera/comm/backends/transport_call.h"
#include "tessera/comm/group/detail/abilities.h"

namespace c10d {
class Backend;
}

namespace tessera::detail {

class Transport : public std::enable_shared_from_this<Transport> {
 public:
  using Function = void (Transport::*)(TransportCall&);

  virtual ~Transport() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual const char* name() const = 0;
  /// What it points to lives as long as the transport.
  virtual Abilities abilities() = 0;

  virtual void broadcast(TransportCall& call) = 0;
  virtual void all_reduce(TransportCall& call) = 0;
  virtual void reduce(TransportCall& call) = 0;
  virtual void all_gather(TransportCall& call) = 0;
  virtual void reduce_scatter(TransportCall& call) = 0;
  virtual void gather(TransportCall& call) = 0;
  virtual void scatter(TransportCall& call) = 0;
  virtual void all_to_all(TransportCall& call) = 0;
  /// Sends and receives all messages at once, without deadlock in any order.
  virtual void exchange(TransportCall& call) = 0;
  virtual void barrier(TransportCall& call) = 0;
  /// A reduce-scatter on what only moves data: an all-to-all, then the shards are reduced here in
  /// rank order. Each rank sends (n - 1) / n of its input, half of what an all-reduce sends; of any
  /// dtype.
  void compose_reduce_scatter(TransportCall& call);

  /// Ends this process' calls. From any thread.
  virtual void abort() = 0;
  /// Ends a sound group; calls in progress are completed.
  virtual void shutdown() {}
  /// False if messages to and from `peer` travel one by one, with tags that tell them apart.
  virtual bool batches([[maybe_unused]] int peer) const { return true; }
  /// A transport that lets only the thread that made a call continue it calls `step` inside all
  /// waits of this thread until it returns true or has expired. False: any thread may.
  virtual bool step_in_waits(const std::weak_ptr<const std::function<bool()>>&) { return false; }
  /// The same ranks, for code written on c10d.
  virtual c10::intrusive_ptr<c10d::Backend> backend();

 protected:
  Transport(int rank, int size, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout) {}
  std::size_t me() const { return static_cast<std::size_t>(rank_); }
  const int rank_, size_;
  /// Calls of c10d's that give none have this limit.
  const std::chrono::milliseconds timeout_;
};

/// Makes a gather, or a scatter, the all-to-all whose counts are zero but for the root's. Elements
/// to and from a rank are those that it holds itself.
void rooted_as_all_to_all(TransportCall& call, int rank, bool gathers);

}  // namespace tessera::detail
