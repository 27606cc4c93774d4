#pragma once
// tagged_group(): a group whose calls never meet those of the rest of the program.
//
//   Group g = tagged_group(manager, ranks, {}, "writers");  // not manager.group(ranks)

#include <string>
#include <vector>

#include "tessera/comm/job/manager.h"

namespace tessera {

/// As DistributedManager::group(), but a group different from that of any other tag or of none,
/// even over the same ranks and options. All members give the same tag. Throws InvalidArgument for
/// a tag that is empty or contains a '/'.
Group tagged_group(const DistributedManager& manager, const std::vector<int>& ranks,
                   const GroupOptions& options, const std::string& tag);

}  // namespace tessera
