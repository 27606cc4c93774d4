#pragma once
// Which modules of a fully sharded model are units, and the precision of each.

#include <c10/core/ScalarType.h>

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

/// The precision of each unit, by its name.
///
/// Throws InvalidArgument for dtypes that nothing can be computed or reduced in.
class UnitPrecisions {
 public:
  explicit UnitPrecisions(const FullyShardOptions& options);

  const UnitPrecision& of(const std::string& unit);
  /// Throws InvalidArgument if the unit's precision does not fit the parameter.
  void check_parameter(const std::string& unit, const NamedTensor& p);
  /// Throws InvalidArgument if a pattern of unit_precision matched no unit.
  void check_used() const;

 private:
  const FullyShardOptions& options_;
  std::set<std::string> unused_;
};

/// "Half/Float/its own": what is computed in, reduced in and returned.
std::string described(const UnitPrecision& precision);

}  // namespace tessera::detail
