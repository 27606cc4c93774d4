// Ranks on machines: what a job finds of them, what its step moves, and groups that are mapped.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "../support/ranks.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/find_topology.h"
#include "tessera/comm/job/mesh_traffic.h"
#include "tessera/mesh/errors.h"

namespace tessera::test::mapped_groups_test {
namespace {

// Names of hosts that fake ones say, by rank: dealt in turn, one after the other, all on one.
MachineLook hosts(const std::vector<std::string>& of_ranks, const DistributedManager& manager) {
  return {.host = [name = of_ranks[manager.rank()]] { return name; }};
}

std::string text_of(const FoundTopology& found) {
  std::string text = list(found.slot_of);
  for (const Host& host : found.topology.hosts)
    text += concat(' ', host.name, ':', host.devices, ':', host.link_class, ':', host.links.size());
  return text + list(found.unknown);
}

TEST(FindTopology, AsksTheRanks) {
  on_ranks(4, [](DistributedManager& manager) {
    const FoundTopology dealt = find_topology(manager, hosts({"b", "a", "b", "a"}, manager));
    ASSERT_EQ(dealt.topology.hosts.size(), 2u);
    EXPECT_EQ(dealt.topology.hosts[0].name, "b");
    EXPECT_EQ(dealt.topology.hosts[1].devices, 2);
    EXPECT_EQ(dealt.slot_of, (std::vector<int>{0, 2, 1, 3}));
    ASSERT_EQ(dealt.unknown.size(), 1u);
    EXPECT_NE(dealt.unknown[0].find("nobody looked"), std::string::npos) << dealt.unknown[0];
    const FoundTopology uneven = find_topology(manager, hosts({"x", "y", "y", "y"}, manager));
    EXPECT_EQ(uneven.topology.hosts[1].devices, 3);
    EXPECT_EQ(uneven.slot_of, (std::vector<int>{0, 1, 2, 3}));
    // Without names: these ranks are threads or processes of one machine.
    const FoundTopology here = find_topology(manager);
    EXPECT_EQ(here.topology.hosts.size(), 1u);
    EXPECT_EQ(here.topology.slots(), 4);
    agree::same(manager.world(), "what was found", text_of(here));
  });
}

TEST(FindTopology, JoinsWhatTheFirstRanksOfHostsSay) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [ranks](DistributedManager& manager) {
      std::vector<std::string> names;
      for (int r = 0; r < ranks; ++r) names.push_back(r % 2 == 0 ? "even" : "odd");
      MachineLook look = hosts(names, manager);
      look.inside = [&](int n) { return concat("rank ", manager.rank(), " for ", n); };
      look.around = [&] { return concat("around rank ", manager.rank()); };
      look.join = [](FoundTopology found, const std::vector<std::string>& insides,
                     const std::string& around) {
        found.unknown = insides;
        found.unknown.push_back(around);
        return found;
      };
      const auto found = find_topology(manager, look);
      std::vector<std::string> expected{concat("rank 0 for ", (ranks + 1) / 2)};
      if (ranks > 1) expected.push_back(concat("rank 1 for ", ranks / 2));
      expected.emplace_back("around rank 0");
      EXPECT_EQ(found.unknown, expected);
    });
}

TEST(FindTopology, WhatFailsOnOneRankFailsOnAll) {
  on_ranks(3, [](DistributedManager& manager) {
    const int me = manager.rank();
    std::vector<MachineLook> looks(4);
    looks[0].host = [me]() -> std::string {
      if (me == 1) throw ConfigurationError("no name here");
      return "h";
    };
    looks[1].inside = [](int) -> std::string { throw MappingError("no inside here"); };
    looks[2].around = []() -> std::string { throw std::runtime_error("nothing around"); };
    looks[3].host = [me] { return me == 2 ? "a name=d" : "h"; };  // goes into rank files
    for (const MachineLook& look : looks) {
      EXPECT_THROW(find_topology(manager, look), Error);
      manager.world().barrier();  // the ranks go on
    }
    EXPECT_THROW(find_topology(manager, looks[0]), ConfigurationError);
    EXPECT_THROW(find_topology(manager, looks[1]), MappingError);
    EXPECT_THROW(find_topology(manager, looks[3]), MappingError);
    EXPECT_EQ(find_topology(manager).topology.slots(), 3);
  });
}

