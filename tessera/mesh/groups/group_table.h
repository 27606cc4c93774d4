#pragma once
// GroupTable: all groups of one family, flat. In a mesh the groups of a set of axes have one size.

#include <cstddef>
#include <span>
#include <vector>

namespace tessera {

/// Groups of equal size, one after the other. Position in a group is the group rank and binds; the
/// order of the groups among themselves does not.
struct GroupTable {
  int group_size = 1;
  /// count() * group_size ranks.
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

}  // namespace tessera
