#include "tessera/mesh/mapping/cost.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "tessera/base/internal/counted.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/mesh_traffic.h"

namespace tessera {
namespace {

constexpr std::pair<Collective, const char*> kNames[] = {
    {Collective::all_reduce, "all_reduce"},
    {Collective::all_gather, "all_gather"},
    {Collective::reduce_scatter, "reduce_scatter"},
    {Collective::broadcast, "broadcast"},
    {Collective::reduce, "reduce"},
    {Collective::all_to_all, "all_to_all"},
    {Collective::send, "send"}};

/// Slots in the order of the switch tree, so that rings cross each boundary as seldom as possible:
/// place[slot].
std::vector<int> tree_order(const Topology& topology) {
  // Of each switch; without any, all hosts are on one that has no name.
  const std::size_t switches = std::max<std::size_t>(1, topology.switches.size());
  std::vector<std::vector<int>> below(switches), slots(switches);
  int root = 0, slot = 0, at = 0;
  for (int s = 0; s < static_cast<int>(topology.switches.size()); ++s) {
    if (topology.switches[s].parent < 0)
      root = s;
    else
      below[topology.switches[s].parent].push_back(s);
  }
  for (const Host& host : topology.hosts)
    for (int d = 0; d < host.devices; ++d) slots[std::max(0, host.network)].push_back(slot++);
  std::vector<int> place(slot);
  const std::function<void(int)> walk = [&](int s) {
    for (int own : slots[s]) place[own] = at++;
    for (int child : below[s]) walk(child);
  };
  walk(root);
  return place;
}

}  // namespace

const char* to_string(Collective collective) {
  for (const auto& [known, name] : kNames)
    if (known == collective) return name;
  return "?";
}

Collective collective_from(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& [known, text] : kNames) {
    if (text == name) return known;
    names.push_back(text);
  }
  throw GroupConfigError("there is no collective '", printable(name),
                         "' in the cost model; it knows ", list(names));
}

/// Loads of one round, and which of them must be cleared after it.
struct CostModel::Scratch {
  struct Loads {
    std::vector<double> of;
    std::vector<int> touched;
    void add(int i, double amount) {
      if (of[i] == 0) touched.push_back(i);
      of[i] += amount;
    }
    template <class F>
    void drain(F&& use) {
      for (int i : touched) {
        use(i, of[i]);
        of[i] = 0;
      }
      touched.clear();
    }
  };
  Loads adapter_out, adapter_in, bus, up, down;
  std::vector<std::vector<int>> members;  // slots of every group, in tree order
  std::vector<std::pair<int, int>> flows;
};

CostModel::CostModel(const Topology& topology, std::vector<Axis> axes, std::vector<Traffic> traffic)
    : topology_(topology), mesh_(std::move(axes)), traffic_(std::move(traffic)) {
  topology_.check();
  if (mesh_.size() > topology_.slots())
    throw MappingError("a mesh of ", mesh_.size(), " ranks does not fit on ",
                       counted(topology_.hosts.size(), "host"), " with ",
                       counted(topology_.slots(), "device"),
                       " in all: give it smaller axes, or more hosts or devices");
  check_traffic(mesh_, traffic_);
  for (const Traffic& t : traffic_) groups_.push_back(mesh_.groups(t.axes));
  for (std::size_t h = 0; h < topology_.hosts.size(); ++h) {
    const Host& host = topology_.hosts[h];
    for (int d = 0; d < host.devices; ++d) {
      host_.push_back(static_cast<int>(h));
      device_.push_back(d);
      rail_.push_back(topology_.rail_of(static_cast<int>(h), d));
      rails_ = std::max(rails_, rail_.back() + 1);
    }
    std::vector<int> classes;
    if (!host.links.empty()) {
      classes.assign(static_cast<std::size_t>(host.devices) * host.devices, host.link_class);
      for (const DeviceLink& link : host.links)
        classes[link.a * host.devices + link.b] = classes[link.b * host.devices + link.a] =
            link.link_class;
    }
    pair_class_.push_back(std::move(classes));
  }
  for (const Switch& sw : topology_.switches) {
    int depth = 0;
    for (int at = sw.parent; at >= 0; at = topology_.switches[at].parent) ++depth;
    depth_.push_back(depth);
  }
  place_ = tree_order(topology_);
}

