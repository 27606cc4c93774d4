#pragma once
// Making a group within its limit, whatever its members do meanwhile.

#include <functional>
#include <memory>

#include "tessera/comm/group/detail/group_spec.h"

namespace tessera::detail {

/// make_group_state(spec) in a thread of its own. Gloo has two waits that nobody else can end: for
/// the connections of members that died after they had said where they listen, and (five times
/// the limit) for members that do not accept. Where the group is given up or its limit is over, the
/// thread is left behind, and ends when Gloo does. `interrupt` wakes what waits at the store.
/// Throws what make_group_state throws, PeerLostError and TimeoutError.
std::shared_ptr<GroupState> make_group_in_time(const GroupSpec& spec,
                                               std::function<void()> interrupt);

}  // namespace tessera::detail
