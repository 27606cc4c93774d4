#include "tessera/mesh/mapping/rank_mapping.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "random_mesh.h"
#include "refused.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/mesh_traffic.h"

using namespace tessera;
using Ranks = std::vector<int>;

namespace {

constexpr double kLatency = 1e-5, kBandwidth = 1e9;

/// Hosts with a fast inside and one slow adapter.
Topology slow_network(const std::vector<int>& devices) {
  auto topology = Topology::of_counts(devices);
  topology.device_links = {{"link", 1e-6, 100e9, false}};
  topology.network = {"net", kLatency, kBandwidth, true};
  return topology;
}

Topology random_topology(std::mt19937& random, int ranks) {
  std::vector<int> devices;
  for (int left = ranks; left > 0; left -= devices.back())
    devices.push_back(pick(random, 1, std::min(left, 4)));
  if (random() % 4 == 0) devices.push_back(1);  // a spare slot
  auto topology = slow_network(devices);
  topology.device_links.push_back({"bus", 2e-6, 10e9, random() % 2 == 0});
  if (random() % 3 == 0) topology.cross_rail_latency = 3e-6;
  const int switches = pick(random, 0, 3);
  for (int s = 0; s < switches; ++s)
    topology.switches.push_back({std::string(1, static_cast<char>('a' + s)),
                                 s == 0 ? -1 : pick(random, 0, s - 1), 1e-6,
                                 random() % 2 ? 0.0 : 0.5e9});
  for (Host& host : topology.hosts) {
    if (switches > 0) host.network = pick(random, 0, switches - 1);
    if (random() % 3 == 0)
      for (int d = 0; d < host.devices; ++d) host.rail.push_back(d % 2);
    if (host.devices > 2 && random() % 3 == 0) host.links.push_back({0, 2, 1});
    if (random() % 4 == 0) host.link_class = 1;
  }
  return topology;
}

std::vector<Traffic> random_traffic(std::mt19937& random, const std::vector<Axis>& axes,
                                    bool any = true) {
  std::vector<Traffic> traffic;
  const Collective kinds[] = {
      Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter,
      Collective::broadcast,  Collective::reduce,     Collective::all_to_all,
      Collective::send};
  for (const Axis& axis : axes)
    if (random() % 4)
      traffic.push_back({{axis.name},
                         kinds[any ? random() % 7 : 0],
                         std::pow(10.0, pick(random, 0, 8)),
                         double(pick(random, 1, 3))});
  if (axes.size() > 1 && random() % 3 == 0)
    traffic.push_back({{axes[0].name, axes[1].name}, kinds[random() % 7], 1e6, 1});
  return traffic;
}

}  // namespace

TEST(CostModel, LargeMessagesGoByTheAlgorithmThatMovesLeast) {
  // 3 hosts, 1 rank each, 100 MB: the ring, 2 * 2 rounds of a third at 1 GB/s. On 4 hosts as many
  // bytes move by halving and doubling, in fewer rounds.
  const CostModel three(slow_network({1, 1, 1}), {{"data", 3}},
                        {{{"data"}, Collective::all_reduce, 99e6}});
  const auto ring = three.cost({0, 1, 2});
  EXPECT_EQ(ring.axes.front().axes, "data");
  EXPECT_EQ(ring.axes.front().algorithm, "ring");
  EXPECT_NEAR(ring.seconds, 4 * (kLatency + 0.033), 1e-9);
  const CostModel four(slow_network({1, 1, 1, 1}), {{"data", 4}},
                       {{{"data"}, Collective::all_reduce, 100e6, 3}});
  const auto halving = four.cost({0, 1, 2, 3});
  EXPECT_EQ(halving.axes.front().algorithm, "halving and doubling");
  EXPECT_NEAR(halving.seconds, 3 * (4 * kLatency + 0.150), 1e-9);
}

TEST(CostModel, SmallMessagesGoByDoubling) {
  const CostModel model(slow_network({1, 1, 1, 1}), {{"data", 4}},
                        {{{"data"}, Collective::all_reduce, 8}});
  const auto cost = model.cost({0, 1, 2, 3});
  EXPECT_EQ(cost.axes.front().algorithm, "recursive doubling");
  EXPECT_NEAR(cost.seconds, 2 * (kLatency + 8e-9), 1e-12);
}

