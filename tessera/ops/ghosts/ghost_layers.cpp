#include "tessera/ops/ghosts/ghost_layers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"

namespace tessera {
namespace {

using Ids = std::vector<std::int64_t>;
using IdSpan = std::span<const std::int64_t>;
using detail::IdsByRank;

constexpr auto kLayers = "ghost_layers";

// This rank's edges by the row of their target.
struct EdgesInto {
  EdgesInto(std::size_t rows, const Ids& target_rows)
      : first(rows + 1, 0), edges(target_rows.size()) {
    for (const std::int64_t row : target_rows) ++first[static_cast<std::size_t>(row) + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    Ids next = first;
    for (std::size_t e = 0; e < target_rows.size(); ++e)
      edges[static_cast<std::size_t>(next[static_cast<std::size_t>(target_rows[e])]++)] =
          static_cast<std::int64_t>(e);
  }
  IdSpan of(std::int64_t row) const {
    const auto at = static_cast<std::size_t>(row);
    return IdSpan(edges).subspan(static_cast<std::size_t>(first[at]),
                                 static_cast<std::size_t>(first[at + 1] - first[at]));
  }
  Ids first, edges;
};

// Edges by ids of their ends; `number`: over all ranks.
struct EdgeList {
  Ids number, source, target;
};

// To each rank the edges into those of this one's rows that are its ghosts: their number, and then
// two numbers for each.
IdsByRank edges_asked_for(const GhostRows& rows, const EdgesInto& into, IdSpan source,
                          std::int64_t begin) {
  IdsByRank sent{Ids(static_cast<std::size_t>(rows.ranks), 0), {}};
  auto row = rows.sent.begin();
  for (const GhostRows::Peer& peer : rows.sends) {
    const std::size_t before = sent.values.size();
    for (std::int64_t k = 0; k < peer.rows; ++k) {
      const IdSpan edges = into.of(*row++);
      sent.values.push_back(static_cast<std::int64_t>(edges.size()));
      for (const std::int64_t e : edges)
        sent.values.insert(sent.values.end(), {begin + e, source[static_cast<std::size_t>(e)]});
    }
    sent.counts[static_cast<std::size_t>(peer.rank)] =
        static_cast<std::int64_t>(sent.values.size() - before);
  }
  return sent;
}

// What has come of it: edges into the ghosts `asked`.
void take_edges(EdgeList& list, const GhostRows& rows, const Ids& asked, const Ids& values) {
  auto at = values.begin();
  for (const std::int64_t ghost : rows.received) {
    for (std::int64_t count = *at++; count > 0; --count) {
      list.number.push_back(*at++);
      list.source.push_back(*at++);
      list.target.push_back(asked[static_cast<std::size_t>(ghost)]);
    }
  }
}

// The number of this rank's first edge, and the rows of its edges' targets.
std::pair<std::int64_t, Ids> checked_edges(const Group& group, IdSpan owned, IdSpan source,
                                           IdSpan target, int depth) {
  Ids rows;
  const auto said = agree::all<std::array<std::int64_t, 2>>(group, kLayers, [&] {
    if (depth < 1) throw InvalidArgument("ghosts of ", depth, " layers; give at least 1");
    if (source.size() != target.size())
      throw InvalidArgument(source.size(), " sources of edges and ", target.size(), " targets");
    try {
      rows = local_rows(owned, {}, target);
    } catch (const InvalidArgument& e) {
      throw InvalidArgument("the target of an edge: ", e.what(),
                            "; give each edge to the owner of its target");
    }
    return std::array{static_cast<std::int64_t>(source.size()), std::int64_t{depth}};
  });
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < said.size(); ++r) {
    if (said[r][1] != said[0][1])
      throw InvalidArgument(kLayers, ": ", said[0][1], " layers on rank ", group.ranks()[0], ", ",
                            said[r][1], " on rank ", group.ranks()[r]);
    if (static_cast<int>(r) < group.rank()) begin += said[r][0];
  }
  return {begin, std::move(rows)};
}

int left_of_depth(int k, int layers, int depth) {
  return std::min(depth - k % depth, layers - k) - 1;
}

std::int64_t number_to(const Ids& of_layers, int l) {
  if (l < 0 || l >= static_cast<int>(of_layers.size()))
    throw InvalidArgument("layer ", l, " of ghosts; there are 0 to ",
                          static_cast<int>(of_layers.size()) - 1,
                          ": make them deeper, or exchange more often");
  return of_layers[static_cast<std::size_t>(l)];
}

}  // namespace

std::int64_t GhostLayers::rows_to(int l) const { return number_to(rows_of, l); }
std::int64_t GhostLayers::edges_to(int l) const { return number_to(edges_of, l); }

int GhostLayers::left_after(int k, int layers) const { return left_of_depth(k, layers, depth()); }

GhostLayers ghost_layers(const DeviceMesh& mesh, IdSpan owned, IdSpan source, IdSpan target,
                         int depth) {
  return ghost_layers(mesh, detail::all_axes(mesh), owned, source, target, depth);
}

GhostLayers ghost_layers(const DeviceMesh& mesh, const std::vector<int>& axes, IdSpan owned,
                         IdSpan source, IdSpan target, int depth) {
  const Group group = mesh.group(axes);
  const auto [begin, target_rows] = checked_edges(group, owned, source, target, depth);
  const EdgesInto into(owned.size(), target_rows);
  EdgeList list{{}, {source.begin(), source.end()}, {target.begin(), target.end()}};
  GhostLayers made;
  Ids known(owned.begin(), owned.end());
  made.rows_of.push_back(static_cast<std::int64_t>(known.size()));
  Ids frontier = ghosts_of(known, source);
  for (int layer = 1;; ++layer) {
    made.edges_of.push_back(static_cast<std::int64_t>(list.source.size()));
    known.insert(known.end(), frontier.begin(), frontier.end());
    made.rows_of.push_back(static_cast<std::int64_t>(known.size()));
    if (layer == depth) break;
    const GhostPlan ask(mesh, axes, owned, frontier);
    const std::size_t before = list.source.size();
    take_edges(list, ask.rows(), frontier,
               detail::carried_by(group, edges_asked_for(ask.rows(), into, source, begin)).values);
    frontier = ghosts_of(known, IdSpan(list.source).subspan(before));
  }
  made.ghosts.assign(known.begin() + made.rows_of[0], known.end());
  made.nodes = GhostPlan(mesh, axes, owned, made.ghosts);
  Ids numbers(source.size());
  std::iota(numbers.begin(), numbers.end(), begin);
  made.edges = GhostPlan(mesh, axes, numbers, list.number);
  made.source = local_rows(owned, made.ghosts, list.source);
  made.target = local_rows(owned, made.ghosts, list.target);
  return made;
}

namespace {

// What one rank's part of a pass costs, by depth: messages and rows of one exchange, and rows and
// edges that are computed beside its own.
struct DepthLoad {
  std::int64_t messages = 0, rows = 0, rows_twice = 0, edges_twice = 0;
};

std::vector<DepthLoad> loads_of(const GhostLayers& g, int layers) {
  const GhostRows& rows = g.nodes.rows();
  std::vector<DepthLoad> all(static_cast<std::size_t>(g.depth()));
  for (int d = 1; d <= g.depth(); ++d) {
    DepthLoad& load = all[static_cast<std::size_t>(d - 1)];
    load.rows = g.rows_to(d) - g.rows_to(0);
    auto ghost = rows.received.begin();
    for (const GhostRows::Peer& peer : rows.receives) {
      load.messages +=
          std::any_of(ghost, ghost + peer.rows, [&](std::int64_t at) { return at < load.rows; });
      ghost += peer.rows;
    }
    for (int k = 0; k < layers; ++k) {
      const int left = left_of_depth(k, layers, d);
      load.rows_twice += g.rows_to(left) - g.rows_to(0);
      load.edges_twice += g.edges_to(left) - g.edges_to(0);
    }
  }
  return all;
}

}  // namespace

LayerCosts layer_costs(const GhostLayers& ghosts, int layers, const GhostPrices& prices) {
  const Group group = ghosts.nodes.group();
  agree::all_same(group, "layer_costs", [&] {
    if (layers < 1) throw InvalidArgument("a network of ", layers, " layers");
    for (const double price : {prices.message, prices.row, prices.edge})
      if (!(price >= 0) || !std::isfinite(price))
        throw InvalidArgument("a price of ", price, " s; give what is at least 0");
    return concat(layers, " layers by depths to ", ghosts.depth(), " at ", prices.message, ", ",
                  prices.row, ", ", prices.edge, " s");
  });
  const auto loads = agree::all<std::vector<DepthLoad>>(group, "layer_costs",
                                                        [&] { return loads_of(ghosts, layers); });
  LayerCosts costs{layers, group.size(), {}};
  for (int d = 1; d <= ghosts.depth(); ++d) {
    LayerCost cost{d, (layers + d - 1) / d};
    DepthLoad most;
    for (const auto& of_rank : loads) {
      const DepthLoad& load = of_rank[static_cast<std::size_t>(d - 1)];
      cost.rows_moved += cost.exchanges * load.rows;
      cost.rows_twice += load.rows_twice;
      cost.edges_twice += load.edges_twice;
      most.messages = std::max(most.messages, load.messages);
      most.rows = std::max(most.rows, load.rows);
      most.edges_twice = std::max(most.edges_twice, load.edges_twice);
    }
    cost.seconds = cost.exchanges * (prices.message * static_cast<double>(most.messages) +
                                     prices.row * static_cast<double>(most.rows)) +
                   prices.edge * static_cast<double>(most.edges_twice);
    costs.depths.push_back(cost);
  }
  return costs;
}

int LayerCosts::cheapest() const {
  return std::ranges::min_element(depths, {}, &LayerCost::seconds)->depth;
}

std::string LayerCosts::summary() const {
  std::string text = concat("a network of ", layers, " layers on ", ranks, " ranks:\n");
  for (const LayerCost& c : depths)
    text += concat("  depth ", c.depth, ": ", c.exchanges, " exchanges, ", c.rows_moved,
                   " rows moved, ", c.rows_twice, " rows and ", c.edges_twice,
                   " edges computed twice, ", fixed(1e6 * c.seconds, 1), " us\n");
  return concat(text, "  cheapest: an exchange for every ", cheapest(), " layers\n");
}

}  // namespace tessera
