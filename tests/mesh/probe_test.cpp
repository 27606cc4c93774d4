// A topology is measured through its own model, and comes back.
#include "tessera/mesh/mapping/internal/probe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "refused.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

/// What a probe sees of the topology, off by up to 10 % each.
Probe measured(const Topology& topology, std::mt19937& random) {
  std::uniform_real_distribution<double> off(0.9, 1.1);
  Probe probe;
  for (const Host& host : topology.hosts) {
    probe.hosts.push_back(host.name);
    probe.devices.push_back(host.devices);
    probe.kept.push_back(topology.device_links[host.link_class].shared ? 0.5 * off(random)
                                                                       : off(random));
  }
  const auto host_of = topology.hosts_of_slots();
  for (int a = 0; a < topology.slots(); ++a)
    for (int b = a + 1; b < topology.slots(); ++b) {
      double latency = topology.network.latency, bandwidth = topology.network.bandwidth;
      const Host &from = topology.hosts[host_of[a]], &to = topology.hosts[host_of[b]];
      if (&from == &to) {
        int c = from.link_class;
        const int first = topology.first_slot(host_of[a]);
        for (const DeviceLink& link : from.links)
          if (std::minmax(link.a, link.b) == std::minmax(a - first, b - first)) c = link.link_class;
        latency = topology.device_links[c].latency;
        bandwidth = topology.device_links[c].bandwidth;
      } else {
        // one pair for two hosts
        if (from.devices > 1 && a != topology.first_slot(host_of[a])) continue;
        if (to.devices > 1 && b != topology.first_slot(host_of[b])) continue;
        if (from.network != to.network)
          for (const int sw : {from.network, to.network}) {
            latency += topology.switches[sw].latency;
            if (topology.switches[sw].uplink_bandwidth > 0)
              bandwidth = std::min(bandwidth, topology.switches[sw].uplink_bandwidth);
          }
      }
      probe.samples.push_back({b, a, latency * off(random), bandwidth * off(random)});
    }
  std::shuffle(probe.samples.begin(), probe.samples.end(), random);
  return probe;
}

void expect_near(double found, double wanted) { EXPECT_NEAR(found, wanted, 0.25 * wanted); }

TEST(Probe, TopologiesComeBackFromTheirOwnMeasurements) {
  std::mt19937 random(17);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  for (int n = 0; n < 400; ++n) {
    SCOPED_TRACE(n);
    std::vector<int> devices;
    for (int h = pick(1, 6); h > 0; --h) devices.push_back(pick(1, 6));
    Topology topology = Topology::of_counts(devices);
    const int classes = pick(1, 3);
    topology.device_links.clear();
    for (int c = 0; c < classes; ++c)
      topology.device_links.push_back(
          {"class", 1e-6 * std::pow(3, c), 200e9 / std::pow(4, c), pick(0, 1) == 1});
    for (Host& host : topology.hosts) {
      host.link_class = pick(0, classes - 1);
      for (int a = 0; a + 1 < host.devices && host.devices > 3; a += 2)
        if (pick(0, 1)) host.links.push_back({a, a + 1, pick(0, classes - 1)});
    }
    topology.network = {"network", 5e-6, 12.5e9, true};
    const int racks = static_cast<int>(devices.size()) > 2 ? pick(1, 3) : 1;
    if (racks > 1) {
      topology.switches.push_back({.name = "root"});
      const double latency = 1e-6 * pick(5, 20), uplink = pick(0, 1) ? 3e9 : 0;
      for (int r = 0; r < racks; ++r)
        topology.switches.push_back({"rack" + std::to_string(r), 0, latency, uplink});
      const bool alone = pick(0, 1) == 1;  // the first hosts, or all in turn
      for (int h = 0; h < static_cast<int>(devices.size()); ++h)
        topology.hosts[h].network = 1 + (alone ? std::min(h, racks - 1) : h % racks);
    }
    topology.check();
    const Probe probe = measured(topology, random);
    const auto found = topology_of_probe(probe).topology;
    found.check();
    ASSERT_EQ(found.hosts.size(), topology.hosts.size());
    for (int a = 0; a < topology.slots(); ++a)
      for (int b = a + 1; b < topology.slots(); ++b) {
        const int host = topology.host_of(a);
        if (topology.host_of(b) != host) continue;
        const int first = topology.first_slot(host);
        const auto link = [&](const Topology& t) {
          int c = t.hosts[host].link_class;
          for (const DeviceLink& l : t.hosts[host].links)
            if (std::minmax(l.a, l.b) == std::minmax(a - first, b - first)) c = l.link_class;
          return t.device_links[c];
        };
        expect_near(link(found).latency, link(topology).latency);
        expect_near(link(found).bandwidth, link(topology).bandwidth);
      }
    if (devices.size() == 1) continue;
    // Hosts share a switch in one exactly if they do in the other; all hosts on a switch each, or
    // all on one, is one class, and needs none.
    std::vector<int> used(racks + 1);
    for (const Host& host : topology.hosts) ++used[racks > 1 ? host.network : 0];
    const bool divides = racks > 1 && *std::ranges::max_element(used) > 1;
    EXPECT_EQ(!found.switches.empty(), divides);
    if (!divides) continue;
    for (std::size_t g = 0; g < devices.size(); ++g) {
      EXPECT_GE(found.hosts[g].network, 1) << "a host of its own is behind a switch too";
      for (std::size_t h = 0; h < devices.size(); ++h)
        EXPECT_EQ(found.hosts[g].network == found.hosts[h].network,
                  topology.hosts[g].network == topology.hosts[h].network);
    }
    expect_near(found.network.latency, 5e-6);
    expect_near(found.network.bandwidth, 12.5e9);
    EXPECT_NEAR(found.switches[1].latency, topology.switches[1].latency,
                0.25 * topology.switches[1].latency + 1e-6);
    if (topology.switches[1].uplink_bandwidth == 0)
      EXPECT_EQ(found.switches[1].uplink_bandwidth, 0);
    else
      expect_near(found.switches[1].uplink_bandwidth, topology.switches[1].uplink_bandwidth);
  }
}

