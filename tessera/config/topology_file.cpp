#include "tessera/config/topology_file.h"

#include <algorithm>
#include <climits>
#include <map>

#include "tessera/base/internal/counted.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/internal/split.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/detail/fields.h"
#include "tessera/config/errors.h"
#include "tessera/launch/internal/node_list.h"
#include "tessera/mesh/mesh.h"

namespace tessera {
namespace {

using detail::Fields;
using detail::Json;

double quantity(Fields& fields, const std::string& field, double otherwise, bool bytes) {
  const Json* value = fields.raw(field);
  if (!value) return otherwise;
  if (value->is_number()) return value->get<double>();
  if (!value->is_string())
    fields.fail(field, "must be a number or a text with a unit, but is ", detail::shown(*value));
  const auto text = value->get<std::string>();
  return bytes ? detail::parse_bytes(text, fields.where(field))
               : detail::parse_seconds(text, fields.where(field));
}

LinkClass read_link(Fields& fields, const LinkClass& otherwise) {
  LinkClass link = otherwise;
  link.latency = quantity(fields, "latency", link.latency, false);
  link.bandwidth = quantity(fields, "bandwidth", link.bandwidth, true);
  return link;
}

/// The positions of names in a list that does not change any more.
class Names {
 public:
  template <class Items>
  explicit Names(const Items& items) {
    for (std::size_t i = 0; i < items.size(); ++i)
      places_.emplace(items[i].name, static_cast<int>(i));
  }
  int find(const std::string& name, const Fields& fields, const std::string& field) const {
    const auto at = places_.find(name);
    if (at != places_.end()) return at->second;
    fields.fail(field, "names '", printable(name), "', which does not exist; there are ",
                list(keys_of(places_)));
  }

