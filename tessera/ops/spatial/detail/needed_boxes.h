#pragma once
// gather_boxes(): for operators whose values determine what each rank needs from the others.

#include <vector>

#include "tessera/partition/interval.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Gathers the boxes that every rank gives, by mesh position (row-major). All ranks of the mesh of
/// `spec` call it, with equally many boxes of equally many dims. Throws InvalidArgument on every
/// rank if a rank gives a `failure`, with its text.
std::vector<std::vector<Box>> gather_boxes(const ShardSpec& spec, const std::vector<Box>& mine,
                                           const std::string& failure = {});

}  // namespace tessera::detail