std::vector<Axis> drawn_axes(std::mt19937& random, int ranks, int number) {
  std::vector<int> sizes{ranks};
  if (ranks == 4 && random() % 2) sizes = {2, 2};
  if (random() % 3 == 0) sizes.insert(sizes.begin() + random() % sizes.size(), 1);
  std::vector<Axis> axes;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    axes.push_back({concat("g", number, static_cast<char>('a' + i)), sizes[i]});
  return axes;
}

// What each rank has: its number of rows, some without any, of its own number.
torch::Tensor rows_of(int rank) { return torch::full({rank % 3, 2}, rank + 1.0, torch::kDouble); }

void require_values(const Group& group, const std::vector<int>& expected) {
  ASSERT_EQ(group.ranks(), expected);
  auto sum = torch::tensor({std::exp2(expected[group.rank()])});
  group.all_reduce(sum);
  double all = 0;
  std::vector<std::int64_t> sizes;
  std::vector<torch::Tensor> rows;
  for (const int r : expected) {
    all += std::exp2(r);
    sizes.push_back(r % 3);
    rows.push_back(rows_of(r));
  }
  EXPECT_EQ(sum.item<double>(), all);
  const auto whole = torch::cat(rows);
  auto gathered = torch::empty_like(whole);
  group.all_gather(gathered, rows[group.rank()], sizes);
  EXPECT_TRUE(gathered.equal(whole));
  auto first = torch::tensor({expected[group.rank()]});
  group.broadcast(first, group.size() - 1);
  EXPECT_EQ(first.item<int>(), expected.back());
}

TEST(MappedGroups, ComputeWhatTheirRankTableSays) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [ranks](DistributedManager& manager) {
      std::mt19937 random(7 + ranks);
      for (int n = 0; n < 12; ++n) {
        const auto axes = drawn_axes(random, ranks, n);
        ProcessGroupConfig tree(ProcessGroupNode{.name = concat("w", n)});
        std::vector<Traffic> traffic;
        for (const Axis& axis : axes) {
          tree.add_node({.name = axis.name, .size = axis.size}, concat("w", n));
          if (random() % 3) traffic.push_back({{axis.name}, Collective::all_reduce, 1e6 * n, 2});
        }
        FoundTopology found;
        std::vector<int> devices;
        for (int left = ranks; left > 0; left -= devices.back())
          devices.push_back(1 + static_cast<int>(random() % left));
        found.topology = Topology::of_counts(devices);
        found.slot_of.resize(ranks);
        std::iota(found.slot_of.begin(), found.slot_of.end(), 0);
        std::shuffle(found.slot_of.begin(), found.slot_of.end(), random);
        const RankMapping mapping = create_process_groups(manager, tree, found, traffic);
        const auto table = found.ranks(mapping);
        if (traffic.empty()) {
          EXPECT_TRUE(std::ranges::is_sorted(table)) << list(table);
        }
        const Mesh mesh(tree.mesh(ranks).axes(), table);
        for (const Axis& axis : axes)
          require_values(manager.group(axis.name), mesh.group(axis.name, manager.rank()));
        require_values(manager.group(concat("w", n)), table);
      }
      FoundTopology other;
      other.topology = Topology::of_counts({ranks + 1});
      EXPECT_THROW(create_process_groups(manager, ProcessGroupConfig(), other), MappingError);
    });
}

// The entry of one family and collective; its calls of one size.
Traffic entry(const MeanTraffic& mean, const std::string& axis, Collective collective) {
  Traffic found;
  int entries = 0;
  for (const Traffic& t : mean.moved.traffic)
    if (t.axes == std::vector{axis} && t.collective == collective) {
      found = t;
      ++entries;
    }
  EXPECT_EQ(entries, 1) << axis << ' ' << to_string(collective);
  return found;
}