TEST(Probe, ABusIsFoundWherePairsSlowEachOther) {
  std::mt19937 random(3);
  for (const bool shared : {false, true}) {
    Topology topology = Topology::uniform(2, 4);
    topology.device_links[0].shared = shared;
    EXPECT_EQ(topology_of_probe(measured(topology, random)).topology.device_links[0].shared,
              shared);
  }
}

TEST(Probe, AllDevicesTogetherShowTheAdapter) {
  Probe probe{{"a", "b"}, {2, 2}, {{0, 2, 1e-5, 1e9}}};
  EXPECT_EQ(topology_of_probe(probe).topology.network.bandwidth, 1e9);
  probe.adapter = 1.9e9;
  EXPECT_EQ(topology_of_probe(probe).topology.network.bandwidth, 1.9e9);
}

TEST(Probe, WhatCannotBeDistinguishedIsSaid) {
  // a-b and b-c near, a-c far: no sets of hosts.
  const auto line = topology_of_probe(
      {{"a", "b", "c"}, {1, 1, 1}, {{0, 1, 1e-6, 1e9}, {1, 2, 1e-6, 1e9}, {0, 2, 1e-5, 1e9}}});
  EXPECT_TRUE(line.topology.switches.empty());
  ASSERT_EQ(line.notes.size(), 1u);
  EXPECT_SAYS(line.notes[0], "do not divide");
  // Two pairs of hosts, and one of each that are near too.
  const auto bridge = topology_of_probe({{"a", "b", "c", "d"},
                                         {1, 1, 1, 1},
                                         {{0, 1, 1e-6, 1e9},
                                          {2, 3, 1e-6, 1e9},
                                          {1, 3, 1e-6, 1e9},
                                          {0, 2, 1e-5, 1e9},
                                          {0, 3, 1e-5, 1e9},
                                          {1, 2, 1e-5, 1e9}}});
  EXPECT_TRUE(bridge.topology.switches.empty());
  const auto part =
      topology_of_probe({{"a", "b", "c"}, {1, 1, 1}, {{0, 1, 1e-6, 1e9}, {0, 2, 1e-5, 1e9}}});
  ASSERT_EQ(part.notes.size(), 1u);
  EXPECT_SAYS(part.notes[0], "2 of 3");
  const auto nothing = topology_of_probe({{"a", "b"}, {2, 1}, {}});
  EXPECT_EQ(nothing.notes.size(), 2u);
}

TEST(Probe, RefusesWhatIsNoMeasurement) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{}, {}, {}}); }), "0 hosts");
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{"a"}, {2, 2}, {}}); }),
              "1 host with 2");
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{"a"}, {2}, {{0, 2, 1, 1}}}); }),
              "2 slots");
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{"a"}, {2}, {{1, 1, 1, 1}}}); }),
              "slots 1 and 1");
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{"a"}, {2}, {{0, 1, 0, 1}}}); }),
              "above 0");
  EXPECT_SAYS(refused<MappingError>([&] { topology_of_probe({{"a"}, {2}, {{0, 1, 1, inf}}}); }),
              "finite");
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{"a"}, {2}, {}, {1, 1}}); }),
              "2 shares");
  EXPECT_SAYS(refused<MappingError>([] { topology_of_probe({{"a", "a"}, {1, 1}, {}}); }), "twice");
}

}  // namespace
}  // namespace tessera
