#pragma once
// Mesh: named axes (outermost first) and a rank table. Arithmetic only: no process, no
// communication.
//
//   // ranks 0..5, row-major: the last axis has adjacent ranks
//   Mesh m({{"data", 2}, {"domain", 3}});
//   // the ranks along `domain` through rank 4; position in the list = coordinate on the axis
//   m.group("domain", 4)   -> {3, 4, 5}
//   m.group("data", 4)     -> {1, 4}
//   m.groups("data")       -> {0, 3}, {1, 4}, {2, 5}
//
// Nothing is sorted: with the table {5, 0, 3, 1} over data=2 x model=2 the groups of `model` are
// {5, 0} and {3, 1}.

#include <cstddef>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// Largest number of ranks of a mesh and of devices of a topology: four times the million that is
/// promised.
inline constexpr int kMostRanks = 1 << 22;

/// The size of an axis that takes what the others leave of a known number of ranks.
inline constexpr int kOpenAxis = -1;

/// Groups of equal size, one after the other. The position in a group is the group rank; the order
/// of the groups has no meaning.
struct GroupTable {
  int group_size = 1;
  /// The ranks of all groups: count() * group_size of them.
  std::vector<int> members;

  int count() const { return static_cast<int>(members.size()) / group_size; }
  std::span<const int> operator[](int i) const {
    return std::span<const int>(members).subspan(static_cast<std::size_t>(i) * group_size,
                                                 group_size);
  }
  std::vector<std::vector<int>> lists() const {
    std::vector<std::vector<int>> lists;
    lists.reserve(count());
    for (int i = 0; i < count(); ++i) lists.emplace_back((*this)[i].begin(), (*this)[i].end());
    return lists;
  }
  bool operator==(const GroupTable&) const = default;
};

/// A named dimension of a mesh.
struct Axis {
  std::string name;
  int size = 1;
  bool operator==(const Axis&) const = default;
};

/// The axes with the size of an open one filled in: their sizes multiply to `ranks`.
/// closed_axes({{"data", kOpenAxis}, {"domain", 2}}, 8) -> data 4, domain 2. Axes without an open
/// one stay as they are.
///
/// Throws InvalidArgument for two open axes, and where the others do not divide `ranks`.
std::vector<Axis> closed_axes(std::vector<Axis> axes, int ranks);

/// A value: copies share the table. Every member function is const and may be called from several
/// threads.
class Mesh {
 public:
  Mesh();
  /// Ranks 0 .. product - 1, row-major: the last axis has adjacent ranks.
  explicit Mesh(std::vector<Axis> axes);
  /// Any ranks, each at most once, row-major over the axes: a permutation, a subset of the world,
  /// rows that are not contiguous. One axis may be open.
  Mesh(std::vector<Axis> axes, std::vector<int> ranks);

  const std::vector<Axis>& axes() const { return axes_; }
  int dims() const { return static_cast<int>(axes_.size()); }
  int size() const { return static_cast<int>(ranks().size()); }
  int size(int axis) const;
  int size(const std::string& axis) const;
  bool has_axis(const std::string& axis) const;
  /// Index of an axis. Throws InvalidArgument with the known names.
  int index(const std::string& axis) const;
  std::vector<int> indices(std::span<const std::string> axes) const;
  std::vector<std::string> names() const;
  /// The rank table, row-major.
  const std::vector<int>& ranks() const;
  /// True if the table is 0, 1, 2, ... size - 1.
  bool row_major() const;
  bool contains(int rank) const { return find(rank).has_value(); }
  /// Position of a rank in the table. O(1), or O(log size) for a table with wide gaps.
  std::optional<int> find(int rank) const;
  /// The position that find() gives. Throws InvalidArgument if the rank is not in the mesh.
  int position(int rank) const;
  /// Throws if the rank is not in the mesh.
  std::vector<int> coordinate(int rank) const;
  int rank_at(std::span<const int> coordinate) const;
  /// Distance of neighbours along an axis, in positions of the table.
  int stride(int axis) const;

  /// The ranks that share `rank`'s coordinates on every other axis, in mesh order over `axes`,
  /// whatever the order in which they are named.
  std::vector<int> group(std::span<const int> axes, int rank) const;
  std::vector<int> group(const std::vector<std::string>& axes, int rank) const;
  std::vector<int> group(const std::string& axis, int rank) const;
  /// `rank`'s position in that group.
  int group_rank(std::span<const int> axes, int rank) const;
  int group_size(std::span<const int> axes) const;
  /// All groups of the axes; they partition the mesh. No axes: groups of one rank each.
  GroupTable groups(std::span<const int> axes) const;
  GroupTable groups(const std::vector<std::string>& axes) const;
  GroupTable groups(const std::string& axis) const;
  /// The axes of `scope` that are not in `axes`, in mesh order. The groups of `axes` and of the
  /// complement partition each group of `scope`, and each group of one meets each group of the
  /// other in exactly one rank. Throws OrthogonalityError, with ranks, if `axes` is not inside
  /// `scope`.
  std::vector<int> complement(std::span<const int> axes, std::span<const int> scope) const;
  /// The axes of the whole mesh that are not in `axes`.
  std::vector<int> complement(std::span<const int> axes) const;

  /// The ranks with coordinate `at` on `axis`, as a mesh without that axis.
  Mesh slice(const std::string& axis, int at) const;
  /// The ranks with coordinates [begin, end) on `axis`, as a mesh in which the axis is shorter.
  Mesh slice(const std::string& axis, int begin, int end) const;
  /// The mesh over `axes` alone that runs through `rank`, axes in this mesh's order.
  Mesh submesh(const std::vector<std::string>& axes, int rank) const;
  /// Joins axes into one, in mesh order, at the place of the outermost of them: group(name) of the
  /// result = group(axes) of this mesh.
  Mesh flatten(const std::vector<std::string>& axes, const std::string& name) const;
  /// Splits an axis into several, outermost first; the product of their sizes is its size, and one
  /// may be open.
  Mesh unflatten(const std::string& axis, const std::vector<Axis>& into) const;
  /// The same coordinates with the axes in another order (all of them named): no group along an
  /// axis changes.
  Mesh permute(const std::vector<std::string>& order) const;
  Mesh rename(const std::string& axis, const std::string& name) const;
  /// The same table under other axes with the same product, of which one may be open: data=2 x
  /// tensor=4 as data=2 x expert=2 x tensor=2.
  Mesh view(std::vector<Axis> axes) const;

  /// The axes, outermost first, and where adjacent ranks are: "data=2 x tensor=4 (outermost first;
  /// adjacent ranks along tensor), ranks 0..7".
  std::string to_string() const;

  bool operator==(const Mesh& other) const;

 private:
  struct Table;
  static Mesh over(std::shared_ptr<const Table> table, std::vector<Axis> axes);
  std::vector<int> sorted_axes(std::span<const int> axes) const;
  std::vector<int> offsets(std::span<const int> axes, int first) const;

  std::vector<Axis> axes_;
  std::vector<int> strides_;
  std::shared_ptr<const Table> table_;
};

std::ostream& operator<<(std::ostream& out, const Mesh& mesh);

}  // namespace tessera
