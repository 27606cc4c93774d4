#include "tessera/mesh/mapping/rank_mapping.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

bool devices_alike(const Host& host) {
  return host.links.empty() &&
         std::ranges::all_of(host.rail, [&](int r) { return r == host.rail.front(); });
}

/// Tries all mappings, except for exchanging devices of one host that are alike (one rail, one
/// class of link: then only the host matters to the model).
class Exhaustive {
 public:
  Exhaustive(const CostModel& model, long long limit)
      : model_(model), limit_(limit), slot_of_(model.size()) {
    const Topology& topology = model.topology();
    for (int h = 0, slot = 0; h < static_cast<int>(topology.hosts.size()); ++h) {
      const Host& host = topology.hosts[h];
      const bool alike = devices_alike(host);
      for (int d = 0; d < host.devices; ++d, ++slot) {
        if (!alike || d == 0) classes_.emplace_back();
        classes_.back().push_back(slot);
      }
    }
    used_.assign(classes_.size(), 0);
  }

  /// nullopt if there are more mappings than the limit.
  std::optional<std::pair<double, std::vector<int>>> run() {
    long long count = 0;
    if (!place(0, [&] { return ++count <= limit_; })) return std::nullopt;
    std::pair<double, std::vector<int>> best;
    place(0, [&] {
      const double seconds = model_.seconds(slot_of_);
      if (best.second.empty() || seconds < best.first) best = {seconds, slot_of_};
      return true;
    });
    return best;
  }

 private:
  /// Calls `mapped` with each mapping in slot_of_, until it returns false; false if it did.
  template <class Mapped>
  bool place(int position, const Mapped& mapped) {
    if (position == model_.size()) return mapped();
    bool more = true;
    for (std::size_t c = 0; more && c < classes_.size(); ++c) {
      if (used_[c] == static_cast<int>(classes_[c].size())) continue;
      slot_of_[position] = classes_[c][used_[c]++];
      more = place(position + 1, mapped);
      --used_[c];
    }
    return more;
  }

  const CostModel& model_;
  long long limit_;
  std::vector<std::vector<int>> classes_;
  std::vector<int> used_, slot_of_;
};

/// Orders the ranks of a host by their positions if its devices are alike to the model: easier to
/// read, and what launchers do by themselves.
void tidy(const Topology& topology, std::vector<int>& slot_of) {
  const auto host_of = topology.hosts_of_slots();
  std::vector<std::vector<int>> positions(topology.hosts.size()), slots(topology.hosts.size());
  for (int p = 0; p < static_cast<int>(slot_of.size()); ++p) {
    positions[host_of[slot_of[p]]].push_back(p);
    slots[host_of[slot_of[p]]].push_back(slot_of[p]);
  }
  for (std::size_t h = 0; h < positions.size(); ++h) {
    if (!devices_alike(topology.hosts[h])) continue;
    std::ranges::sort(slots[h]);
    for (std::size_t i = 0; i < positions[h].size(); ++i) slot_of[positions[h][i]] = slots[h][i];
  }
}

/// A digit of a position: coordinate of `axis` modulo or divided by a factor.
struct Digit {
  int axis = 0;
  int size = 1;
  /// Stride in row-major positions.
  int stride = 1;
};

/// Assigns slots in the order of the digits, the first the fastest.
std::vector<int> in_order_of(const std::vector<Digit>& digits, int n) {
  std::vector<int> slot_of(n), counter(digits.size(), 0);
  int position = 0;
  for (int slot = 0; slot < n; ++slot) {
    slot_of[position] = slot;
    for (std::size_t k = 0; k < digits.size(); ++k) {
      position += digits[k].stride;
      if (++counter[k] < digits[k].size) break;
      position -= digits[k].size * digits[k].stride;
      counter[k] = 0;
    }
  }
  return slot_of;
}

