#pragma once
// What Python's arguments and results look like: placements as text ("Shard(1)"), sizes as a
// dictionary.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <string>
#include <vector>

#include "tessera/tensor/spec/spec.h"

namespace tessera::python {

using SizesDict = c10::Dict<std::int64_t, std::vector<std::int64_t>>;

/// "Replicate", "Shard(1)", "Partial(sum)": what to_string(Placement) writes. Throws
/// InvalidArgument.
Placement placement(const std::string& text);
std::vector<Placement> placements(const std::vector<std::string>& texts);
std::vector<std::string> texts(const std::vector<Placement>& placements);

ShardSizes sizes(const SizesDict& sizes);
SizesDict sizes(const ShardSizes& sizes);

}  // namespace tessera::python