TEST(CostModel, GroupsShareAnAdapter) {
  // data=2 x model=4 on 2 hosts of 4: the four data groups leave each host by one adapter, so each
  // gets a quarter of it.
  const CostModel model(slow_network({4, 4}), {{"data", 2}, {"model", 4}},
                        {{{"data"}, Collective::all_gather, 100e6}});
  EXPECT_NEAR(model.seconds({0, 1, 2, 3, 4, 5, 6, 7}), kLatency + 4 * 50e6 / kBandwidth, 1e-9);
  // Rails: four adapters, one group each.
  auto rails = slow_network({4, 4});
  for (Host& host : rails.hosts) host.rail = {0, 1, 2, 3};
  const CostModel with_rails(rails, {{"data", 2}, {"model", 4}},
                             {{{"data"}, Collective::all_gather, 100e6}});
  EXPECT_NEAR(with_rails.seconds({0, 1, 2, 3, 4, 5, 6, 7}), kLatency + 50e6 / kBandwidth, 1e-9);
}

TEST(CostModel, UplinksAreShared) {
  // Two racks of two hosts; the uplink is as narrow as one adapter, and both rings of `data` cross
  // it.
  auto topology = slow_network({1, 1, 1, 1});
  topology.switches = {
      {"spine", -1, 0, 0}, {"rack0", 0, 2e-6, kBandwidth}, {"rack1", 0, 2e-6, kBandwidth}};
  for (int h = 0; h < 4; ++h) topology.hosts[h].network = 1 + h / 2;
  const CostModel model(topology, {{"data", 2}, {"model", 2}},
                        {{{"data"}, Collective::all_gather, 100e6}});
  // data between racks
  EXPECT_NEAR(model.seconds({0, 1, 2, 3}), kLatency + 4e-6 + 2 * 50e6 / kBandwidth, 1e-9);
  // data inside racks
  EXPECT_NEAR(model.seconds({0, 2, 1, 3}), kLatency + 50e6 / kBandwidth, 1e-9);
}

TEST(CostModel, AllToAllAndSend) {
  const CostModel model(slow_network({2, 2}), {{"x", 4}}, {{{"x"}, Collective::all_to_all, 4e6}});
  // Each of the two ranks of a host sends 1 MB to each of two ranks outside.
  EXPECT_NEAR(model.seconds({0, 1, 2, 3}), 3 * kLatency + 4e6 / kBandwidth, 1e-9);
  const CostModel pipe(slow_network({2, 2}), {{"x", 4}}, {{{"x"}, Collective::send, 1e6}});
  // one message crosses
  EXPECT_NEAR(pipe.seconds({0, 1, 2, 3}), kLatency + 1e6 / kBandwidth, 1e-9);
  // three cross, two of them outwards from host 0
  EXPECT_NEAR(pipe.seconds({0, 2, 1, 3}), kLatency + 2e6 / kBandwidth, 1e-9);
}

TEST(CostModel, BadInput) {
  const auto topology = slow_network({2, 2});
  EXPECT_SAYS(refused<MappingError>([&] { CostModel(topology, {{"x", 5}}, {}); }),
              "5 ranks does not fit on 2 hosts with 4 devices");
  EXPECT_SAYS(refused<UnknownName>(
                  [&] { CostModel(topology, {{"x", 4}}, {{{"y"}, Collective::send, 1}}); }),
              "'y'");
  EXPECT_SAYS(refused<GroupConfigError>(
                  [&] { CostModel(topology, {{"x", 4}}, {{{"x"}, Collective::send, -1}}); }),
              "-1 bytes");
  EXPECT_SAYS(refused<GroupConfigError>(
                  [&] { CostModel(topology, {{"x", 4}}, {{{}, Collective::send, 1}}); }),
              "names no axis");
  EXPECT_SAYS(refused<GroupConfigError>([] { collective_from("gossip"); }), "all_reduce");
  EXPECT_SAYS(refused<GroupConfigError>([] { collective_from("all_r\adu\x1b[2Jce"); }),
              "'all_r\\x07du\\x1b[2Jce'");
  const CostModel model(topology, {{"x", 4}}, {});
  EXPECT_SAYS(refused<MappingError>([&] { model.cost({0, 1}); }), "2 positions for a mesh of 4");
  EXPECT_SAYS(refused<MappingError>([&] { given_mapping(model, {0, 1}); }),
              "2 entries, but the mesh has 4");
  EXPECT_SAYS(refused<MappingError>([&] { given_mapping(model, {0, 1, 2, 4}); }),
              "slot 4, but the slots are 0 to 3");
  EXPECT_SAYS(refused<MappingError>([&] { given_mapping(model, {0, 1, 2, 1}); }),
              "ranks 1 and 3 both on slot 1");
}