class Search {
 public:
  Search(const CostModel& model, const MappingOptions& options)
      : model_(model), options_(options), mesh_(model.axes()), best_(naive_mapping(model)) {
    const double work = std::max<double>(
        1, static_cast<double>(model.size()) * std::max<std::size_t>(1, model.traffic().size()));
    tries_ = static_cast<long long>(std::clamp(options.effort * 4e6 / work, 8.0, 3000.0));
    swaps_ = static_cast<long long>(std::clamp(options.effort * 1.5e6 / work, 0.0, 6000.0));
    axes_ = by_traffic();
    for (int axis : axes_) sizes_.push_back(mesh_.size(axis));
    in_turn_ = numbers_below(static_cast<int>(axes_.size()));
  }

  RankMapping run() {
    orders();
    blocks();
    swaps();
    return best_;
  }

 private:
  /// Axes larger than 1, ordered by the bytes that they move, most first.
  std::vector<int> by_traffic() const {
    std::vector<double> bytes(mesh_.dims(), 0);
    for (const Traffic& t : model_.traffic())
      for (const auto& axis : t.axes) bytes[mesh_.index(axis)] += t.bytes * t.calls;
    auto axes = numbers_below(mesh_.dims(), [&](int i) { return mesh_.size(i) > 1; });
    std::ranges::stable_sort(axes, [&](int a, int b) { return bytes[a] > bytes[b]; });
    return axes;
  }

  /// Tries a mapping in the order of its digits: of each level a factor of each axis, then what is
  /// left of the axes in `rest_order`.
  double consider(const char* method, const std::vector<std::vector<int>>& levels,
                  const std::vector<int>& rest_order) {
    --tries_;
    std::vector<Digit> digits;
    std::vector<int> done(sizes_.size(), 1);
    const auto add = [&](std::size_t k, int factor) {
      if (factor > 1) digits.push_back({axes_[k], factor, mesh_.stride(axes_[k]) * done[k]});
      done[k] *= factor;
    };
    for (const auto& level : levels)
      for (std::size_t k = 0; k < sizes_.size(); ++k) add(k, level[k]);
    for (int k : rest_order) add(k, sizes_[k] / done[k]);
    auto slot_of = in_order_of(digits, model_.size());
    const double seconds = model_.seconds(slot_of);
    if (seconds < best_.seconds) {
      best_.seconds = seconds;
      best_.slot_of = std::move(slot_of);
      best_.method = method + names(digits);
    }
    return seconds;
  }

  std::string names(const std::vector<Digit>& digits) const {
    return joined(digits, "-", [&](const Digit& d) {
      return concat(mesh_.axes()[d.axis].name,
                    d.size == mesh_.size(d.axis) ? "" : concat("/", d.size));
    });
  }

  /// Tries complete axes in every order: which one has adjacent slots.
  void orders() {
    auto order = in_turn_;
    const long long reserve = tries_ / 2;
    do {
      consider("order ", {}, order);
    } while (tries_ > reserve && std::next_permutation(order.begin(), order.end()));
  }

  /// All ways to choose a factor of each axis (of size `sizes`) so that the factors multiply to
  /// `target`.
  static void factor(const std::vector<int>& sizes, int target, std::vector<int>& chosen,
                     std::vector<std::vector<int>>& all, std::size_t limit) {
    if (all.size() >= limit) return;
    if (chosen.size() == sizes.size()) {
      if (target == 1) all.push_back(chosen);
      return;
    }
    for (int f = std::min(target, sizes[chosen.size()]); f >= 1; --f) {
      if (target % f || sizes[chosen.size()] % f) continue;
      chosen.push_back(f);
      factor(sizes, target / f, chosen, all, limit);
      chosen.pop_back();
    }
  }

