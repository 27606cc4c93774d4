#include "tessera/mesh/mapping/internal/probe.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "tessera/base/internal/counted.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

constexpr double kBandwidthGap = 1.6, kLatencyGap = 2, kSharedBelow = 0.6;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const auto n = values.size();
  return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/// Samples that are similar, by index.
struct Class {
  std::vector<int> samples;
  double latency = 0, bandwidth = 0;  // medians
};

/// Divides the samples where the sorted values jump by more than the gap.
std::vector<std::vector<int>> divided(std::vector<int> samples, const std::vector<LinkSample>& all,
                                      double LinkSample::* value, double gap) {
  std::ranges::stable_sort(samples, [&](int a, int b) { return all[a].*value < all[b].*value; });
  std::vector<std::vector<int>> parts;
  for (const int s : samples) {
    if (parts.empty() || all[s].*value > gap * all[parts.back().back()].*value)
      parts.emplace_back();
    parts.back().push_back(s);
  }
  return parts;
}

/// Fastest first.
std::vector<Class> classes_of(const std::vector<int>& samples, const std::vector<LinkSample>& all) {
  std::vector<Class> classes;
  for (const auto& alike : divided(samples, all, &LinkSample::bandwidth, kBandwidthGap))
    for (const auto& part : divided(alike, all, &LinkSample::latency, kLatencyGap)) {
      std::vector<double> latencies, bandwidths;
      for (const int s : part) {
        latencies.push_back(all[s].latency);
        bandwidths.push_back(all[s].bandwidth);
      }
      classes.push_back({part, median(latencies), median(bandwidths)});
    }
  std::ranges::stable_sort(classes, [](const Class& a, const Class& b) {
    return a.bandwidth != b.bandwidth ? a.bandwidth > b.bandwidth : a.latency < b.latency;
  });
  return classes;
}

void check(const Probe& probe) {
  if (probe.hosts.empty() || probe.hosts.size() != probe.devices.size())
    throw MappingError("a probe of ", counted(probe.hosts.size(), "host"), " with ",
                       probe.devices.size(), " numbers of devices; give one for each");
  const long long slots = std::accumulate(probe.devices.begin(), probe.devices.end(), 0LL);
  for (const LinkSample& s : probe.samples) {
    if (s.a < 0 || s.b < 0 || s.a >= slots || s.b >= slots || s.a == s.b)
      throw MappingError("a probe measured between slots ", s.a, " and ", s.b, ", but there are ",
                         slots, " slots");
    if (!(s.latency > 0) || !(s.bandwidth > 0) || !std::isfinite(s.latency) ||
        !std::isfinite(s.bandwidth))
      throw MappingError("a probe measured ", s.latency, " s and ", s.bandwidth,
                         " bytes/s between slots ", s.a, " and ", s.b,
                         "; both must be finite and above 0");
  }
  if (!probe.kept.empty() && probe.kept.size() != probe.hosts.size())
    throw MappingError("a probe of ", counted(probe.hosts.size(), "host"), " with ",
                       probe.kept.size(), " shares; give one for each or none");
}

void fit_inside(const Probe& probe, const std::vector<int>& host_of, const std::vector<int>& inside,
                ProbedTopology& result) {
  Topology& topology = result.topology;
  const auto classes = classes_of(inside, probe.samples);
  if (classes.empty()) {
    if (*std::ranges::max_element(probe.devices) > 1)
      result.notes.push_back("no pair inside a host was measured: their links are assumed");
    return;
  }
  std::vector<int> class_of(probe.samples.size(), -1);
  topology.device_links.clear();
  for (std::size_t c = 0; c < classes.size(); ++c) {
    topology.device_links.push_back({classes.size() == 1 ? "host" : concat("link", c),
                                     classes[c].latency, classes[c].bandwidth, false});
    for (const int s : classes[c].samples) class_of[s] = static_cast<int>(c);
  }
  std::vector<std::map<int, int>> votes(probe.hosts.size());
  std::map<int, int> all_votes;
  for (const int s : inside) {
    ++votes[host_of[probe.samples[s].a]][class_of[s]];
    ++all_votes[class_of[s]];
  }
  const auto most = [](const std::map<int, int>& counts) {
    return std::ranges::max_element(
               counts, [](const auto& a, const auto& b) { return a.second < b.second; })
        ->first;
  };
  for (std::size_t h = 0; h < probe.hosts.size(); ++h)
    topology.hosts[h].link_class = most(votes[h].empty() ? all_votes : votes[h]);
  for (const int s : inside) {
    Host& host = topology.hosts[host_of[probe.samples[s].a]];
    if (class_of[s] == host.link_class) continue;
    const int first = topology.first_slot(host_of[probe.samples[s].a]);
    host.links.push_back({probe.samples[s].a - first, probe.samples[s].b - first, class_of[s]});
  }
  std::map<int, std::vector<double>> kept;
  for (std::size_t h = 0; h < probe.kept.size(); ++h)
    if (!votes[h].empty() && probe.devices[h] >= 4)
      kept[topology.hosts[h].link_class].push_back(probe.kept[h]);
  for (const auto& [c, shares] : kept)
    topology.device_links[c].shared = median(shares) < kSharedBelow;
}

