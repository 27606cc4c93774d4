#include "tessera/layout/mesh.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::int64_t product(const std::vector<Axis>& axes) {
  std::set<std::string> names;
  std::int64_t n = 1;
  for (const Axis& axis : axes) {
    if (axis.size < 1) throw InvalidArgument(concat("mesh axis '", axis.name, "' has size ", axis.size, "; give a size of at least 1"));
    if (!names.insert(axis.name).second) throw InvalidArgument(concat("mesh axis '", axis.name, "' is named twice; give each axis its own name"));
    n *= axis.size;
    if (n > std::numeric_limits<int>::max())
      throw InvalidArgument(concat("the mesh has more than ", std::numeric_limits<int>::max(), " ranks"));
  }
  return n;
}

std::vector<int> iota(std::int64_t n) {
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Mesh::Mesh(std::vector<Axis> axes) : axes_(std::move(axes)), ranks_(iota(product(axes_))) {}

Mesh::Mesh(std::vector<Axis> axes, std::vector<int> ranks) : axes_(std::move(axes)), ranks_(std::move(ranks)) {
  const std::int64_t n = product(axes_);
  if (n != static_cast<std::int64_t>(ranks_.size()))
    throw InvalidArgument(concat("the axes have ", n, " coordinates, but ", ranks_.size(), " ranks were given"));
  auto sorted = ranks_;
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && sorted.front() < 0) throw InvalidArgument(concat("rank ", sorted.front(), " is negative"));
  if (auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    throw InvalidArgument(concat("rank ", *twice, " stands twice in the mesh; a rank has one coordinate"));
}

int Mesh::size(int axis) const {
  if (axis < 0 || axis >= dims()) throw InvalidArgument(concat("axis ", axis, " of a mesh with ", dims(), " axes"));
  return axes_[axis].size;
}

int Mesh::size(const std::string& axis) const { return axes_[index(axis)].size; }

int Mesh::index(const std::string& axis) const {
  std::vector<std::string> names;
  for (int i = 0; i < dims(); ++i) {
    if (axes_[i].name == axis) return i;
    names.push_back(axes_[i].name);
  }
  throw InvalidArgument(concat("the mesh has no axis '", axis, "'; its axes are ", list(names)));
}

bool Mesh::contains(int rank) const { return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end(); }

std::vector<int> Mesh::coordinate(int rank) const {
  const auto at = std::find(ranks_.begin(), ranks_.end(), rank);
  if (at == ranks_.end()) throw InvalidArgument(concat("rank ", rank, " is not in the mesh of ranks ", list(ranks_)));
  auto position = static_cast<int>(at - ranks_.begin());
  std::vector<int> coordinate(axes_.size());
  for (int i = dims(); i-- > 0; position /= axes_[i].size) coordinate[i] = position % axes_[i].size;
  return coordinate;
}

int Mesh::rank_at(std::span<const int> coordinate) const {
  if (static_cast<int>(coordinate.size()) != dims())
    throw InvalidArgument(concat("a coordinate of ", coordinate.size(), " numbers for a mesh with ", dims(), " axes"));
  std::size_t position = 0;
  for (int i = 0; i < dims(); ++i) {
    if (coordinate[i] < 0 || coordinate[i] >= axes_[i].size)
      throw InvalidArgument(concat("coordinate ", coordinate[i], " on axis '", axes_[i].name, "' of size ", axes_[i].size));
    position = position * axes_[i].size + coordinate[i];
  }
  return ranks_[position];
}

std::vector<int> Mesh::group(std::span<const int> axes, int rank) const {
  auto at = coordinate(rank);
  std::vector<bool> free(axes_.size(), false);
  for (int axis : axes) {
    size(axis);
    free[axis] = true;
  }
  for (int i = 0; i < dims(); ++i)
    if (free[i]) at[i] = 0;
  std::vector<int> members;
  for (;;) {
    members.push_back(rank_at(at));
    int i = dims() - 1;
    for (; i >= 0; --i) {
      if (!free[i]) continue;
      if (++at[i] < axes_[i].size) break;
      at[i] = 0;
    }
    if (i < 0) return members;
  }
}

std::vector<int> Mesh::group(const std::string& axis, int rank) const {
  const int axes[] = {index(axis)};
  return group(axes, rank);
}

}  // namespace tessera
