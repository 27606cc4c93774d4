#include <algorithm>
#include <cstdio>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "plan.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera::app {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string percent_above(double seconds, double bound) {
  if (!(bound > 0)) return "";
  return concat(" (", fixed(100 * (seconds / bound - 1), 1), "% above)");
}

/// The lists without spaces inside, so that a group stays one word.
std::string group_text(std::span<const int> group) { return list(group, 16); }

void print_placement(const Plan& plan, TextStream& out, int most_hosts) {
  const auto& placed = *plan.placement;
  out << "\nhosts (ranks by device)\n";
  std::vector<std::vector<std::pair<int, int>>> ranks(placed.topology.hosts.size());
  for (int r = 0; r < static_cast<int>(placed.slot_of.size()); ++r)
    ranks[placed.host_of[r]].emplace_back(placed.slot_of[r], r);
  for (std::size_t h = 0; h < ranks.size(); ++h) {
    if (static_cast<int>(h) == most_hosts) {
      out << "  ... " << ranks.size() << " hosts in all\n";
      break;
    }
    std::ranges::sort(ranks[h]);
    std::vector<int> on_host;
    for (const auto& [slot, rank] : ranks[h]) on_host.push_back(rank);
    const Host& host = placed.topology.hosts[h];
    out << "  " << host.name;
    if (host.network >= 0) out << " (" << placed.topology.switches[host.network].name << ")";
    out << ": " << list(on_host, 16) << "\n";
  }
  if (placed.cost.empty()) {
    out << "no traffic given: nothing to optimise, ranks stand as the launcher starts them\n";
    return;
  }
  out << "\ncost of a step                       before         after\n";
  for (std::size_t t = 0; t < placed.cost.size(); ++t) {
    const auto &now = placed.cost[t], &before = placed.naive_cost[t];
    out << "  " << std::left << std::setw(16) << now.axes << std::setw(16)
        << to_string(now.collective) << std::right << std::setw(9) << duration_text(before.seconds)
        << std::setw(14) << duration_text(now.seconds) << "   " << now.algorithm << "\n";
  }
  out << "  " << std::left << std::setw(32) << "all" << std::right << std::setw(9)
      << duration_text(placed.naive_seconds) << std::setw(14) << duration_text(placed.seconds)
      << "\n";
  out << "placement: " << placed.method;
  if (placed.exact)
    out << ", all placements were tried: none is cheaper";
  else if (placed.lower_bound > 0)
    out << ", no placement costs less than " << duration_text(placed.lower_bound)
        << percent_above(placed.seconds, placed.lower_bound);
  out << "\n";
}

OrderedJson member_lists(const GroupTable& groups) {
  OrderedJson lists = OrderedJson::array();
  for (int g = 0; g < groups.count(); ++g)
    lists.push_back(std::vector<int>(groups[g].begin(), groups[g].end()));
  return lists;
}

/// The group that holds the rank, and its place in it.
std::pair<std::span<const int>, int> group_of(const GroupTable& groups, int rank) {
  for (int g = 0; g < groups.count(); ++g)
    for (int i = 0; i < groups.group_size; ++i)
      if (groups[g][i] == rank) return {groups[g], i};
  return {};
}

}  // namespace

std::string duration_text(double seconds) {
  if (seconds == 0) return "0 s";
  if (seconds < 1e-3) return significant(seconds * 1e6, 3) + " us";
  if (seconds < 1) return significant(seconds * 1e3, 3) + " ms";
  return significant(seconds, 4) + " s";
}

