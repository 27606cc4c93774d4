#include "tessera/comm/job/find_topology.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/backends/hosts/host_map.h"
#include "tessera/comm/backends/hosts/hosts.h"
#include "tessera/launch/launch.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

/// What a rank says of its host; travels as lines.
struct HostWord {
  int local_rank = 0;
  std::string name, mark;
};

std::string word_of(const DistributedManager& manager, const MachineLook& look) {
  const Launch& launch = manager.launch();
  std::string name, mark;
  if (look.host) {
    name = mark = look.host();
  } else {
    const bool named =
        launch.node_rank >= 0 && launch.node_rank < static_cast<int>(launch.hosts.size());
    name = named ? launch.hosts[launch.node_rank] : Environment::of_process().hostname;
    if (name.empty()) name = "host";
    mark = mark_of_host();
  }
  if (name.empty() || name.find('\n') != std::string::npos)
    throw MappingError("the name of rank ", manager.rank(), "'s host is empty or has two lines");
  return concat(launch.local_rank, '\n', name, '\n', mark);
}

HostWord read_word(const std::string& text) {
  const auto first = text.find('\n'), second = text.find('\n', first + 1);
  return {std::stoi(text.substr(0, first)), text.substr(first + 1, second - first - 1),
          text.substr(second + 1)};
}

FoundTopology hosts_of(const std::vector<HostWord>& words, const detail::HostMap& map) {
  FoundTopology found;
  found.slot_of.resize(words.size());
  std::set<std::string> names;
  int slot = 0;
  for (std::vector<int> ranks : map.hosts) {
    std::ranges::stable_sort(ranks, {}, [&](int r) { return words[r].local_rank; });
    const std::string said = words[ranks.front()].name;
    std::string name = said;
    for (int n = 2; !names.insert(name).second; ++n) name = concat(said, '-', n);
    if (name != said)
      found.unknown.push_back(concat("hosts '", said, "' and '", name, "' have the same name"));
    found.topology.hosts.push_back({.name = name, .devices = static_cast<int>(ranks.size())});
    for (const int r : ranks) found.slot_of[r] = slot++;
  }
  found.topology.check();
  return found;
}

}  // namespace

FoundTopology find_topology(const DistributedManager& manager, const MachineLook& look) {
  const Group world = manager.world();
  const std::string what = "find_topology";
  const auto words = mapped(
      agree::all<std::string, MappingError>(world, what, [&] { return word_of(manager, look); }),
      read_word);
  const auto map = detail::HostMap::of(mapped(words, &HostWord::mark));
  const auto& mine = map.hosts[map.host_of[manager.rank()]];
  const auto insides = agree::all<std::string, MappingError>(world, what, [&] {
    const bool speaks = mine.front() == manager.rank() && look.inside;
    return speaks ? look.inside(static_cast<int>(mine.size())) : std::string();
  });
  const auto around = agree::first<std::string, MappingError>(
      world, what, [&] { return look.around ? look.around() : std::string(); });
  FoundTopology found = hosts_of(words, map);
  if (look.join) {
    std::vector<std::string> by_host;
    for (const auto& ranks : map.hosts) by_host.push_back(insides[ranks.front()]);
    return look.join(std::move(found), by_host, around);
  }
  found.unknown.push_back(
      "nobody looked at the inside of the hosts and at what connects them: machine_look() of "
      "Tessera::config does");
  return found;
}

RankMapping create_process_groups(const DistributedManager& manager,
                                  const ProcessGroupConfig& config, const FoundTopology& found,
                                  const std::vector<Traffic>& traffic, bool eager) {
  if (found.topology.slots() != manager.world_size())
    throw MappingError("the machines have ", found.topology.slots(), " slots and the world ",
                       manager.world_size(), " ranks; find them for this job");
  const CostModel model(found.topology, config.mesh(manager.world_size()).axes(), traffic);
  // Without traffic the order of the ranks is kept.
  RankMapping mapping =
      traffic.empty() ? given_mapping(model, found.slot_of) : optimise_mapping(model);
  manager.create_process_groups(config, found.ranks(mapping), eager);
  return mapping;
}

}  // namespace tessera
