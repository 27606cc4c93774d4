#include "tessera/mesh/mesh.h"

#include <algorithm>
#include <ostream>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

std::int64_t product(const std::vector<Axis>& axes) {
  std::set<std::string> names;
  std::int64_t n = 1;
  for (const Axis& axis : axes) {
    if (axis.size < 1)
      throw InvalidArgument(
          "mesh axis '", axis.name, "' has size ", axis.size, "; give a size of at least 1",
          axis.size == kOpenAxis ? ", or a number of ranks that decides an open axis" : "");
    if (!names.insert(axis.name).second)
      throw InvalidArgument("mesh axis '", axis.name,
                            "' is named twice; give each axis its own name");
    if (const auto fault = name_fault(axis.name, /*spaces=*/true); fault && !axis.name.empty())
      throw InvalidArgument("mesh axis '", printable(axis.name), "' ", *fault,
                            "; names go into files and messages");
    n *= axis.size;
    if (n > kMostRanks)
      throw InvalidArgument("the mesh has ", n, " ranks or more; at most ", kMostRanks,
                            " can be planned");
  }
  return n;
}

std::vector<int> row_major_strides(const std::vector<Axis>& axes) {
  std::vector<int> strides(axes.size());
  int stride = 1;
  for (std::size_t i = axes.size(); i-- > 0; stride *= axes[i].size) strides[i] = stride;
  return strides;
}

}  // namespace

std::vector<Axis> closed_axes(std::vector<Axis> axes, int ranks) {
  const auto is_open = [](const Axis& axis) { return axis.size == kOpenAxis; };
  const auto open = std::ranges::find_if(axes, is_open);
  if (open == axes.end()) return axes;
  if (const auto other = std::find_if(open + 1, axes.end(), is_open); other != axes.end())
    throw InvalidArgument("mesh axes '", open->name, "' and '", other->name,
                          "' are both open; one can take what the others leave");
  open->size = 1;
  const std::int64_t others = product(axes);
  if (ranks < 1 || ranks % others != 0)
    throw InvalidArgument("mesh axis '", open->name, "' is open, but ", ranks,
                          " ranks do not divide by ", others, ", the product of the other axes");
  open->size = static_cast<int>(ranks / others);
  return axes;
}

/// The ranks and their inverse. A table 0, 1, 2, ... needs no inverse, a dense one an array, one
/// with wide gaps a sorted list.
struct Mesh::Table {
  std::vector<int> ranks;
  bool row_major = true;
  int lowest = 0;
  /// dense[rank - lowest] = position, -1: absent.
  std::vector<int> dense;
  /// (rank, position), sorted.
  std::vector<std::pair<int, int>> sparse;

  explicit Table() = default;
  explicit Table(std::vector<int> given) : ranks(std::move(given)) {
    const auto n = static_cast<int>(ranks.size());
    for (int i = 0; i < n && row_major; ++i) row_major = ranks[i] == i;
    if (row_major) return;
    const auto [low, high] = std::ranges::minmax_element(ranks);
    if (*low < 0) throw InvalidArgument("rank ", *low, " is negative");
    lowest = *low;
    const auto twice = [](int rank) {
      return InvalidArgument(
          concat("rank ", rank, " is duplicated in the mesh; a rank has one coordinate"));
    };
    if (std::int64_t(*high) - lowest < 4 * std::int64_t(n) + 64) {
      dense.assign(*high - lowest + 1, -1);
      for (int i = 0; i < n; ++i) {
        if (dense[ranks[i] - lowest] >= 0) throw twice(ranks[i]);
        dense[ranks[i] - lowest] = i;
      }
    } else {
      sparse.reserve(n);
      for (int i = 0; i < n; ++i) sparse.emplace_back(ranks[i], i);
      std::ranges::sort(sparse);
      for (int i = 1; i < n; ++i)
        if (sparse[i].first == sparse[i - 1].first) throw twice(sparse[i].first);
    }
  }

  std::optional<int> find(int rank) const {
    if (row_major)
      return rank >= 0 && rank < static_cast<int>(ranks.size()) ? std::optional<int>(rank)
                                                                : std::nullopt;
    if (!dense.empty()) {
      const std::int64_t at = std::int64_t(rank) - lowest;
      return at >= 0 && at < static_cast<std::int64_t>(dense.size()) && dense[at] >= 0
                 ? std::optional<int>(dense[at])
                 : std::nullopt;
    }
    const auto at = std::ranges::lower_bound(sparse, std::pair<int, int>(rank, 0));
    return at != sparse.end() && at->first == rank ? std::optional<int>(at->second) : std::nullopt;
  }
};