std::string plan_text(const Plan& plan, std::optional<int> rank, int most_groups) {
  TextStream out;
  out << plan.mesh.size() << " ranks\nmesh " << plan.mesh << "\n";
  if (!plan.order.empty()) out << "order " << plan.order << " (first = adjacent ranks)\n";
  if (!plan.tree.empty()) out << "\n" << plan.tree;
  if (rank) {
    out << "\nrank " << *rank << " at";
    const auto at = plan.mesh.coordinate(*rank);
    for (int i = 0; i < plan.mesh.dims(); ++i)
      out << ' ' << plan.mesh.axes()[i].name << '=' << at[i];
    if (plan.placement)
      out << " on " << plan.placement->topology.hosts[plan.placement->host_of[*rank]].name;
    out << "\n";
  }
  out << "\ngroups\n";
  for (const auto& family : plan.families) {
    out << "  " << family.name << ": ";
    if (rank) {
      const auto [members, place] = group_of(family.groups, *rank);
      out << "rank " << place << " of " << members.size() << " in " << list(members, 64);
    } else {
      out << family.groups.count() << " of " << family.groups.group_size
          << (family.groups.group_size == 1 ? " rank" : " ranks");
    }
    if (family.reach) out << ", " << to_string(*family.reach);
    if (!family.note.empty()) out << ", " << family.note;
    if (!family.options.backend.empty()) out << ", backend " << family.options.backend;
    if (family.options.timeout) out << ", timeout " << family.options.timeout->count() << " ms";
    out << "\n";
    if (rank) continue;
    out << "   ";
    for (int g = 0; g < std::min(family.groups.count(), most_groups); ++g)
      out << ' ' << group_text(family.groups[g]);
    if (family.groups.count() > most_groups)
      out << " ... (" << family.groups.count() << " groups; --json lists all)";
    out << "\n";
  }
  if (plan.placement) print_placement(plan, out, 64);
  for (const auto& warning : plan.warnings) out << "warning: " << warning << "\n";
  out << "plan " << plan.hash << "\n";
  return std::move(out).str();
}

std::string plan_json(const Plan& plan, std::optional<int> rank) {
  OrderedJson out;
  out["world"] = plan.mesh.size();
  for (const Axis& axis : plan.mesh.axes())
    out["mesh"].push_back(OrderedJson{{"axis", axis.name}, {"size", axis.size}});
  if (!plan.order.empty()) out["order"] = plan.order;
  if (!plan.mesh.row_major()) out["ranks"] = plan.mesh.ranks();
  out["groups"] = OrderedJson::object();
  for (const auto& family : plan.families) out["groups"][family.name] = member_lists(family.groups);
  for (const auto& family : plan.families) {
    OrderedJson about{{"size", family.groups.group_size}, {"count", family.groups.count()}};
    if (family.reach) about["runs"] = to_string(*family.reach);
    if (!family.note.empty()) about["note"] = family.note;
    if (!family.options.backend.empty()) about["backend"] = family.options.backend;
    if (family.options.timeout) about["timeout_ms"] = family.options.timeout->count();
    out["families"][family.name] = std::move(about);
  }
  if (rank) {
    OrderedJson mine{{"rank", *rank}, {"coordinate", plan.mesh.coordinate(*rank)}};
    for (const auto& family : plan.families) {
      const auto [members, place] = group_of(family.groups, *rank);
      mine["groups"][family.name] = OrderedJson{
          {"ranks", std::vector<int>(members.begin(), members.end())}, {"group_rank", place}};
    }
    out["rank"] = std::move(mine);
  }
  if (plan.placement) {
    const auto& placed = *plan.placement;
    OrderedJson p{{"method", placed.method},
                  {"seconds", placed.seconds},
                  {"naive_seconds", placed.naive_seconds},
                  {"lower_bound", placed.lower_bound},
                  {"exact", placed.exact}};
    for (std::size_t t = 0; t < placed.cost.size(); ++t)
      p["cost"].push_back(OrderedJson{{"groups", placed.cost[t].axes},
                                      {"collective", to_string(placed.cost[t].collective)},
                                      {"seconds", placed.cost[t].seconds},
                                      {"naive_seconds", placed.naive_cost[t].seconds},
                                      {"algorithm", placed.cost[t].algorithm}});
    p["slot_of_rank"] = placed.slot_of;
    p["launcher_table"] = placed.launcher_table;
    std::vector<std::string> hosts;
    for (int h : placed.host_of) hosts.push_back(placed.topology.hosts[h].name);
    p["host_of_rank"] = std::move(hosts);
    out["placement"] = std::move(p);
  }
  out["warnings"] = plan.warnings;
  out["plan"] = plan.hash;
  return out.dump() + "\n";
}

}  // namespace tessera::app
