#pragma once
// The transport of ranks that are threads of one process. The ranks of a group share a ThreadsRoom.
// A collective is a slot: each rank puts its tensors into it, and the rank that completes the slot
// performs the whole operation for all, in rank order, so that results are exact, deterministic,
// and independent of which rank is late. Nothing is copied before all ranks have arrived, and ranks
// that put different calls into a slot all get a MismatchError.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/group_watch.h"

namespace tessera::detail {

/// The state that the ranks of one group share.
class ThreadsRoom;
std::shared_ptr<ThreadsRoom> make_threads_room(std::string name, std::vector<int> ranks);

std::shared_ptr<Transport> make_threads_transport(std::shared_ptr<ThreadsRoom> room, int rank,
                                                  int size, std::shared_ptr<GroupWatch> watch,
                                                  std::chrono::milliseconds timeout);

}  // namespace tessera::detail