Mesh::Mesh() : table_(std::make_shared<Table>()) {}

Mesh::Mesh(std::vector<Axis> axes) : axes_(std::move(axes)) {
  table_ = std::make_shared<Table>(numbers_below<int>(product(axes_)));
  strides_ = row_major_strides(axes_);
}

Mesh::Mesh(std::vector<Axis> axes, std::vector<int> ranks)
    : axes_(closed_axes(std::move(axes), static_cast<int>(ranks.size()))) {
  const std::int64_t n = product(axes_);
  if (n != static_cast<std::int64_t>(ranks.size()))
    throw InvalidArgument("the axes have ", n, " coordinates, but ", ranks.size(),
                          " ranks were given");
  table_ = std::make_shared<Table>(std::move(ranks));
  strides_ = row_major_strides(axes_);
}

Mesh Mesh::over(std::shared_ptr<const Table> table, std::vector<Axis> axes) {
  Mesh mesh;
  const auto ranks = static_cast<std::int64_t>(table->ranks.size());
  axes = closed_axes(std::move(axes), static_cast<int>(ranks));
  const std::int64_t n = product(axes);
  if (n != ranks)
    throw InvalidArgument("the axes have ", n, " coordinates, but the mesh has ", ranks, " ranks");
  mesh.strides_ = row_major_strides(axes);
  mesh.axes_ = std::move(axes);
  mesh.table_ = std::move(table);
  return mesh;
}

const std::vector<int>& Mesh::ranks() const { return table_->ranks; }
bool Mesh::row_major() const { return table_->row_major; }
std::optional<int> Mesh::find(int rank) const { return table_->find(rank); }

bool Mesh::operator==(const Mesh& other) const {
  return axes_ == other.axes_ && (table_ == other.table_ || ranks() == other.ranks());
}

int Mesh::size(int axis) const {
  if (axis < 0 || axis >= dims())
    throw InvalidArgument("axis ", axis, " of a mesh with ", counted(dims(), "axis", "axes"));
  return axes_[axis].size;
}

int Mesh::stride(int axis) const {
  size(axis);
  return strides_[axis];
}

int Mesh::size(const std::string& axis) const { return axes_[index(axis)].size; }

std::vector<std::string> Mesh::names() const { return mapped(axes_, &Axis::name); }

bool Mesh::has_axis(const std::string& axis) const {
  return std::ranges::any_of(axes_, [&](const Axis& a) { return a.name == axis; });
}

int Mesh::index(const std::string& axis) const {
  for (int i = 0; i < dims(); ++i)
    if (axes_[i].name == axis) return i;
  throw InvalidArgument("the mesh has no axis '", axis, "'; its axes are ", list(names()));
}

std::vector<int> Mesh::indices(std::span<const std::string> axes) const {
  return mapped(axes, [&](const std::string& axis) { return index(axis); });
}

int Mesh::position(int rank) const {
  if (const auto at = find(rank)) return *at;
  throw InvalidArgument("rank ", rank, " is not in the mesh of ranks ", list(ranks()));
}

std::vector<int> Mesh::coordinate(int rank) const {
  int at = position(rank);
  std::vector<int> coordinate(axes_.size());
  for (int i = dims(); i-- > 0; at /= axes_[i].size) coordinate[i] = at % axes_[i].size;
  return coordinate;
}

int Mesh::rank_at(std::span<const int> coordinate) const {
  if (static_cast<int>(coordinate.size()) != dims())
    throw InvalidArgument("a coordinate of ", coordinate.size(), " numbers for a mesh with ",
                          counted(dims(), "axis", "axes"));
  if (ranks().empty()) throw InvalidArgument("an empty mesh has no coordinates");
  std::size_t at = 0;
  for (int i = 0; i < dims(); ++i) {
    if (coordinate[i] < 0 || coordinate[i] >= axes_[i].size)
      throw InvalidArgument("coordinate ", coordinate[i], " on axis '", axes_[i].name, "' of size ",
                            axes_[i].size);
    at += static_cast<std::size_t>(coordinate[i]) * strides_[i];
  }
  return ranks()[at];
}