/// Seconds of one round in which each flow (slot -> slot) carries `bytes`.
double CostModel::round_seconds(const std::vector<std::pair<int, int>>& flows, double bytes,
                                Scratch& scratch) const {
  double latency = 0, slowest = 0;
  const auto& switches = topology_.switches;
  for (const auto& [from, to] : flows) {
    const int a = host_[from], b = host_[to];
    double way = 0;
    if (a == b) {
      const int kind =
          pair_class_[a].empty()
              ? topology_.hosts[a].link_class
              : pair_class_[a][device_[from] * topology_.hosts[a].devices + device_[to]];
      const LinkClass& link = topology_.device_links[kind];
      way = link.latency;
      if (link.shared)
        scratch.bus.add(a * static_cast<int>(topology_.device_links.size()) + kind, bytes);
      else
        slowest = std::max(slowest, bytes / link.bandwidth);
    } else {
      way =
          topology_.network.latency + (rail_[from] == rail_[to] ? 0 : topology_.cross_rail_latency);
      scratch.adapter_out.add(a * rails_ + rail_[from], bytes);
      scratch.adapter_in.add(b * rails_ + rail_[to], bytes);
      int x = topology_.hosts[a].network, y = topology_.hosts[b].network;
      while (x != y) {
        if (depth_[x] >= depth_[y]) {
          scratch.up.add(x, bytes);
          way += switches[x].latency;
          x = switches[x].parent;
        } else {
          scratch.down.add(y, bytes);
          way += switches[y].latency;
          y = switches[y].parent;
        }
      }
    }
    latency = std::max(latency, way);
  }
  return latency + std::max(slowest, drain(scratch));
}

/// The time that the fullest link needs; clears all loads.
double CostModel::drain(Scratch& scratch) const {
  double slowest = 0;
  const auto adapter = [&](int, double load) {
    slowest = std::max(slowest, load / topology_.network.bandwidth);
  };
  const auto uplink = [&](int s, double load) {
    if (topology_.switches[s].uplink_bandwidth > 0)
      slowest = std::max(slowest, load / topology_.switches[s].uplink_bandwidth);
  };
  scratch.adapter_out.drain(adapter);
  scratch.adapter_in.drain(adapter);
  scratch.up.drain(uplink);
  scratch.down.drain(uplink);
  scratch.bus.drain([&](int i, double load) {
    slowest = std::max(slowest,
                       load / topology_.device_links[i % topology_.device_links.size()].bandwidth);
  });
  return slowest;
}

namespace {

/// The latencies of the two longest ways from one of these switches to the lowest one
/// that holds the whole group of p.
std::pair<double, double> two_longest_ways(const std::vector<Switch>& switches,
                                           const std::vector<int>& from,
                                           const std::vector<int>& below, int p) {
  double longest = 0, second = 0;
  for (int s : from) {
    double up = 0;
    for (int at = s; at >= 0 && below[at] < p; at = switches[at].parent) up += switches[at].latency;
    second = std::max(second, up > longest ? std::exchange(longest, up) : up);
  }
  return {longest, second};
}

}  // namespace

