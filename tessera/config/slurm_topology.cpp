#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "tessera/base/internal/name.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/errors.h"
#include "tessera/config/topology_file.h"
#include "tessera/launch/internal/node_list.h"

namespace tessera {
namespace {

struct ConfSwitch {
  std::string name;
  std::vector<std::string> switches, nodes;
  int line = 0;
};

/// Parses lines "Key=value Key=value", with keys in any case, '#' as comment to the end of the
/// line, and a backslash at the end that continues it.
std::vector<ConfSwitch> parse_conf(const std::string& conf, const std::string& source) {
  std::vector<ConfSwitch> found;
  TextReader in(conf);
  std::string line, whole;
  int number = 0, began = 0;
  const auto fail = [&](const auto&... why) {
    return ConfigFileError(source, ":", began, ": ", why...);
  };
  const auto handle = [&](std::string text) {
    text = text.substr(0, text.find('#'));
    TextReader words(text);
    std::map<std::string, std::string> values;
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      if (equals == std::string::npos) throw fail("'", printable(word), "' is not Key=value");
      std::string key = word.substr(0, equals);
      std::ranges::transform(key, key.begin(), to_lower);
      if (key != "switchname" && key != "switches" && key != "nodes" && key != "linkspeed")
        throw fail("'", printable(word.substr(0, equals)),
                   "' is unknown; a line of the tree plugin has SwitchName, Switches, Nodes "
                   "and LinkSpeed");
      if (!values.emplace(key, word.substr(equals + 1)).second)
        throw fail("'", word.substr(0, equals), "' is duplicated");
    }
    if (values.empty()) return;
    if (!values.contains("switchname")) throw fail("SwitchName is missing");
    if (const auto fault = name_fault(values["switchname"]))
      throw fail("the SwitchName '", printable(values["switchname"]), "' ", *fault);
    if (!values.contains("switches") && !values.contains("nodes"))
      throw fail("switch '", values["switchname"], "' has neither Switches nor Nodes");
    try {
      const auto below = [&](const char* key) {
        return values.contains(key) ? expand_node_list(values[key]) : std::vector<std::string>{};
      };
      found.push_back({values["switchname"], below("switches"), below("nodes"), began});
    } catch (const ConfigurationError& error) {
      throw fail(error.what());
    }
  };
  while (std::getline(in, line)) {
    ++number;
    if (whole.empty()) began = number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && line.back() == '\\') {
      whole += line.substr(0, line.size() - 1) + " ";
      continue;
    }
    handle(whole + line);
    whole.clear();
  }
  if (!whole.empty()) handle(whole);
  return found;
}

/// What is connected to what, by names.
struct SwitchTree {
  SwitchTree(const std::vector<ConfSwitch>& switches, const std::string& source) : found(switches) {
    const auto fail = [&](int s, const auto&... why) {
      return ConfigFileError(concat(source, ":", found[s].line, ": ", why...));
    };
    const int count = static_cast<int>(found.size());
    for (int s = 0; s < count; ++s)
      if (!index.emplace(found[s].name, s).second)
        throw fail(s, "switch '", found[s].name, "' is defined twice");
    for (int s = 0; s < count; ++s) {
      for (const auto& child : found[s].switches) {
        if (!index.contains(child)) throw fail(s, "switch '", child, "' is not defined");
        if (!parent.emplace(child, s).second)
          throw fail(s, "switch '", child, "' is connected to both '", found[parent[child]].name,
                     "' and '", found[s].name, "'; switches form a tree here");
      }
      for (const auto& node : found[s].nodes)
        if (!leaf_of.emplace(node, s).second)
          throw fail(s, "node '", node, "' is connected to both '", found[leaf_of[node]].name,
                     "' and '", found[s].name, "'");
    }
  }
  int above(int s) const {
    const auto at = parent.find(found[s].name);
    return at == parent.end() ? -1 : at->second;
  }
  const std::vector<ConfSwitch>& found;
  std::map<std::string, int> index, parent, leaf_of;
};

}  // namespace

Topology with_slurm_switches(Topology topology, const std::string& conf, double latency,
                             double uplink_bandwidth, const std::string& source) {
  const auto found = parse_conf(conf, source);
  const SwitchTree tree(found, source);
  // Only the switches that the hosts need, and none above the lowest one that connects them all.
  std::map<int, int> hosts_below;
  std::vector<int> leaf;
  for (const Host& host : topology.hosts) {
    const auto at = tree.leaf_of.find(host.name);
    if (at == tree.leaf_of.end())
      throw ConfigFileError(source, ": host '", host.name,
                            "' is connected to no switch; add it to the Nodes of one");
    leaf.push_back(at->second);
    std::size_t steps = 0;
    for (int s = at->second; s >= 0; s = tree.above(s)) {
      if (++steps > found.size())
        throw ConfigFileError(source, ": switch '", found[s].name,
                              "' is its own ancestor; switches form a tree");
      ++hosts_below[s];
    }
  }
  const int all = static_cast<int>(topology.hosts.size());
  std::optional<int> root;
  for (int s = leaf.front(); s >= 0 && !root; s = tree.above(s))
    if (hosts_below[s] == all) root = s;
  if (!root)
    throw ConfigFileError(source,
                          ": the hosts are connected to trees of switches that no switch "
                          "connects; add one above them");
  std::map<int, int> kept;
  topology.switches.clear();
  const std::function<void(int, int)> keep = [&](int s, int to) {
    kept[s] = static_cast<int>(topology.switches.size());
    topology.switches.push_back(
        {found[s].name, to, to < 0 ? 0 : latency, to < 0 ? 0 : uplink_bandwidth});
    const int here = kept[s];
    for (const auto& child : found[s].switches)
      if (const int below = tree.index.at(child); hosts_below.contains(below)) keep(below, here);
  };
  keep(*root, -1);
  for (std::size_t h = 0; h < topology.hosts.size(); ++h)
    topology.hosts[h].network = kept.at(leaf[h]);
  topology.check();
  return topology;
}

Topology read_slurm_topology(const std::string& path, Topology hosts) {
  return with_slurm_switches(std::move(hosts), detail::read_text(path), 1e-6, 0, path);
}

}  // namespace tessera
