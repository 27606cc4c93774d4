#pragma once
// The meeting of group.h, step by step:
//
//   rank 0 listens, and puts the socket's name and a secret into the directory
//   the other ranks connect, look whose socket it is, say who they are, and put "met" or the reason
//     why not
//   rank 0 lets ranks in that know the secret and are of the same user (reception.h)
//   rank 0 makes the memory, and sends its descriptor, one for each rank's process, and what all
//     ranks have reported
//   each rank claims its region of the memory, and says so or why not
//   rank 0 sends "yes", or why there is no group
//   they test whether they can read each other's memory
//
// A rank that fails leaves its reason in the place of what the others wait for: of "address",
// "met", or a message; rank 0 for those who come later as "failure".
// If one rank throws, all throw.

#include <memory>

#include "tessera/shm/detail/core.h"
#include "tessera/shm/group.h"

namespace tessera::shm::detail {

/// This rank's end of the group. Collective. Throws SetupError, InvalidArgument.
std::shared_ptr<Core> meet(int rank, int size, const Directory& directory, const Options& options);

/// One end for each of `size` ranks that are threads of this process.
std::vector<std::shared_ptr<Core>> meet_threads(int size, const Options& options);

}  // namespace tessera::shm::detail