  /// Tries blocks: each host of one size holds a block with a factor of each axis; the hosts below
  /// one switch likewise hold a block of blocks.
  void blocks() {
    const Topology& topology = model_.topology();
    const int per_host = topology.hosts.front().devices;
    for (const Host& host : topology.hosts)
      if (host.devices != per_host) return;
    std::map<int, int> below;
    for (const Host& host : topology.hosts) ++below[host.network];
    int per_switch = below.begin()->second;
    for (const auto& [unused, hosts] : below)
      if (hosts != per_switch) per_switch = 1;
    std::vector<int> chosen;
    std::vector<std::vector<int>> inner;
    factor(sizes_, per_host, chosen, inner, 2000);
    // The best few blocks with the other digits in the order of traffic, then those with every
    // block of blocks and every order of the rest.
    std::vector<std::pair<double, std::size_t>> ranked;
    const long long reserve = tries_ / 2;
    for (std::size_t i = 0; i < inner.size() && tries_ > reserve; ++i)
      ranked.emplace_back(consider("blocks ", {inner[i]}, in_turn_), i);
    std::ranges::sort(ranked);
    if (ranked.size() > 6) ranked.resize(6);
    for (const auto& [unused, i] : ranked) {
      std::vector<std::vector<int>> outer;
      std::vector<int> rest(sizes_.size());
      for (std::size_t k = 0; k < rest.size(); ++k) rest[k] = sizes_[k] / inner[i][k];
      chosen.clear();
      if (per_switch > 1) factor(rest, per_switch, chosen, outer, 200);
      for (const auto& block : outer) {
        if (tries_ <= 0) return;
        consider("blocks ", {inner[i], block}, in_turn_);
      }
      auto order = in_turn_;
      while (tries_ > 0 && std::next_permutation(order.begin(), order.end()))
        consider("blocks ", {inner[i]}, order);
    }
  }

  /// Exchanges two ranks on different hosts, or moves one to a spare slot. At first a slightly
  /// higher cost is accepted too (simulated annealing), so that several exchanges that gain only
  /// together are found.
  void swaps() {
    std::mt19937 random(options_.seed);
    const auto host_of = model_.topology().hosts_of_slots();
    const auto slots = static_cast<unsigned>(host_of.size());
    std::vector<int> position_of(slots, -1);
    auto current = best_.slot_of, found = current;
    double seconds = best_.seconds, least = seconds;
    for (int p = 0; p < model_.size(); ++p) position_of[current[p]] = p;
    for (long long i = 0; i < swaps_; ++i) {
      const int a = static_cast<int>(random() % static_cast<unsigned>(model_.size()));
      const int from = current[a], to = static_cast<int>(random() % slots), b = position_of[to];
      const double luck = random() / 4294967296.0;
      if (from == to) continue;
      const auto exchange = [&](int a_slot, int b_slot) {
        current[a] = a_slot;
        if (b >= 0) current[b] = b_slot;
        position_of[b_slot] = b;
        position_of[a_slot] = a;
      };
      exchange(to, from);
      const double now = model_.seconds(current);
      const double warmth =
          0.1 * best_.seconds *
          std::max(0.0, 1 - 1.25 * static_cast<double>(i) / static_cast<double>(swaps_));
      if (now <= seconds - warmth * std::log(1 - luck)) {
        seconds = now;
        if (seconds < least) {
          least = seconds;
          found = current;
        }
      } else {
        exchange(from, to);
      }
    }
    if (least < best_.seconds) {
      best_.seconds = least;
      best_.slot_of = std::move(found);
      best_.method += " + swaps";
    }
  }

  const CostModel& model_;
  MappingOptions options_;
  Mesh mesh_;
  RankMapping best_;
  /// The axes by traffic, their sizes, and 0, 1, 2 ... for each of them.
  std::vector<int> axes_, sizes_, in_turn_;
  long long tries_ = 0, swaps_ = 0;
};

}  // namespace

const char* to_string(Reach reach) {
  return reach == Reach::inside    ? "inside hosts"
         : reach == Reach::between ? "between hosts"
                                   : "inside and between hosts";
}