std::vector<int> Mesh::sorted_axes(std::span<const int> axes) const {
  std::vector<int> sorted(axes.begin(), axes.end());
  std::ranges::sort(sorted);
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  for (int axis : sorted) size(axis);
  return sorted;
}

/// Positions of a group's members, given that of its first, with the last of `axes` the fastest: in
/// mesh order for axes as from sorted_axes().
std::vector<int> Mesh::offsets(std::span<const int> axes, int first) const {
  std::size_t total = 1;
  for (int axis : axes) total *= axes_[axis].size;
  std::vector<int> offsets(total);
  offsets[0] = first;
  std::size_t filled = 1;
  // From the innermost axis outwards, each coordinate above 0 adds a shifted copy of the positions
  // so far.
  for (std::size_t k = axes.size(); k-- > 0;) {
    const Axis& axis = axes_[axes[k]];
    for (int c = 1; c < axis.size; ++c) {
      const int shift = c * strides_[axes[k]];
      for (std::size_t i = 0; i < filled; ++i) offsets[c * filled + i] = offsets[i] + shift;
    }
    filled *= axis.size;
  }
  return offsets;
}

std::vector<int> Mesh::group(std::span<const int> axes, int rank) const {
  const auto sorted = sorted_axes(axes);
  const int at = position(rank);
  int first = at;
  for (int axis : sorted) first -= at / strides_[axis] % axes_[axis].size * strides_[axis];
  auto members = offsets(sorted, first);
  if (!table_->row_major)
    for (int& m : members) m = table_->ranks[m];
  return members;
}

std::vector<int> Mesh::group(const std::vector<std::string>& axes, int rank) const {
  return group(indices(axes), rank);
}

std::vector<int> Mesh::group(const std::string& axis, int rank) const {
  const int axes[] = {index(axis)};
  return group(axes, rank);
}

int Mesh::group_rank(std::span<const int> axes, int rank) const {
  const int at = position(rank);
  int result = 0;
  for (int axis : sorted_axes(axes))
    result = result * axes_[axis].size + at / strides_[axis] % axes_[axis].size;
  return result;
}

int Mesh::group_size(std::span<const int> axes) const {
  int n = 1;
  for (int axis : sorted_axes(axes)) n *= axes_[axis].size;
  return n;
}

GroupTable Mesh::groups(std::span<const int> axes) const {
  const auto sorted = sorted_axes(axes);
  const auto rest = complement(sorted);
  const auto inner = offsets(sorted, 0);
  GroupTable table;
  table.group_size = static_cast<int>(inner.size());
  if (ranks().empty()) return table;
  table.members.reserve(ranks().size());
  const auto& ranks = table_->ranks;
  for (int first : offsets(rest, 0))
    for (int offset : inner) table.members.push_back(ranks[first + offset]);
  return table;
}

GroupTable Mesh::groups(const std::vector<std::string>& axes) const {
  return groups(indices(axes));
}

GroupTable Mesh::groups(const std::string& axis) const {
  const int axes[] = {index(axis)};
  return groups(axes);
}

std::vector<int> Mesh::complement(std::span<const int> axes, std::span<const int> scope) const {
  const auto inside = sorted_axes(axes), around = sorted_axes(scope);
  for (int axis : inside) {
    if (std::ranges::binary_search(around, axis)) continue;
    const auto scope_names = mapped(around, [&](int a) { return axes_[a].name; });
    std::vector<int> outside;
    const int first = ranks().empty() ? 0 : ranks().front();
    if (!ranks().empty()) {
      const auto scope_group = group(around, first);
      for (int rank : group(inside, first))
        if (std::ranges::find(scope_group, rank) == scope_group.end()) outside.push_back(rank);
    }
    throw OrthogonalityError(
        concat("axis '", axes_[axis].name, "' is not in the scope ", list(scope_names),
               ": the group of rank ", first, " leaves the scope with ranks ", list(outside),
               "; choose a scope that contains the axis"),
        outside);
  }
  std::vector<int> rest;
  std::set_difference(around.begin(), around.end(), inside.begin(), inside.end(),
                      std::back_inserter(rest));
  return rest;
}

std::vector<int> Mesh::complement(std::span<const int> axes) const {
  return complement(axes, numbers_below(dims()));
}