TEST(Topology, BadInput) {
  const auto refuse = [](auto&& change) {
    auto topology = slow_network({2, 2});
    topology.switches = {{"a", -1, 0, 0}, {"b", 0, 0, 0}};
    for (Host& host : topology.hosts) host.network = 1;
    EXPECT_NO_THROW(topology.check());
    change(topology);
    return refused<MappingError>([&] { topology.check(); });
  };
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts.clear(); }), "without hosts");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].name = "host0"; }), "'host0' is listed twice");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].devices = 0; }), "has 0 devices");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].rail = {0}; }), "2 devices, but 1 rails");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].rail = {0, -1}; }), "rail -1");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].links = {{0, 2, 0}}; }), "devices 0 and 2");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].link_class = 3; }), "link class 3");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].network = 2; }), "switch 2");
  EXPECT_SAYS(refuse([](Topology& t) { t.hosts[1].network = -1; }), "switch -1");
  EXPECT_SAYS(refuse([](Topology& t) { t.switches[0].parent = 1; }), "its own ancestor");
  EXPECT_SAYS(refuse([](Topology& t) { t.switches[1].parent = -1; }), "2 roots");
  EXPECT_SAYS(refuse([](Topology& t) { t.switches[1].name = "a"; }), "'a' is listed twice");
  EXPECT_SAYS(refuse([](Topology& t) { t.network.bandwidth = 0; }), "bandwidth of 0");
  EXPECT_SAYS(refuse([](Topology& t) { t.device_links[0].latency = -1; }), "latency of -1");
  EXPECT_SAYS(refused<MappingError>([] { Topology::uniform(0, 4); }), "0 hosts");
  EXPECT_SAYS(refused<MappingError>([] { Topology::uniform(1, 2).host_of(2); }),
              "slot 2 of 2 slots");
}

TEST(Placement, HeavyAxisMovesInsideHosts) {
  // Row-major puts `model` across hosts here, for data is innermost; the optimum turns it round.
  const CostModel model(
      slow_network({4, 4}), {{"model", 4}, {"data", 2}},
      {{{"model"}, Collective::all_reduce, 512e6}, {{"data"}, Collective::all_reduce, 1e6}});
  const auto placement = optimise_mapping(model);
  EXPECT_TRUE(placement.exact);
  EXPECT_LT(placement.seconds, placement.naive_seconds / 10);
  const auto mesh = mapped_mesh(model.axes(), placement);
  const auto host_of = model.topology().hosts_of_slots();
  EXPECT_EQ(reach_of(mesh.groups("model"), host_of), Reach::inside);
  EXPECT_EQ(reach_of(mesh.groups("data"), host_of), Reach::between);
  const Mesh naive(model.axes());
  EXPECT_EQ(reach_of(naive.groups("model"), host_of), Reach::both);
}