/// The sets of hosts that near links connect; none if near and far do not divide the hosts into
/// sets.
std::vector<std::vector<int>> racks_of(int hosts, const std::set<std::pair<int, int>>& near) {
  std::vector<int> rack(hosts, -1);
  std::vector<std::vector<int>> racks;
  for (int h = 0; h < hosts; ++h) {
    if (rack[h] >= 0) continue;
    racks.push_back({h});
    rack[h] = static_cast<int>(racks.size()) - 1;
    for (std::size_t i = 0; i < racks.back().size(); ++i)
      for (int other = 0; other < hosts; ++other) {
        const int at = racks.back()[i];
        if (rack[other] >= 0 || !near.count(std::minmax(at, other))) continue;
        rack[other] = rack[h];
        racks.back().push_back(other);
      }
  }
  for (auto& members : racks) {
    std::ranges::sort(members);
    for (const int a : members)
      for (const int b : members)
        if (a < b && !near.count({a, b})) return {};
  }
  return racks;
}

void fit_between(const Probe& probe, const std::vector<int>& host_of,
                 const std::vector<int>& between, ProbedTopology& result) {
  Topology& topology = result.topology;
  const int hosts = static_cast<int>(probe.hosts.size());
  if (between.empty()) {
    if (hosts > 1) result.notes.push_back("no pair of hosts was measured: the network is assumed");
    return;
  }
  const auto classes = classes_of(between, probe.samples);
  std::vector<double> latencies, bandwidths;
  std::set<std::pair<int, int>> measured, near;
  for (const int s : between) {
    latencies.push_back(probe.samples[s].latency);
    bandwidths.push_back(probe.samples[s].bandwidth);
    measured.insert(std::minmax(host_of[probe.samples[s].a], host_of[probe.samples[s].b]));
  }
  topology.network.latency = median(latencies);
  topology.network.bandwidth = std::max(median(bandwidths), probe.adapter);
  if (classes.size() == 1) return;
  std::string why;
  if (classes.size() > 2) {
    why = concat("they fall into ", classes.size(), " classes");
  } else if (static_cast<int>(measured.size()) != hosts * (hosts - 1) / 2) {
    why = concat("only ", measured.size(), " of ", hosts * (hosts - 1) / 2,
                 " pairs of hosts were measured");
  } else {
    // Near is the class with less latency; if they are equal, the one with more bandwidth.
    const bool first = classes[0].latency <= classes[1].latency;
    const Class &close = classes[first ? 0 : 1], &far = classes[first ? 1 : 0];
    for (const int s : close.samples)
      near.insert(std::minmax(host_of[probe.samples[s].a], host_of[probe.samples[s].b]));
    const auto racks = racks_of(hosts, near);
    if (!racks.empty()) {
      topology.network.latency = close.latency;
      topology.network.bandwidth = std::max(close.bandwidth, probe.adapter);
      topology.switches.push_back({.name = "root"});
      const double uplink = far.bandwidth < close.bandwidth / kBandwidthGap ? far.bandwidth : 0;
      for (std::size_t r = 0; r < racks.size(); ++r) {
        topology.switches.push_back(
            {concat("switch", r), 0, std::max(0.0, 0.5 * (far.latency - close.latency)), uplink});
        for (const int h : racks[r]) topology.hosts[h].network = static_cast<int>(r) + 1;
      }
      return;
    }
    why = "near and far do not divide the hosts into sets";
  }
  result.notes.push_back(concat("the links between hosts differ, but ", why,
                                ": one network of their medians is written"));
}

}  // namespace

ProbedTopology topology_of_probe(const Probe& probe) {
  check(probe);
  ProbedTopology result;
  Topology& topology = result.topology;
  topology = Topology::of_counts(probe.devices);
  for (std::size_t h = 0; h < probe.hosts.size(); ++h) topology.hosts[h].name = probe.hosts[h];
  const auto host_of = topology.hosts_of_slots();
  std::vector<int> inside, between;
  for (std::size_t s = 0; s < probe.samples.size(); ++s)
    (host_of[probe.samples[s].a] == host_of[probe.samples[s].b] ? inside : between)
        .push_back(static_cast<int>(s));
  fit_inside(probe, host_of, inside, result);
  fit_between(probe, host_of, between, result);
  topology.check();
  return result;
}

}  // namespace tessera
