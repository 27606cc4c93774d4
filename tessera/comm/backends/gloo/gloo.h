#pragma once
// The Gloo inside libtorch as a transport of groups, over TCP.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

namespace tessera {

namespace detail {
class Transport;
}

/// Meets the other ranks through `store`, which belongs to this group alone, and connects to each
/// of them. `address` is a numeric address of this host: it listens on it and on no other.
/// Costs about 1 ms, 5 descriptors and 3 threads, and one descriptor per peer. `timeout` limits the
/// meeting. Throws what the store throws, or CommError.
///
/// abort() of the result closes its connections: calls that are blocked in it, here and on its
/// peers, end with an error at once. c10d's own Gloo backend cannot do that.
std::shared_ptr<detail::Transport> make_gloo_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                       int rank, int size,
                                                       std::chrono::milliseconds timeout,
                                                       const std::string& address = "127.0.0.1");

}  // namespace tessera
