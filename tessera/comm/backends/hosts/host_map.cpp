#include "tessera/comm/backends/hosts/host_map.h"

#include <map>

namespace tessera::detail {

HostMap HostMap::of(const std::vector<std::string>& marks) {
  HostMap map;
  std::map<std::string, int> known;
  for (int rank = 0; rank < static_cast<int>(marks.size()); ++rank) {
    const auto [at, added] =
        known.emplace(marks[static_cast<std::size_t>(rank)], static_cast<int>(map.hosts.size()));
    if (added) map.hosts.emplace_back();
    auto& host = map.hosts[static_cast<std::size_t>(at->second)];
    map.host_of.push_back(at->second);
    map.place_of.push_back(static_cast<int>(host.size()));
    host.push_back(rank);
  }
  int next = 0;
  for (const auto& host : map.hosts)
    for (const int rank : host) map.in_order = map.in_order && rank == next++;
  return map;
}

}  // namespace tessera::detail
