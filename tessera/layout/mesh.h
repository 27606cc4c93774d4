#pragma once
// Mesh: named axes (outermost first) and a rank table. Arithmetic only: no process, no communication.
//
//   Mesh m({{"data", 2}, {"domain", 3}});      // ranks 0..5, row-major
//   m.group("domain", 4)   -> {3, 4, 5}        // the ranks along `domain` through rank 4; position in the list = coordinate on the axis
//   m.group("data", 4)     -> {1, 4}

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// A named dimension of a mesh.
struct Axis {
  std::string name;
  int size = 1;
  bool operator==(const Axis&) const = default;
};

class Mesh {
 public:
  Mesh() = default;
  /// Ranks 0 .. product - 1, row-major: the last axis has adjacent ranks.
  explicit Mesh(std::vector<Axis> axes);
  /// Any ranks, each at most once, row-major over the axes: a permutation, a subset of the world, rows that are not contiguous.
  Mesh(std::vector<Axis> axes, std::vector<int> ranks);

  const std::vector<Axis>& axes() const { return axes_; }
  int dims() const { return static_cast<int>(axes_.size()); }
  int size() const { return static_cast<int>(ranks_.size()); }
  int size(int axis) const;
  int size(const std::string& axis) const;
  int index(const std::string& axis) const;                       ///< Throws InvalidArgument with the known names.
  const std::vector<int>& ranks() const { return ranks_; }        ///< The table, row-major.
  bool contains(int rank) const;
  std::vector<int> coordinate(int rank) const;                    ///< Throws if the rank is not in the mesh.
  int rank_at(std::span<const int> coordinate) const;

  /// The ranks that share `rank`'s coordinates on every other axis, in mesh order over `axes`.
  std::vector<int> group(std::span<const int> axes, int rank) const;
  std::vector<int> group(const std::string& axis, int rank) const;

  bool operator==(const Mesh&) const = default;

 private:
  std::vector<Axis> axes_;
  std::vector<int> ranks_;
};

}  // namespace tessera
