// CostModel::lower_bound. Consider the set S of ranks on one host, h of them. For a single axis i
// of size p_i let g_i be the number of its groups that have a rank in S. Then
//
//   product of g_i  >=  h^(d-1)       over the d axes larger than 1 (L. H. Loomis and H. Whitney,
//                                     "An inequality related to the isoperimetric inequality",
//                                     Bull. AMS 55, 1949: g_i is the size of S's projection along
//                                     axis i),
//
// so the axes cannot all have few groups on the host. A group with m of its p ranks on the host, 0
// < m < p, must move at least f n (1 - m/p) bytes through the host's adapters in one direction;
// summed over the groups that is f n (g_i - h/p_i). The factor f: 2 for all_reduce by ring, or by a
// recursive algorithm on a power of two (its exchanges are symmetric), else 1; 1 for all_gather
// (incoming), reduce_scatter (outgoing) and all_to_all; 1/2 for broadcast, reduce and send, for
// which it is only known that n bytes cross in one direction or the other. Minimise over all g_i
// that the inequality allows. The bound ignores switches, buses, and that the best g_i of several
// hosts may exclude each other.

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "tessera/mesh/mapping/cost.h"

namespace tessera {
namespace {

// number of tuples of g_i; for more of them the inequality is left out, which only lowers the bound
constexpr double kMany = 2e6;

struct Machine {
  double least_latency, network_latency, best_bandwidth, network_bandwidth, host_bandwidth;
};

/// The least time of one call if g of its groups of p ranks have ranks among the h of a host.
double call_bound(const Traffic& traffic, int p, int h, int g, const Machine& m) {
  if (p == 1) return 0;
  const double n = traffic.bytes, groups_off = g - static_cast<double>(h) / p;
  const bool crosses = static_cast<long long>(g) * p != h;
  const double in_bandwidth = m.best_bandwidth;
  // rounds, bytes that every rank sends in all rounds, factor f, and whether every round crosses if
  // one does.
  const auto algorithm = [&](double rounds, double sent, double f, bool all_rounds) {
    const double latency = crosses
                               ? (all_rounds ? rounds * m.network_latency
                                             : (rounds - 1) * m.least_latency + m.network_latency)
                               : rounds * m.least_latency;
    double transfer = sent / in_bandwidth;
    if (crosses) transfer = std::max(transfer, f * n * groups_off / m.host_bandwidth);
    if (crosses && all_rounds) transfer = std::max(transfer, sent / m.network_bandwidth);
    return latency + transfer;
  };
  const bool power = (p & (p - 1)) == 0;
  const double part = n * (p - 1) / p;
  int logs = 0;  // rounds of the largest power of two within p
  while ((2 << logs) <= p) ++logs;
  const double halves = n * (1 - std::ldexp(1.0, -logs));
  switch (traffic.collective) {
    case Collective::all_reduce: {
      const double f = power ? 2 : 1;
      return std::min({algorithm(2 * (p - 1), 2 * part, 2, true),
                       algorithm(logs, logs * n, f, false),
                       algorithm(2 * logs, 2 * halves, f, false)});
    }
    case Collective::all_gather:
    case Collective::reduce_scatter:
      return std::min(algorithm(p - 1, part, 1, true),
                      algorithm(logs, halves, power ? 1 : 0.5, false));
    case Collective::broadcast:
    case Collective::reduce: {
      const int depth = power ? logs : logs + 1;
      return std::min(algorithm(depth, depth * n, 0.5, false),
                      algorithm(p - 1 + depth, part, 0.5, false));
    }
    case Collective::all_to_all: {
      // Two bounds of Sum m (1 - m/p) over the groups: m >= 1, and no m above what g groups leave.
      // What a rank sends goes partly over the host's links and partly over its adapter at the same
      // time: half of it is on one of them.
      const int most = std::min(p, h - g + 1);
      const double f =
          crosses ? std::max(groups_off, h * (1 - static_cast<double>(most) / p)) / groups_off : 0;
      return algorithm(p - 1, part / 2, f, false);
    }
    case Collective::send:
      return algorithm(1, n, 0.5, false);
  }
  return 0;
}

}  // namespace

/// The bound that follows from a host with `ranks` of the mesh's ranks.
double CostModel::host_bound(int ranks, double host_bandwidth) const {
  Machine m{topology_.network.latency, topology_.network.latency, topology_.network.bandwidth,
            topology_.network.bandwidth, host_bandwidth};
  for (const LinkClass& link : topology_.device_links) {
    m.least_latency = std::min(m.least_latency, link.latency);
    m.best_bandwidth = std::max(m.best_bandwidth, link.bandwidth);
  }
  double total = 0;
  const auto fewest = [&](int p) { return (ranks + std::min(p, ranks) - 1) / std::min(p, ranks); };
  // of the axes larger than 1: by number of groups on the host
  std::vector<std::vector<double>> cost;
  double tuples = 1;
  for (const Axis& axis : mesh_.axes()) {
    if (axis.size == 1) continue;
    std::vector<double> by_groups(ranks + 1, std::numeric_limits<double>::infinity());
    for (int g = fewest(axis.size); g <= ranks; ++g) {
      by_groups[g] = 0;
      for (const Traffic& t : traffic_)
        if (t.axes.size() == 1 && t.axes.front() == axis.name)
          by_groups[g] += t.calls * call_bound(t, axis.size, ranks, g, m);
    }
    // More groups never cost less: what counts is the least cost with at least g of them.
    for (int g = ranks; g-- > 0;) by_groups[g] = std::min(by_groups[g], by_groups[g + 1]);
    cost.push_back(std::move(by_groups));
    tuples *= ranks;
  }
  for (std::size_t t = 0; t < traffic_.size(); ++t)
    if (const int p = groups_[t].group_size; traffic_[t].axes.size() > 1)
      total += traffic_[t].calls * call_bound(traffic_[t], p, ranks, fewest(p), m);
  if (cost.empty()) return total;
  if (tuples / ranks > kMany) {
    for (const auto& by_groups : cost) total += by_groups[1];
    return total;
  }
  const double needed = std::pow(ranks, static_cast<double>(cost.size()) - 1) * (1 - 1e-9);
  double least = std::numeric_limits<double>::infinity();
  const auto walk = [&](auto&& self, std::size_t i, double product, double sum) -> void {
    if (sum >= least) return;
    if (i + 1 == cost.size()) {
      const int g = std::max(1, static_cast<int>(std::ceil(needed / product - 1e-9)));
      if (g <= ranks) least = std::min(least, sum + cost[i][g]);
      return;
    }
    for (int g = 1; g <= ranks; ++g) self(self, i + 1, product * g, sum + cost[i][g]);
  };
  walk(walk, 0, 1, 0);
  return total + least;
}

double CostModel::lower_bound() const {
  const int n = mesh_.size(), hosts = static_cast<int>(topology_.hosts.size());
  const auto bandwidth = [&](const Host& host) {
    const std::set<int> rails(host.rail.begin(), host.rail.end());
    return topology_.network.bandwidth * std::max<std::size_t>(1, rails.size());
  };
  if (n == topology_.slots()) {  // every host is full: the largest of their bounds counts
    double best = 0;
    std::set<std::pair<int, double>> seen;
    for (const Host& host : topology_.hosts)
      if (seen.emplace(host.devices, bandwidth(host)).second)
        best = std::max(best, host_bound(host.devices, bandwidth(host)));
    return best;
  }
  // Spare slots: some host holds at least the average, but which and how many is not known.
  int most = 0;
  double widest = 0, least = std::numeric_limits<double>::infinity();
  for (const Host& host : topology_.hosts) {
    most = std::max(most, host.devices);
    widest = std::max(widest, bandwidth(host));
  }
  for (int ranks = (n + hosts - 1) / hosts; ranks <= std::min(most, n); ++ranks)
    least = std::min(least, host_bound(ranks, widest));
  return least;
}

}  // namespace tessera
