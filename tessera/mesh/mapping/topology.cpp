#include "tessera/mesh/mapping/topology.h"

#include <cmath>
#include <string_view>
#include <unordered_set>

#include "tessera/base/internal/counted.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mesh.h"

namespace tessera {
namespace {

void check_link(const LinkClass& link) {
  if (!(link.bandwidth > 0) || !std::isfinite(link.bandwidth))
    throw MappingError("link class '", link.name, "' has a bandwidth of ", link.bandwidth,
                       " bytes/s; it must be finite and above 0");
  if (!(link.latency >= 0) || !std::isfinite(link.latency))
    throw MappingError("link class '", link.name, "' has a latency of ", link.latency,
                       " s; it must be finite and at least 0");
}

void check_name(const char* what, const std::string& name) {
  if (const auto fault = name_fault(name))
    throw MappingError("the name of ", what, " '", printable(name), "' ", *fault,
                       "; it goes into rank files and host files");
  // A number sign begins a comment there, and an equals sign ends a rank's number.
  if (name.find_first_of("#=,") != std::string::npos)
    throw MappingError("the name of ", what, " '", name,
                       "' holds '#', '=' or ',', which end a name in rank files");
}

// Each switch is visited once: chains may be long.
void check_tree(const std::vector<Switch>& switches) {
  std::vector<int> walk_of(switches.size(), -1);
  for (int s = 0; s < static_cast<int>(switches.size()); ++s) {
    int at = s;
    while (at >= 0 && walk_of[at] < 0) {
      walk_of[at] = s;
      at = switches[at].parent;
    }
    if (at >= 0 && walk_of[at] == s)
      throw MappingError("switch '", switches[at].name,
                         "' is its own ancestor; switches form a tree");
  }
}

}  // namespace

Topology Topology::uniform(int hosts, int devices) {
  if (hosts < 1) throw MappingError(hosts, " hosts; give at least 1");
  if (hosts > kMostRanks)
    throw MappingError(hosts, " hosts; at most ", kMostRanks, " can be planned");
  return of_counts(std::vector<int>(hosts, devices));
}

Topology Topology::of_counts(const std::vector<int>& devices) {
  Topology topology;
  topology.hosts.reserve(devices.size());
  for (std::size_t i = 0; i < devices.size(); ++i)
    topology.hosts.push_back({.name = concat("host", i), .devices = devices[i]});
  topology.check();
  return topology;
}

int Topology::slots() const {
  int n = 0;
  for (const Host& host : hosts) n += host.devices;
  return n;
}

int Topology::host_of(int slot) const {
  int first = 0;
  for (std::size_t h = 0; h < hosts.size(); first += hosts[h++].devices)
    if (slot >= first && slot < first + hosts[h].devices) return static_cast<int>(h);
  throw MappingError("slot ", slot, " of ", counted(first, "slot"), " on ",
                     counted(hosts.size(), "host"));
}

std::vector<int> Topology::hosts_of_slots() const {
  std::vector<int> hosts_of;
  for (std::size_t h = 0; h < hosts.size(); ++h)
    hosts_of.insert(hosts_of.end(), hosts[h].devices, static_cast<int>(h));
  return hosts_of;
}

int Topology::first_slot(int host) const {
  int first = 0;
  for (int h = 0; h < host; ++h) first += hosts[h].devices;
  return first;
}

int Topology::rail_of(int host, int device) const {
  return hosts[host].rail.empty() ? 0 : hosts[host].rail[device];
}

namespace {

void check_host(const Topology& topology, const Host& host) {
  if (host.devices < 1)
    throw MappingError("host '", host.name, "' has ", host.devices,
                       " devices; it needs at least 1");
  const auto known_class = [&](int link) {
    return link >= 0 && link < static_cast<int>(topology.device_links.size());
  };
  if (!known_class(host.link_class))
    throw MappingError("host '", host.name, "' has link class ", host.link_class,
                       ", but there are ", topology.device_links.size());
  for (const DeviceLink& link : host.links)
    if (link.a < 0 || link.b < 0 || link.a >= host.devices || link.b >= host.devices ||
        link.a == link.b || !known_class(link.link_class))
      throw MappingError("host '", host.name, "' has a link between devices ", link.a, " and ",
                         link.b, " of class ", link.link_class, ", but ", host.devices,
                         " devices and ", topology.device_links.size(), " link classes");
  if (!host.rail.empty() && static_cast<int>(host.rail.size()) != host.devices)
    throw MappingError("host '", host.name, "' has ", host.devices, " devices, but ",
                       host.rail.size(), " rails are given; give one per device");
  for (int rail : host.rail)
    if (rail < 0 || rail > 4095)
      throw MappingError("host '", host.name, "' has a device on rail ", rail,
                         "; rails are numbered 0 to 4095");
  if (host.network < -1 || host.network >= static_cast<int>(topology.switches.size()) ||
      (host.network < 0 && !topology.switches.empty()))
    throw MappingError("host '", host.name, "' is connected to switch ", host.network,
                       ", but there are ", topology.switches.size(), " switches");
}

void check_switch(const Topology& topology, const Switch& sw) {
  if (sw.parent < -1 || sw.parent >= static_cast<int>(topology.switches.size()))
    throw MappingError("switch '", sw.name, "' is connected to switch ", sw.parent,
                       ", but there are ", topology.switches.size());
  if (!(sw.latency >= 0) || !(sw.uplink_bandwidth >= 0))
    throw MappingError("switch '", sw.name, "' has latency ", sw.latency, " and uplink bandwidth ",
                       sw.uplink_bandwidth, "; both must be at least 0");
}

}  // namespace

void Topology::check() const {
  if (hosts.empty()) throw MappingError("a topology without hosts; give at least one");
  std::unordered_set<std::string_view> names(hosts.size());
  long long slots = 0;
  for (const Host& host : hosts) {
    check_name("host", host.name);
    if (!names.insert(host.name).second)
      throw MappingError("host '", host.name, "' is listed twice; give its devices once");
    check_host(*this, host);
    slots += host.devices;
  }
  if (slots > kMostRanks)
    throw MappingError("the hosts have ", slots, " devices; at most ", kMostRanks,
                       " can be planned");
  for (const LinkClass& link : device_links) check_link(link);
  check_link(network);
  if (!(cross_rail_latency >= 0))
    throw MappingError("the cross-rail latency is ", cross_rail_latency,
                       " s; it must be at least 0");
  std::unordered_set<std::string_view> switch_names(switches.size());
  std::vector<std::string> roots;
  for (const Switch& sw : switches) {
    check_name("switch", sw.name);
    if (!switch_names.insert(sw.name).second)
      throw MappingError("switch '", sw.name, "' is listed twice");
    check_switch(*this, sw);
    if (sw.parent < 0) roots.push_back(sw.name);
  }
  check_tree(switches);
  if (!switches.empty() && roots.size() != 1)
    throw MappingError("the switches have ", roots.size(), " roots ", list(roots),
                       "; connect them below one switch");
}

std::vector<int> FoundTopology::ranks(const RankMapping& mapping) const {
  const int slots = static_cast<int>(slot_of.size());
  if (static_cast<int>(mapping.slot_of.size()) != slots)
    throw MappingError("a mapping of ", mapping.slot_of.size(), " positions for a job of ", slots,
                       " ranks; map a mesh over all of them");
  std::vector<int> rank_on(slot_of.size(), -1), ranks;
  for (int r = 0; r < slots; ++r) {
    if (slot_of[r] < 0 || slot_of[r] >= slots || rank_on[slot_of[r]] >= 0)
      throw MappingError("rank ", r, " of ", slots, " is said to be on slot ", slot_of[r],
                         "; each slot from 0 has one rank");
    rank_on[slot_of[r]] = r;
  }
  for (const int slot : mapping.slot_of) {
    if (slot < 0 || slot >= slots)
      throw MappingError("a mapping has slot ", slot, ", but the slots are 0 to ", slots - 1);
    ranks.push_back(rank_on[slot]);
  }
  return ranks;
}

}  // namespace tessera