Reach reach_of(const GroupTable& groups, const std::vector<int>& host_of) {
  bool shares = false, spans = false;
  for (int g = 0; g < groups.count(); ++g) {
    auto hosts = mapped(groups[g], [&](int rank) { return host_of.at(rank); });
    std::ranges::sort(hosts);
    spans = spans || hosts.front() != hosts.back();
    shares = shares || std::ranges::adjacent_find(hosts) != hosts.end();
    if (spans && shares) return Reach::both;
  }
  return spans ? Reach::between : Reach::inside;
}

HierarchicalGroups hierarchical_groups(const GroupTable& groups, const std::vector<int>& host_of) {
  HierarchicalGroups levels;
  for (int g = 0; g < groups.count(); ++g) {
    RankLists by_host;  // hosts in the order of their first member
    std::map<int, std::size_t> index;
    for (int rank : groups[g]) {
      const auto at = index.emplace(host_of.at(rank), by_host.size());
      if (at.second) by_host.emplace_back();
      by_host[at.first->second].push_back(rank);
    }
    for (const auto& members : by_host)
      if (members.size() != by_host.front().size())
        throw OrthogonalityError(
            concat("the group ", list(groups[g]),
                   " cannot be split into inside x between hosts: ranks ", list(by_host.front()),
                   " are on one host and ", list(members), " on another, which are ",
                   by_host.front().size(), " and ", members.size(),
                   "; choose a mapping with equal numbers"),
            members);
    for (std::size_t i = 0; i < by_host.front().size(); ++i)
      levels.between.push_back(mapped(by_host, [&](const auto& members) { return members[i]; }));
    levels.inside.insert(levels.inside.end(), by_host.begin(), by_host.end());
  }
  return levels;
}

RankMapping naive_mapping(const CostModel& model) {
  RankMapping placement;
  placement.slot_of = numbers_below(model.size());
  placement.seconds = placement.naive_seconds = model.seconds(placement.slot_of);
  placement.lower_bound = model.lower_bound();
  placement.method = "naive";
  return placement;
}

RankMapping optimise_mapping(const CostModel& model, const MappingOptions& options) {
  if (options.exact_limit > 0) {
    if (const auto found = Exhaustive(model, options.exact_limit).run()) {
      RankMapping placement = naive_mapping(model);
      placement.exact = true;
      if (found->first < placement.seconds) {
        placement.seconds = found->first;
        placement.slot_of = found->second;
      }
      placement.method = "exact";
      tidy(model.topology(), placement.slot_of);
      return placement;
    }
  }
  RankMapping placement = Search(model, options).run();
  if (placement.method != "naive") tidy(model.topology(), placement.slot_of);
  return placement;
}

RankMapping given_mapping(const CostModel& model, std::vector<int> slot_of) {
  const int slots = model.topology().slots();
  if (static_cast<int>(slot_of.size()) != model.size())
    throw MappingError("the mapping has ", slot_of.size(), " entries, but the mesh has ",
                       model.size(), " ranks; give one slot per rank");
  std::vector<int> taken(slots, -1);
  for (int p = 0; p < model.size(); ++p) {
    if (slot_of[p] < 0 || slot_of[p] >= slots)
      throw MappingError("the mapping puts rank ", p, " on slot ", slot_of[p],
                         ", but the slots are 0 to ", slots - 1);
    if (taken[slot_of[p]] >= 0)
      throw MappingError("the mapping puts ranks ", taken[slot_of[p]], " and ", p, " both on slot ",
                         slot_of[p]);
    taken[slot_of[p]] = p;
  }
  RankMapping placement = naive_mapping(model);
  placement.seconds = model.seconds(slot_of);
  placement.slot_of = std::move(slot_of);
  placement.method = "given";
  return placement;
}

Mesh mapped_mesh(const std::vector<Axis>& axes, const RankMapping& placement) {
  return Mesh(axes, placement.slot_of);
}

}  // namespace tessera
