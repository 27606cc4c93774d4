#pragma once
// Which modules of a fully sharded model are units.

#include <set>
#include <string>
#include <vector>

#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::detail {

/// The names of the modules that are units. The whole module, "", is none of them.
///
/// Throws InvalidArgument for a pattern that matches no module.
std::set<std::string> unit_names(const torch::nn::Module& module,
                                 const std::vector<std::string>& patterns);

/// The innermost of these units that holds the parameter of this full name; "": none does.
std::string unit_of(const std::set<std::string>& units, const std::string& parameter);

}  // namespace tessera::detail
