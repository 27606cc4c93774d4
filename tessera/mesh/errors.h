#pragma once
// The errors of the mesh room. Each message contains the numbers; the fields hold them for
// programs.

#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

/// A configuration of groups (tree, views, named order) that is impossible.
class GroupConfigError : public ConfigurationError {
 public:
  using ConfigurationError::ConfigurationError;
};

/// The sizes do not multiply up to the world, or do not divide it.
class WorldSizeMismatch : public GroupConfigError {
 public:
  WorldSizeMismatch(const std::string& what, long long world_size, long long product)
      : GroupConfigError(what), world_size_(world_size), product_(product) {}
  long long world_size() const { return world_size_; }
  /// Product of the sizes that were given.
  long long product() const { return product_; }

 private:
  long long world_size_, product_;
};

/// A leaf has no size, or more than one leaf was left open.
class UnsetSize : public GroupConfigError {
 public:
  using GroupConfigError::GroupConfigError;
};

/// Two nodes, groups or views share a name.
class RepeatedName : public GroupConfigError {
 public:
  using GroupConfigError::GroupConfigError;
};

/// A node, group, parent, scope or axis that does not exist.
class UnknownName : public GroupConfigError {
 public:
  using GroupConfigError::GroupConfigError;
};

/// A node that is its own ancestor.
class GroupCycle : public GroupConfigError {
 public:
  using GroupConfigError::GroupConfigError;
};

/// The rule of orthogonality (groups/orthogonal.h) does not hold; `ranks()` are the ranks that
/// break it.
class OrthogonalityError : public GroupConfigError {
 public:
  OrthogonalityError(const std::string& what, std::vector<int> ranks)
      : GroupConfigError(what), ranks_(std::move(ranks)) {}
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// Two views of the same ranks disagree about an axis that both name.
class ViewMismatch : public OrthogonalityError {
 public:
  using OrthogonalityError::OrthogonalityError;
};

/// A mapping of ranks to devices that is invalid or does not fit the machines.
class MappingError : public ConfigurationError {
 public:
  using ConfigurationError::ConfigurationError;
};

}  // namespace tessera
