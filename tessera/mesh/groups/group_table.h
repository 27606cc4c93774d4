#pragma once
// GroupTable: all groups of one family in a flat list. In a mesh the groups of a set of axes all
// have the same size.

#include <cstddef>
#include <span>
#include <vector>

namespace tessera {

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

}  // namespace tessera
