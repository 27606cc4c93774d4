#pragma once
// HostMap: which ranks of a group share a host.

#include <string>
#include <vector>

namespace tessera::detail {

struct HostMap {
  /// Group ranks of each host, ascending; hosts in the order of their first ranks. The first rank
  /// of a host is its leader.
  std::vector<std::vector<int>> hosts;
  /// Each group rank has its host, and its place among the ranks of that host.
  std::vector<int> host_of, place_of;
  /// True if the ranks of the hosts, one host after the other, are 0, 1, 2, ...
  bool in_order = true;

  /// Ranks of equal marks share a host.
  static HostMap of(const std::vector<std::string>& marks);
  int size() const { return static_cast<int>(host_of.size()); }
  int count() const { return static_cast<int>(hosts.size()); }
};

}  // namespace tessera::detail
