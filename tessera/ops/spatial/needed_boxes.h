#pragma once
// Where values decide what is needed: each rank says its boxes, and all know them.

#include <vector>

#include "tessera/partition/interval.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// The boxes of every mesh position, row-major; all ranks give as many, of as many dims. Collective
/// over the mesh of `spec`. `failure` not empty on any rank: throws InvalidArgument with it, on
/// every rank.
std::vector<std::vector<Box>> gather_boxes(const ShardSpec& spec, const std::vector<Box>& mine,
                                           const std::string& failure = {});

}  // namespace tessera::detail