/// p - 1 rounds of pairwise exchange, with the loads of all rounds together: in each round every
/// rank has another partner, so that they even out.
double CostModel::all_to_all_seconds(double bytes, Scratch& scratch) const {
  double latency = 0, slowest = 0;
  const auto& switches = topology_.switches;
  std::vector<int> below(switches.size(), 0), touched;
  for (const auto& members : scratch.members) {
    const int p = static_cast<int>(members.size());
    const double part = bytes / p;
    // Members of one host are neighbours in tree order.
    for (int i = 0, end = 0; i < p; i = end) {
      const int h = host_[members[i]];
      while (end < p && host_[members[end]] == h) ++end;
      for (int a = i; a < end; ++a) {
        double own = 0;
        for (int b = i; b < end; ++b) {
          if (a == b) continue;
          const int x = device_[members[a]], y = device_[members[b]];
          const int kind = pair_class_[h].empty()
                               ? topology_.hosts[h].link_class
                               : pair_class_[h][x * topology_.hosts[h].devices + y];
          const LinkClass& link = topology_.device_links[kind];
          latency = std::max(latency, link.latency);
          if (link.shared)
            scratch.bus.add(h * static_cast<int>(topology_.device_links.size()) + kind, part);
          else
            own += part / link.bandwidth;
        }
        slowest = std::max(slowest, own);
        if (end - i == p) continue;
        scratch.adapter_out.add(h * rails_ + rail_[members[a]], part * (p - (end - i)));
        scratch.adapter_in.add(h * rails_ + rail_[members[a]], part * (p - (end - i)));
      }
      if (end - i < p) {
        latency = std::max(latency, topology_.network.latency);
        for (int s = topology_.hosts[h].network; s >= 0; s = switches[s].parent) {
          if (below[s] == 0) touched.push_back(s);
          below[s] += end - i;
        }
      }
    }
    for (int s : touched) {
      if (below[s] == p) continue;
      scratch.up.add(s, part * below[s] * (p - below[s]));
      scratch.down.add(s, part * below[s] * (p - below[s]));
    }
    const auto [longest, second] = two_longest_ways(switches, touched, below, p);
    for (int s : touched) below[s] = 0;
    if (!touched.empty()) {
      const bool rails =
          topology_.cross_rail_latency > 0 &&
          std::ranges::any_of(members, [&](int m) { return rail_[m] != rail_[members[0]]; });
      latency = std::max(latency, topology_.network.latency + longest + second +
                                      (rails ? topology_.cross_rail_latency : 0));
    }
    touched.clear();
  }
  return (static_cast<double>(scratch.members.front().size()) - 1) * latency +
         std::max(slowest, drain(scratch));
}

namespace {

using Choice = std::pair<double, const char*>;  // seconds, and the algorithm that takes them

Choice best(std::initializer_list<Choice> choices) {
  return *std::ranges::min_element(
      choices, [](const Choice& a, const Choice& b) { return a.first < b.first; });
}

/// The cheapest algorithm for a collective of n bytes among p members, and its seconds.
/// `round(partner, bytes)`: the seconds of a round in which member i sends to partner(i), or, at
/// -1, does not.
template <class Round>
Choice cheapest(Collective collective, double n, int p, const Round& round) {
  const auto ring_round = [&] {
    return round([&](int i) { return i + 1 == p ? 0 : i + 1; }, n / p);
  };
  int power = 1;
  while (power * 2 <= p) power *= 2;
  const int extra = p - power;
  // In the recursive algorithms the first `extra` odd members stand for their left neighbours.
  const auto member_of = [&](int i) { return i < extra ? 2 * i + 1 : i + extra; };
  const auto index_of = [&](int m) { return m < 2 * extra ? (m % 2 ? m / 2 : -1) : m - extra; };
  const auto fold = [&](double bytes) {
    return extra == 0
               ? 0.0
               : round([&](int i) { return i < 2 * extra && i % 2 == 0 ? i + 1 : -1; }, bytes);
  };
  // Nearest partners exchange the largest messages: n/2 at distance 1, n/4 at distance 2 ...; or n
  // each time.
  const auto exchange = [&](bool halves) {
    double seconds = 0;
    for (int distance = 1, k = 1; distance < power; distance *= 2, ++k)
      seconds += round(
          [&](int m) {
            const int i = index_of(m);
            return i < 0 ? -1 : member_of(i ^ distance);
          },
          halves ? std::ldexp(n, -k) : n);
    return seconds;
  };
  // Farthest first, so that few messages leave a host; in a scatter a message contains what the
  // receiver will pass on.
  const auto tree = [&](bool scatter) {
    double seconds = 0;
    for (int distance = power == p ? p / 2 : power; distance > 0; distance /= 2)
      seconds += round(
          [&](int i) { return i % (2 * distance) == 0 && i + distance < p ? i + distance : -1; },
          scatter ? n * std::min(distance, p - distance) / p : n);
    return seconds;
  };
  switch (collective) {
    case Collective::all_reduce: {
      const double ends = 2 * fold(n);
      return best({{2 * (p - 1) * ring_round(), "ring"},
                   {ends + exchange(false), "recursive doubling"},
                   {ends + 2 * exchange(true), "halving and doubling"}});
    }
    case Collective::all_gather:
      return best({{(p - 1) * ring_round(), "ring"},
                   {fold(n) + fold(n / p) + exchange(true), "recursive doubling"}});
    case Collective::reduce_scatter:
      return best({{(p - 1) * ring_round(), "ring"},
                   {fold(n) + fold(n / p) + exchange(true), "recursive halving"}});
    default:  // broadcast and reduce: the same messages, the other way
      return best(
          {{tree(false), "binomial tree"}, {tree(true) + (p - 1) * ring_round(), "tree and ring"}});
  }
}

}  // namespace

