#pragma once
// Makes a group within its time limit, whatever its members do meanwhile.

#include <functional>
#include <memory>

#include "tessera/comm/group/detail/group_spec.h"

namespace tessera::detail {

/// Calls make_group_state(spec) in a thread of its own. Gloo has two waits that no other thread can
/// end: for the connections of members that died after they had published their address, and (five
/// times the limit) for members that do not accept. Where the group is abandoned or its limit is
/// over, the thread is left behind and ends when Gloo's wait does. `interrupt` wakes what waits at
/// the store.
///
/// Throws what make_group_state throws, PeerLostError and TimeoutError.
std::shared_ptr<GroupState> make_group_in_time(const GroupSpec& spec,
                                               std::function<void()> interrupt);

}  // namespace tessera::detail
