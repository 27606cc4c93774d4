#pragma once
// torchrun's agent serves a c10d store before its workers start. It is used for one thing: to find
// where rank 0's own store listens.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "tessera/comm/store/detail/socket.h"

namespace tessera::detail {

/// Connects to the agent's store. Throws RendezvousError if something else answers there, or
/// nothing does by the deadline.
c10::intrusive_ptr<c10d::Store> agent_store(const std::string& host, int port, Deadline deadline);

}  // namespace tessera::detail