TEST(MeanTraffic, IsTheMeanOfUnevenRanks) {
  on_ranks(4, [](DistributedManager& manager) {
    const int me = manager.rank();
    const DeviceMesh mesh = manager.mesh({{"data", 2}, {"model", 2}});
    const Group data = mesh.group("data"), model = mesh.group("model");
    CommTraceScope trace(manager);
    for (int step = 0; step < 2; ++step) {
      // 64, 80, 96 and 112 rows of 4 bytes: of one power of two for a whole group.
      const auto rows = [](int r) { return 64 + 16 * static_cast<std::int64_t>(r); };
      std::vector<std::int64_t> sizes;
      for (const int r : data.ranks()) sizes.push_back(rows(r));
      data.all_gather(torch::empty({sizes[0] + sizes[1]}), torch::ones({rows(me)}), sizes);
      auto one = torch::ones({10});
      data.broadcast(one, 1);
      model.all_reduce(one);
    }
    const MeanTraffic mean = mean_traffic(*trace, mesh, 2);
    EXPECT_EQ(mean.moved.axes, mesh.mesh().axes());
    // Groups {0, 2} and {1, 3} gather 160 and 192 rows; 64 rows of a rank count as 128.
    double calls = 0, bytes = 0;
    for (const Traffic& t : mean.moved.traffic)
      if (t.collective == Collective::all_gather) {
        calls += t.calls;
        bytes += t.calls * t.bytes;
      }
    EXPECT_DOUBLE_EQ(calls, 1);
    EXPECT_DOUBLE_EQ(bytes, 4 * (160 + 192) / 2.0);
    EXPECT_EQ(entry(mean, "data", Collective::broadcast),
              (Traffic{{"data"}, Collective::broadcast, 40, 1}));
    EXPECT_EQ(entry(mean, "model", Collective::all_reduce).calls, 1);
    EXPECT_TRUE(mean.left_out.empty());
    // Every rank has the same, to the last bit.
    std::string text;
    for (const Traffic& t : mean.moved.traffic)
      text += concat(list(t.axes), std::bit_cast<std::uint64_t>(t.bytes), ' ',
                     std::bit_cast<std::uint64_t>(t.calls), '\n');
    agree::same(manager.world(), "the traffic", text);
  });
}

TEST(MeanTraffic, CountsAMessageOnceForItsPair) {
  for (const int ranks : {2, 3, 4})
    on_ranks(ranks, [ranks](DistributedManager& manager) {
      const int me = manager.rank();
      const DeviceMesh mesh = manager.mesh({{"stage", ranks}});
      const Group stages = mesh.group("stage");
      auto mine = torch::ones({25}), other = torch::empty({25});
      {
        // A chain: the last rank sends nothing, the first receives nothing.
        const CommTraceScope trace(manager);
        for (int micro = 0; micro < 3; ++micro) {
          if (me > 0) stages.receive(other, me - 1);
          if (me + 1 < ranks) stages.send(mine, me + 1);
        }
        const auto sent = entry(mean_traffic(*trace, mesh), "stage", Collective::send);
        EXPECT_DOUBLE_EQ(sent.bytes, 100);
        EXPECT_DOUBLE_EQ(sent.calls, 3);
      }
      const CommTraceScope trace(manager);
      std::vector<Message> messages;
      std::vector<torch::Tensor> halos;
      for (const int peer : {me - 1, me + 1}) {
        if (peer < 0 || peer >= ranks) continue;
        halos.push_back(torch::empty({25}));
        messages.push_back({Message::Kind::send, mine, peer});
        messages.push_back({Message::Kind::receive, halos.back(), peer});
      }
      stages.exchange(messages);
      // Each pair passes 100 bytes to either side.
      const MeanTraffic mean = mean_traffic(*trace, mesh);
      double bytes = 0;
      for (const Traffic& t : mean.moved.traffic) bytes += t.bytes * t.calls;
      EXPECT_DOUBLE_EQ(bytes, 200);
      // Round a ring the message from the last to the first counts as one of a pair.
      const CommTraceScope ring(manager);
      stages.exchange({{Message::Kind::send, mine, (me + 1) % ranks},
                       {Message::Kind::receive, other, (me + ranks - 1) % ranks}});
      const auto passed = entry(mean_traffic(*ring, mesh), "stage", Collective::send);
      EXPECT_DOUBLE_EQ(passed.bytes, 100);
      EXPECT_DOUBLE_EQ(passed.calls, ranks / (ranks - 1.0));
    });
}