TEST(Placement, ExactEqualsBruteForceOverAllPermutations) {
  std::mt19937 random(21);
  int checked = 0;
  for (int n = 0; n < 400; ++n) {
    const auto axes = random_axes(random, 3, 4, 6);
    const int ranks = Mesh(axes).size();
    if (ranks < 2) continue;
    const auto topology = random_topology(random, ranks);
    const CostModel model(topology, axes, random_traffic(random, axes));
    std::vector<int> slots(topology.slots());
    std::iota(slots.begin(), slots.end(), 0);
    double least = INFINITY, most = 0;
    do {
      const double seconds = model.seconds({slots.begin(), slots.begin() + ranks});
      least = std::min(least, seconds);
      most = std::max(most, seconds);
    } while (std::next_permutation(slots.begin(), slots.end()));
    const auto exact = optimise_mapping(model);
    ASSERT_TRUE(exact.exact);
    ASSERT_NEAR(exact.seconds, least, 1e-12 + 1e-9 * least);
    ASSERT_NEAR(model.seconds(exact.slot_of), exact.seconds, 1e-12);
    ASSERT_LE(exact.lower_bound, least * (1 + 1e-9)) << n;
    ASSERT_LE(exact.seconds, exact.naive_seconds);
    const auto heuristic = optimise_mapping(model, {.exact_limit = 0});
    ASSERT_FALSE(heuristic.exact);
    ASSERT_LE(heuristic.seconds, heuristic.naive_seconds);
    ASSERT_GE(heuristic.seconds, least * (1 - 1e-9));
    ++checked;
  }
  EXPECT_GT(checked, 200);
}

TEST(Placement, HeuristicOnUniformHosts) {
  // Exhaustive at 8 to 12 ranks: how often does the heuristic alone reach the optimum? And the
  // bound must hold.
  std::mt19937 random(22);
  int reached = 0, cases = 0;
  for (int n = 0; n < 60; ++n) {
    const int hosts = pick(random, 2, 4), devices = pick(random, 2, hosts == 4 ? 2 : 4);
    std::vector<Axis> axes;
    int left = hosts * devices;
    for (const char* name : {"a", "b", "c"}) {
      int size = pick(random, 1, left);
      while (left % size) --size;
      axes.push_back({name, name[0] == 'c' ? left : size});
      left /= size;
    }
    const CostModel model(slow_network(std::vector<int>(hosts, devices)), axes,
                          random_traffic(random, axes, false));
    const auto exact = optimise_mapping(model);
    if (!exact.exact) continue;
    const auto heuristic = optimise_mapping(model, {.exact_limit = 0});
    ASSERT_LE(exact.lower_bound, exact.seconds * (1 + 1e-9));
    ASSERT_GE(heuristic.seconds, exact.seconds * (1 - 1e-9));
    // Devices that are alike are taken in the order of the positions.
    for (const auto& slot_of : {exact.slot_of, heuristic.slot_of}) {
      std::vector<int> last(hosts, -1);
      for (const int slot : slot_of)
        ASSERT_LT(std::exchange(last[slot / devices], slot), slot) << list(slot_of);
    }
    ++cases;
    reached += heuristic.seconds <= exact.seconds * (1 + 1e-9);
  }
  EXPECT_GT(cases, 50);
  EXPECT_GE(reached, cases * 9 / 10) << reached << " of " << cases;
}

TEST(Placement, LargeWorldsNeverGetWorse) {
  std::mt19937 random(23);
  for (int n = 0; n < 12; ++n) {
    const auto axes = random_axes(random, 4, 8, 512);
    const int ranks = Mesh(axes).size();
    std::vector<int> devices;
    for (int left = ranks; left > 0; left -= devices.back())
      devices.push_back(n % 2 ? std::min(left, 8) : pick(random, 1, std::min(left, 8)));
    const CostModel model(slow_network(devices), axes, random_traffic(random, axes));
    const auto placement = optimise_mapping(model, {.exact_limit = 100, .effort = 0.2});
    ASSERT_LE(placement.seconds, placement.naive_seconds);
    ASSERT_LE(placement.lower_bound, placement.seconds * (1 + 1e-9));
    auto sorted = placement.slot_of;
    std::ranges::sort(sorted);
    ASSERT_EQ(std::ranges::adjacent_find(sorted), sorted.end());
    ASSERT_GE(sorted.front(), 0);
    ASSERT_LT(sorted.back(), model.topology().slots());
  }
}

