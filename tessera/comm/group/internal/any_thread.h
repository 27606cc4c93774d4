#pragma once
// Whether threads besides the one that made a group may make its calls.

#include "tessera/comm/group/group.h"

namespace tessera {

/// True if any thread may call `group`, one at a time: its backend for the CPU allows it, or it has
/// one rank. The same on all ranks.
bool any_thread_may_call(const Group& group);

}  // namespace tessera