std::pair<double, const char*> CostModel::family_cost(std::size_t entry,
                                                      const std::vector<int>& slot_of,
                                                      Scratch& scratch) const {
  const Traffic& traffic = traffic_[entry];
  const GroupTable& groups = groups_[entry];
  const int p = groups.group_size;
  if (p == 1 || traffic.calls == 0) return {0.0, "none"};
  const double n = traffic.bytes;
  auto& flows = scratch.flows;
  scratch.members.resize(groups.count());
  for (int g = 0; g < groups.count(); ++g) {
    auto& members = scratch.members[g];
    members.clear();
    for (int position : groups[g]) members.push_back(slot_of[position]);
  }
  if (traffic.collective == Collective::send) {  // in group order: before the sort
    flows.clear();
    for (const auto& m : scratch.members)
      for (int i = 0; i + 1 < p; ++i) flows.emplace_back(m[i], m[i + 1]);
    return {traffic.calls * round_seconds(flows, n, scratch), "to the next rank"};
  }
  for (auto& members : scratch.members)
    std::ranges::sort(members, [&](int a, int b) { return place_[a] < place_[b]; });
  if (traffic.collective == Collective::all_to_all)
    return {traffic.calls * all_to_all_seconds(n, scratch), "pairwise exchange"};

  const auto [seconds, name] =
      cheapest(traffic.collective, n, p, [&](const auto& partner, double bytes) {
        flows.clear();
        for (const auto& m : scratch.members)
          for (int i = 0; i < p; ++i)
            if (const int j = partner(i); j >= 0) flows.emplace_back(m[i], m[j]);
        return round_seconds(flows, bytes, scratch);
      });
  return {traffic.calls * seconds, name};
}

MappingCost CostModel::evaluate(const std::vector<int>& slot_of, bool explain) const {
  if (static_cast<int>(slot_of.size()) != mesh_.size())
    throw MappingError("a mapping of ", slot_of.size(), " positions for a mesh of ", mesh_.size(),
                       " ranks");
  Scratch scratch;
  const auto hosts = topology_.hosts.size();
  scratch.adapter_out.of.assign(hosts * rails_, 0);
  scratch.adapter_in.of.assign(hosts * rails_, 0);
  scratch.bus.of.assign(hosts * topology_.device_links.size(), 0);
  scratch.up.of.assign(topology_.switches.size(), 0);
  scratch.down.of.assign(topology_.switches.size(), 0);
  MappingCost total;
  for (std::size_t t = 0; t < traffic_.size(); ++t) {
    const auto [seconds, algorithm] = family_cost(t, slot_of, scratch);
    total.seconds += seconds;
    if (!explain) continue;
    const Traffic& traffic = traffic_[t];
    total.axes.push_back({joined(traffic.axes, "-"), traffic.collective, seconds, algorithm});
  }
  return total;
}

MappingCost CostModel::cost(const std::vector<int>& slot_of) const {
  return evaluate(slot_of, true);
}
double CostModel::seconds(const std::vector<int>& slot_of) const {
  return evaluate(slot_of, false).seconds;
}

}  // namespace tessera