 private:
  std::map<std::string, int> places_;
};

void read_switches(Fields& fields, Topology& topology) {
  std::vector<std::string> parents;
  fields.each("switches", [&](Fields& sw) {
    topology.switches.push_back({sw.required_text("name"), -1, quantity(sw, "latency", 0, false),
                                 quantity(sw, "uplink_bandwidth", 0, true)});
    parents.push_back(sw.text("parent").value_or(""));
  });
  const Names names(topology.switches);
  for (std::size_t s = 0; s < parents.size(); ++s)
    if (!parents[s].empty())
      topology.switches[s].parent = names.find(parents[s], fields, "switches");
}

void read_hosts(Fields& fields, Topology& topology) {
  if (const Json* hosts = fields.raw("hosts"); hosts && hosts->is_string()) {
    topology.hosts = parse_hosts(hosts->get<std::string>()).hosts;
    return;
  }
  const Names link_classes(topology.device_links), switches(topology.switches);
  fields.each("hosts", [&](Fields& entry) {
    Host host;
    host.name = entry.required_text("name");
    host.devices = static_cast<int>(entry.integer("devices", INT_MIN, INT_MAX).value_or(1));
    if (const auto link = entry.text("link"))
      host.link_class = link_classes.find(*link, entry, "link");
    host.rail = entry.integers("rails").value_or(std::vector<int>{});
    if (const auto sw = entry.text("switch")) host.network = switches.find(*sw, entry, "switch");
    entry.each("links", [&](Fields& link) {
      const auto between = link.integers("between").value_or(std::vector<int>{});
      if (between.size() != 2) link.fail("between", "must be two device numbers");
      host.links.push_back(
          {between[0], between[1], link_classes.find(link.required_text("class"), link, "class")});
    });
    topology.hosts.push_back(std::move(host));
  });
}

Json link_json(const LinkClass& link) {
  return Json{{"name", link.name}, {"latency", link.latency}, {"bandwidth", link.bandwidth}};
}

}  // namespace

Topology parse_hosts(const std::string& text) {
  const auto number = [&](const std::string& part) {
    if (part.empty() || part.size() > 9 ||
        part.find_first_not_of("0123456789") != std::string::npos || std::stoi(part) < 1)
      throw ConfigFileError("hosts '", printable(text), "': '", printable(part),
                            "' is not a number from 1 to 999999999; write \"16x8\" (16 "
                            "hosts with 8 devices) or \"8,8,4\"");
    return std::stoi(part);
  };
  if (const auto cross = text.find('x'); cross != std::string::npos) {
    const int hosts = number(text.substr(0, cross)), devices = number(text.substr(cross + 1));
    if (static_cast<long long>(hosts) * devices > kMostRanks)
      throw ConfigFileError("hosts '", text, "' are ", static_cast<long long>(hosts) * devices,
                            " devices; at most ", kMostRanks, " can be planned");
    return Topology::uniform(hosts, devices);
  }
  return Topology::of_counts(mapped(split(text, ','), number));
}

Topology parse_topology(const std::string& text, FileFormat format, const std::string& source) {
  const Json document = detail::parse_document(text, format, source);
  Fields fields(document, source + ": ");
  Topology topology;
  std::vector<LinkClass> links;
  fields.each("device_links", [&](Fields& entry) {
    LinkClass link = read_link(entry, {entry.required_text("name"), 1e-6, 50e9, false});
    link.shared = entry.boolean("shared").value_or(false);
    for (const LinkClass& known : links)
      if (known.name == link.name) entry.fail("name", "'", link.name, "' is listed twice");
    links.push_back(std::move(link));
  });
  if (!links.empty()) topology.device_links = std::move(links);
  if (const Json* network = fields.raw("network")) {
    Fields entry(*network, fields.where("network"));
    topology.network = read_link(entry, topology.network);
    topology.network.name = entry.text("name").value_or(topology.network.name);
    entry.finish();
  }
  topology.cross_rail_latency = quantity(fields, "cross_rail_latency", 0, false);
  read_switches(fields, topology);
  read_hosts(fields, topology);
  fields.finish();
  topology.check();
  return topology;
}

Topology read_topology(const std::string& path) {
  return parse_topology(detail::read_text(path), detail::format_of(path), path);
}

std::string format_topology(const Topology& topology, FileFormat format) {
  Json out;
  for (const Host& host : topology.hosts) {
    Json entry{{"name", host.name}, {"devices", host.devices}};
    if (host.link_class != 0) entry["link"] = topology.device_links[host.link_class].name;
    for (const DeviceLink& link : host.links)
      entry["links"].push_back(Json{{"between", {link.a, link.b}},
                                    {"class", topology.device_links[link.link_class].name}});
    if (!host.rail.empty()) entry["rails"] = host.rail;
    if (host.network >= 0) entry["switch"] = topology.switches[host.network].name;
    out["hosts"].push_back(std::move(entry));
  }
  for (const LinkClass& link : topology.device_links) {
    Json entry = link_json(link);
    if (link.shared) entry["shared"] = true;
    out["device_links"].push_back(std::move(entry));
  }
  out["network"] = link_json(topology.network);
  if (topology.cross_rail_latency != 0) out["cross_rail_latency"] = topology.cross_rail_latency;
  for (const Switch& sw : topology.switches) {
    Json entry{{"name", sw.name}};
    if (sw.parent >= 0) entry["parent"] = topology.switches[sw.parent].name;
    if (sw.latency != 0) entry["latency"] = sw.latency;
    if (sw.uplink_bandwidth != 0) entry["uplink_bandwidth"] = sw.uplink_bandwidth;
    out["switches"].push_back(std::move(entry));
  }
  return detail::write_document(out, format);
}

void write_topology(const Topology& topology, const std::string& path) {
  detail::write_text(path, format_topology(topology, detail::format_of(path)));
}

Topology topology_of(const Environment& environment) {
  Launch launch = detect_launch(environment);
  const auto nodes = environment.get("SLURM_JOB_NODELIST");
  const auto tasks = environment.get("SLURM_TASKS_PER_NODE");
  if (launch.launcher == "single" && nodes && tasks) {
    launch.launcher = "slurm";
    launch.hosts = expand_node_list(*nodes);
    launch.ranks_per_host = expand_task_counts(*tasks);
  }
  return topology_of(launch);
}

Topology topology_of(const Launch& launch) {
  std::vector<int> counts = launch.ranks_per_host;
  if (counts.empty()) {
    if (launch.local_size == launch.world_size)
      counts = {launch.world_size};
    else if (!launch.hosts.empty() &&
             launch.world_size == launch.local_size * static_cast<int>(launch.hosts.size()))
      counts.assign(launch.hosts.size(), launch.local_size);
    else
      throw ConfigurationError("the launcher '", launch.launcher, "' does not say how many of its ",
                               launch.world_size,
                               " ranks run on each host; give the hosts (a topology file, "
                               "or LaunchOverrides::ranks_per_host)");
  }
  Topology topology = Topology::of_counts(counts);
  if (!launch.hosts.empty()) {
    if (launch.hosts.size() != counts.size())
      throw ConfigurationError("the launcher names ", counted(launch.hosts.size(), "host"), ' ',
                               list(launch.hosts), ", but ranks for ",
                               counted(counts.size(), "host"), ' ', list(counts));
    for (std::size_t h = 0; h < counts.size(); ++h) topology.hosts[h].name = launch.hosts[h];
  }
  topology.check();
  return topology;
}

}  // namespace tessera