Mesh Mesh::slice(const std::string& axis, int at) const {
  const int i = index(axis);
  if (at < 0 || at >= axes_[i].size)
    throw InvalidArgument("slice ", at, " of axis '", axis, "' of size ", axes_[i].size);
  auto mesh = slice(axis, at, at + 1);
  auto axes = axes_;
  axes.erase(axes.begin() + i);
  return over(mesh.table_, std::move(axes));
}

Mesh Mesh::slice(const std::string& axis, int begin, int end) const {
  const int i = index(axis);
  if (begin < 0 || end > axes_[i].size || begin >= end)
    throw InvalidArgument("slice [", begin, ", ", end, ") of axis '", axis, "' of size ",
                          axes_[i].size, "; take 0 <= begin < end <= size");
  auto axes = axes_;
  axes[i].size = end - begin;
  const int block = axes_[i].size * strides_[i];
  std::vector<int> kept;
  kept.reserve(ranks().size() / axes_[i].size * (end - begin));
  for (int first = 0; first < size(); first += block)
    kept.insert(kept.end(), ranks().begin() + first + begin * strides_[i],
                ranks().begin() + first + end * strides_[i]);
  return Mesh(std::move(axes), std::move(kept));
}

Mesh Mesh::submesh(const std::vector<std::string>& axes, int rank) const {
  const auto sorted = sorted_axes(indices(axes));
  return Mesh(mapped(sorted, [&](int axis) { return axes_[axis]; }), group(sorted, rank));
}

Mesh Mesh::flatten(const std::vector<std::string>& axes, const std::string& name) const {
  const auto merged = sorted_axes(indices(axes));
  if (merged.empty())
    throw InvalidArgument("flatten into '", name, "' names no axes; name at least one");
  const auto is_merged = [&](int i) { return std::ranges::binary_search(merged, i); };
  std::vector<std::string> order;
  std::vector<Axis> result;
  for (int i = 0; i < dims(); ++i) {
    if (i == merged.front()) {
      for (int m : merged) order.push_back(axes_[m].name);
      result.push_back({name, group_size(merged)});
    } else if (!is_merged(i)) {
      order.push_back(axes_[i].name);
      result.push_back(axes_[i]);
    }
  }
  return over(permute(order).table_, std::move(result));
}

Mesh Mesh::unflatten(const std::string& axis, const std::vector<Axis>& given) const {
  const int i = index(axis);
  const std::vector<Axis> into = closed_axes(given, axes_[i].size);
  const std::int64_t n = product(into);
  if (n != axes_[i].size || into.empty())
    throw InvalidArgument("axis '", axis, "' of size ", axes_[i].size,
                          " cannot be split into axes with product ", n);
  auto axes = axes_;
  axes.erase(axes.begin() + i);
  axes.insert(axes.begin() + i, into.begin(), into.end());
  return over(table_, std::move(axes));
}

Mesh Mesh::permute(const std::vector<std::string>& order) const {
  const auto picked = indices(order);
  if (static_cast<int>(order.size()) != dims() ||
      static_cast<int>(sorted_axes(picked).size()) != dims())
    throw InvalidArgument("the order ", list(order), " must name each of the axes ", list(names()),
                          " once");
  if (std::ranges::is_sorted(picked)) return *this;
  return Mesh(mapped(picked, [&](int i) { return axes_[i]; }),
              mapped(offsets(picked, 0), [&](int at) { return ranks()[at]; }));
}

Mesh Mesh::rename(const std::string& axis, const std::string& name) const {
  auto axes = axes_;
  axes[index(axis)].name = name;
  return over(table_, std::move(axes));
}

Mesh Mesh::view(std::vector<Axis> axes) const { return over(table_, std::move(axes)); }

std::string Mesh::to_string() const {
  std::string text =
      joined(axes_, " x ", [](const Axis& axis) { return concat(axis.name, "=", axis.size); });
  if (axes_.empty())
    text = "no axes";
  else
    text += concat(" (outermost first; adjacent ranks along ", axes_.back().name, ")");
  return row_major() && !ranks().empty() ? concat(text, ", ranks 0..", size() - 1)
                                         : concat(text, ", ranks ", list(ranks()));
}

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) { return out << mesh.to_string(); }

}  // namespace tessera