TEST(Hierarchical, InsideTimesBetween) {
  const Mesh mesh({{"data", 8}});
  const Ranks two_hosts{0, 0, 0, 0, 1, 1, 1, 1};
  const auto levels = hierarchical_groups(mesh.groups("data"), two_hosts);
  EXPECT_EQ(levels.inside, (RankLists{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(levels.between, (RankLists{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_NO_THROW(
      require_orthogonal(levels.inside, "inside", levels.between, "between", mesh.ranks(), "data"));
  const Ranks uneven{0, 0, 0, 0, 0, 1, 1, 1};
  try {
    hierarchical_groups(mesh.groups("data"), uneven);
    FAIL();
  } catch (const OrthogonalityError& error) {
    EXPECT_EQ(error.ranks(), (Ranks{5, 6, 7}));
    EXPECT_SAYS(error.what(), "5 and 3");
  }
}

namespace {

// Bytes that leave a host, message by message: rings and trees in order of slots.
double bytes_by_hand(const std::vector<Axis>& axes, const std::vector<Traffic>& traffic,
                     const Topology& topology, const Ranks& slot_of) {
  const Mesh mesh(axes);
  double all = 0;
  for (const Traffic& t : traffic) {
    const GroupTable groups = mesh.groups(t.axes);
    for (int g = 0; g < groups.count(); ++g) {
      Ranks slots;
      for (const int position : groups[g]) slots.push_back(slot_of[position]);
      if (t.collective != Collective::send) std::ranges::sort(slots);
      const int p = static_cast<int>(slots.size());
      const auto apart = [&](int a, int b) {
        return topology.host_of(slots[a]) != topology.host_of(slots[b]);
      };
      double ring = 0, chain = 0, pairs = 0;
      for (int i = 0; i < p; ++i) {
        ring += apart(i, (i + 1) % p);
        chain += i + 1 < p && apart(i, i + 1);
        for (int j = 0; j < p; ++j) pairs += apart(i, j);
      }
      const double part = t.bytes * t.calls / p;
      if (t.collective == Collective::all_reduce) all += 2 * (p - 1) * part * ring;
      if (t.collective == Collective::all_gather || t.collective == Collective::reduce_scatter)
        all += (p - 1) * part * ring;
      if (t.collective == Collective::all_to_all) all += part * pairs;
      if (t.collective == Collective::send || t.collective == Collective::broadcast ||
          t.collective == Collective::reduce)
        all += t.bytes * t.calls * chain;
    }
  }
  return all;
}

FoundTopology found_on(Topology topology, Ranks slot_of) {
  FoundTopology found;
  found.topology = std::move(topology);
  found.slot_of = std::move(slot_of);
  return found;
}

}  // namespace

TEST(MappingGain, IsNeverNegativeAndHoldsForTheMeshThatItNames) {
  std::mt19937 random(29);
  for (int n = 0; n < 100; ++n) {
    const auto axes = random_axes(random, 3, 4, 24);
    const int ranks = Mesh(axes).size();
    Topology topology = random_topology(random, ranks);
    if (topology.slots() > ranks) topology.hosts.pop_back();  // the spare one
    const auto traffic = random_traffic(random, axes);
    Ranks table(ranks), slot_of(ranks);
    std::iota(table.begin(), table.end(), 0);
    std::iota(slot_of.begin(), slot_of.end(), 0);
    shuffle(table, random);
    shuffle(slot_of, random);
    const FoundTopology found = found_on(topology, slot_of);
    const Mesh mesh(axes, table);
    const MappingGain gain =
        mapping_gain(mesh, found, traffic, {.exact_limit = 200, .effort = 0.1});
    const CostModel model(topology, axes, traffic);
    Ranks now;
    for (const int rank : table) now.push_back(slot_of[rank]);
    EXPECT_EQ(gain.seconds, model.seconds(now));
    EXPECT_LE(gain.mapped_seconds, gain.seconds);
    EXPECT_NEAR(gain.bytes, bytes_by_hand(axes, traffic, topology, now), 1e-9 * gain.bytes);
    EXPECT_NEAR(gain.mapped_bytes, bytes_by_hand(axes, traffic, topology, gain.mapping.slot_of),
                1e-9 * gain.mapped_bytes);
    // On the mesh that it names the job has the cost that it says, and no other mapping gains.
    const MappingGain again =
        mapping_gain(Mesh(axes, gain.ranks), found, traffic, {.exact_limit = 200, .effort = 0.1});
    EXPECT_EQ(again.seconds, gain.mapped_seconds);
    EXPECT_EQ(again.bytes, gain.mapped_bytes);
    EXPECT_EQ(std::set<int>(gain.ranks.begin(), gain.ranks.end()).size(), gain.ranks.size());
  }
}

TEST(MappingGain, IsPrinted) {
  const FoundTopology found = found_on(slow_network({2, 2}), {0, 2, 1, 3});
  const Mesh mesh({{"data", 2}, {"model", 2}});
  const std::vector<Traffic> traffic{{{"model"}, Collective::all_reduce, 50e6, 2}};
  const std::string text = mapping_gain(mesh, found, traffic).to_string();
  EXPECT_SAYS(text, "now:    200 ms per step, 400 MB between hosts");
  EXPECT_SAYS(text, " ms per step, 0 MB between hosts");
  EXPECT_SAYS(text, "ranks:  [0, 2, 1, 3] (exact)");
}

TEST(MappingGain, RefusesWhatIsNoJob) {
  const Mesh mesh({{"data", 4}});
  const FoundTopology found = found_on(slow_network({2, 2}), {0, 1, 2, 3});
  const auto says = [](const Mesh& of, const FoundTopology& on) {
    return refused<MappingError>([&] { mapping_gain(of, on, {}); });
  };
  EXPECT_SAYS(says(Mesh({{"data", 2}}), found), "over all ranks of the job");
  EXPECT_SAYS(says(Mesh({{"data", 4}}, {0, 1, 2, 9}), found), "rank 9");
  EXPECT_SAYS(says(mesh, found_on(slow_network({2, 2}), {0, 1, 2})), "3 ranks");
  EXPECT_SAYS(says(mesh, found_on(slow_network({2, 2}), {0, 1, 2, 2})), "slot 2");
  EXPECT_SAYS(says(mesh, found_on(slow_network({2, 2}), {0, 1, 2, 4})), "slot 4");
  EXPECT_SAYS(says(mesh, found_on(slow_network({2, 3}), {0, 1, 2, 3})), "5 slots");
  const auto twice = found_on(slow_network({2}), {0, 0});
  const RankMapping two = naive_mapping(CostModel(slow_network({2}), {{"data", 2}}, {}));
  EXPECT_SAYS(refused<MappingError>([&] { twice.ranks(two); }), "rank 1 of 2");
  EXPECT_SAYS(refused<MappingError>([&] { found.ranks(two); }), "2 positions");
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    refused<GroupConfigError>(
        [&] { mapping_gain(mesh, found, {{{"data"}, Collective::send, wrong, 1}}); });
    refused<GroupConfigError>(
        [&] { mapping_gain(mesh, found, {{{"data"}, Collective::send, 1, wrong}}); });
  }
  refused<GroupConfigError>(
      [&] { mapping_gain(mesh, found, {{{"data"}, Collective::send, 1e200, 1e200}}); });
  EXPECT_SAYS(refused<UnknownName>(
                  [&] { mapping_gain(mesh, found, {{{"model"}, Collective::send, 1, 1}}); }),
              "the axis 'model'");
  EXPECT_SAYS(refused<RepeatedName>(
                  [&] { mapping_gain(mesh, found, {{{"data", "data"}, Collective::send, 1, 1}}); }),
              "'data' twice");
  const CostModel model(slow_network({2, 2}), {{"data", 4}}, {});
  for (const Ranks& wrong : {Ranks{0, 1, 2}, Ranks{0, 1, 2, 4}, Ranks{0, 1, 2, -1}})
    refused<MappingError>([&] { bytes_between_hosts(model, wrong); });
}