TEST(MeanTraffic, PassesAxesOfOneRankOver) {
  on_ranks(2, [](DistributedManager& manager) {
    std::vector<Axis> axes{{"data", 2}};
    for (int n = 0; n < 40; ++n) axes.push_back({concat("one", n), 1});
    const DeviceMesh mesh = manager.mesh(axes);
    const CommTraceScope trace(manager);
    auto x = torch::ones({1});
    mesh.all().all_reduce(x);
    EXPECT_EQ(entry(mean_traffic(*trace, mesh), "data", Collective::all_reduce).calls, 1);
  });
}

TEST(MeanTraffic, LeavesOutWhatTheMeshDoesNotKnow) {
  on_ranks(4, [](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 2}, {"one", 1}, {"model", 2}});
    const Group pair = manager.rank() % 3 == 0 ? manager.group({0, 3}) : manager.group({1, 2});
    const CommTraceScope trace(manager);
    auto x = torch::ones({1});
    mesh.all().all_reduce(x);
    pair.all_reduce(x);
    mesh.all().barrier();
    const MeanTraffic mean = mean_traffic(*trace, mesh);
    ASSERT_EQ(mean.moved.traffic.size(), 1u);
    EXPECT_EQ(mean.moved.traffic[0].axes, (std::vector<std::string>{"data", "model"}));
    ASSERT_EQ(mean.left_out.size(), 2u);
    EXPECT_EQ(mean.left_out[0].operation, "all_reduce");
    EXPECT_EQ(mean.left_out[0].group, pair.name());
    EXPECT_EQ(mean.left_out[1].operation, "barrier");
  });
}

TEST(MeanTraffic, RefusesStepsOnEveryRank) {
  on_ranks(3, [](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 3}});
    const CommTraceScope trace(manager);
    for (const double steps : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()})
      EXPECT_THROW(mean_traffic(*trace, mesh, manager.rank() == 1 ? steps : 1), InvalidArgument);
    // Whose groups these ranks are not in.
    const DeviceMesh part = manager.mesh(Mesh({{"data", 2}}, {2, 0}));
    if (manager.rank() == 1) {
      EXPECT_THROW(mean_traffic(*trace, part), InvalidArgument);
    } else {
      EXPECT_TRUE(mean_traffic(CommTrace(), part).moved.traffic.empty());
    }
    manager.world().barrier();
  });
}

// The whole way: a traced step on ranks that are dealt to hosts in turn, what another mapping would
// gain, and the same step on that mapping.
TEST(MappingGain, OfARunningJobIsWhatTheNextOneHas) {
  on_ranks(4, [](DistributedManager& manager) {
    const std::vector<Axis> axes{{"data", 2}, {"model", 2}};
    const DeviceMesh mesh = manager.mesh(axes);
    const FoundTopology found = find_topology(manager, hosts({"a", "b", "a", "b"}, manager));
    const auto step = [&](const DeviceMesh& on) {
      const CommTraceScope trace(manager);
      auto x = torch::ones({1 << 20});
      on.group("model").all_reduce(x);
      return mean_traffic(*trace, on).moved;
    };
    const MeshTraffic moved = step(mesh);
    const MappingGain gain = mapping_gain(mesh.mesh(), found, moved.traffic);
    EXPECT_EQ(gain.ranks, (std::vector<int>{0, 2, 1, 3}));
    EXPECT_LT(gain.mapped_seconds, gain.seconds);
    EXPECT_DOUBLE_EQ(gain.bytes, 2 * 2 * 4 * (1 << 20));
    EXPECT_EQ(gain.mapped_bytes, 0);
    const DeviceMesh mapped = manager.mesh(Mesh(axes, gain.ranks));
    EXPECT_EQ(step(mapped), moved);
    const MappingGain again = mapping_gain(mapped.mesh(), found, moved.traffic);
    EXPECT_EQ(again.seconds, gain.mapped_seconds);
    EXPECT_EQ(again.mapping.method, "as it is");
    agree::same(manager.world(), "the gain", again.to_string() + gain.to_string());
  });
}

}  // namespace
}  // namespace tessera::test::mapped_groups_test
