#pragma once
// Groups of their own: for calls that must never meet those of the rest of the program.
//
//   Group g = tagged_group(manager, ranks, {}, "writers");  // not manager.group(ranks)

#include <string>
#include <vector>

#include "tessera/comm/job/manager.h"

namespace tessera {

/// As DistributedManager::group(), but another group than that of any other tag or of none, even of
/// the same ranks and options. All members give the same tag. Throws InvalidArgument for one that
/// is empty or has a '/'.
Group tagged_group(const DistributedManager& manager, const std::vector<int>& ranks,
                   const GroupOptions& options, const std::string& tag);

}  // namespace tessera
