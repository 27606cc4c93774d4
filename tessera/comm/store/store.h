#pragma once
// Rendezvous: the ranks of a job meet and share a small key-value store. Rank 0 serves it, on a
// single address; every rank holds one connection.
//
//   auto meeting = Rendezvous::meet(launch, std::chrono::seconds(120));
//   meeting.store->set("key", "value");  // c10d::Store: what process groups are made from
//   // the numeric address of this host on the way to rank 0, which listeners of this rank bind:
//   // "10.0.0.3"
//   meeting.address
//
// Whatever goes wrong here ends within the limit (plus about a second) on every rank that runs, as
// a RendezvousError that names the cause: a missing rank, two processes with the same rank, ranks
// that disagree about the world size, a port in use, something else that listens there, an address
// that cannot be reached, a name that is not resolved in time.
//
// A rank and the store prove to each other that they know the job's secret (Launch::secret). A
// process that does not know it is turned away, and the ranks meet without noticing. What is sent
// afterwards is neither encrypted nor signed.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/types.h"
#include "tessera/launch/launch.h"

namespace tessera {

namespace detail {
class StoreConnection;
class StoreServer;
}  // namespace detail

/// The ranks could not meet. `ranks` holds the ranks that are known to be missing or wrong (empty
/// if that is not the cause or cannot be known).
class RendezvousError : public CommError {
 public:
  explicit RendezvousError(const std::string& what, std::vector<int> ranks = {})
      : CommError(what), ranks_(std::move(ranks)) {}
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// What a rank holds after the meeting. Members are destroyed in reverse order: the connection
/// before the server.
struct Rendezvous {
  /// The store's server, on rank 0 alone; null elsewhere.
  std::shared_ptr<detail::StoreServer> server;
  std::shared_ptr<detail::StoreConnection> connection;
  c10::intrusive_ptr<c10d::Store> store;
  /// Numeric address of this host; loopback if rank 0 is reached through loopback.
  std::string address;

  /// Blocks until every rank of the launch has come. `limit` may be milliseconds::max(). Rank 0
  /// listens on `launch.address` : `launch.port` and on no other address (loopback if the address
  /// is empty); where torchrun's agent already serves a store there, rank 0 uses a free port and
  /// publishes it in the agent's store, and so it does in `board` where one is given. Throws
  /// RendezvousError.
  static Rendezvous meet(const Launch& launch, std::chrono::milliseconds limit,
                         c10::intrusive_ptr<c10d::Store> board = nullptr);
};

}  // namespace tessera
