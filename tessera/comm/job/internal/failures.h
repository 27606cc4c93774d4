#pragma once
// How often groups of some ranks were made anew after a failure of one rank alone (docs/errors.md).
// What ranks count call by call comes apart there, since each stopped at a call of its own: what is
// kept between calls and decides what is sent notes this number with it, and begins anew where it
// has changed.

#include <cstdint>
#include <vector>

#include "tessera/comm/job/device_mesh.h"

namespace tessera {

/// Of failures of meshes that hold all of `ranks` (global). All of them have the same number when
/// they have caught their errors together.
std::uint64_t failures_of(const DistributedManager& manager, const std::vector<int>& ranks);
/// Of all ranks of the mesh.
std::uint64_t failures_of(const DeviceMesh& mesh);

/// A failure has ended the group: every call on it throws.
bool has_ended(const Group& group);

}  // namespace tessera
