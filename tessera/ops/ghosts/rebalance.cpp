#include "tessera/ops/ghosts/rebalance.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/partition/curve.h"
#include "tessera/partition/partition.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

constexpr auto kRebalance = "rebalance";

// Of all ranks' rows, by number.
struct MeasuredRows {
  std::vector<double> places, costs;
  std::int64_t dims = 1;
  std::vector<int> owner;
};

std::vector<double> numbers_of(const at::Tensor& given) {
  const at::Tensor local = (is_sharded(given) ? to_local(given) : given).detach();
  const at::Tensor host = local.to(at::kCPU, at::kDouble).contiguous();
  const auto* const first = host.const_data_ptr<double>();
  return {first, first + host.numel()};
}

// Dims, places and costs of this rank's rows.
std::vector<double> measured_here(const OwnedRows& rows, const at::Tensor& places,
                                  const at::Tensor& costs) {
  const auto own = static_cast<std::int64_t>(rows.ids().size());
  const auto local = [](const at::Tensor& t) { return is_sharded(t) ? to_local(t) : t; };
  if (!places.defined() || places.dim() != 2 || local(places).size(0) != own ||
      !places.is_floating_point() || places.size(1) < 1)
    throw InvalidArgument(
        concat("places of ",
               places.defined() ? concat("shape ", local(places).sizes()) : std::string("nothing"),
               "; give the ", own, " rows of this rank x dims"));
  if (!costs.defined() || costs.dim() > 1 || (costs.dim() == 1 && local(costs).size(0) != own))
    throw InvalidArgument(
        concat("costs of ",
               costs.defined() ? concat("shape ", local(costs).sizes()) : std::string("nothing"),
               "; give one for each of the ", own, " rows of this rank, or one number of all"));
  std::vector<double> all{static_cast<double>(places.size(1))}, cost = numbers_of(costs);
  if (costs.dim() == 0)
    cost.assign(static_cast<std::size_t>(own), own == 0 ? 0 : cost[0] / static_cast<double>(own));
  const auto place = numbers_of(places);
  for (const double x : place)
    if (!std::isfinite(x)) throw InvalidArgument(concat("a place at ", x));
  for (const double c : cost)
    if (!std::isfinite(c) || c < 0) throw InvalidArgument(concat("a row that costs ", c));
  all.insert(all.end(), place.begin(), place.end());
  all.insert(all.end(), cost.begin(), cost.end());
  return all;
}

MeasuredRows measured(const OwnedRows& rows, const std::vector<std::vector<double>>& of_ranks) {
  MeasuredRows all;
  all.dims = static_cast<std::int64_t>(of_ranks.front()[0]);
  for (std::size_t r = 0; r < of_ranks.size(); ++r) {
    const auto own = static_cast<std::ptrdiff_t>(rows.sizes()[r]);
    const auto& of = of_ranks[r];
    if (of[0] != of_ranks.front()[0])
      throw InvalidArgument(concat("places of ", all.dims, " dims on rank ",
                                   rows.group().ranks()[0], ", of ", of[0], " on rank ",
                                   rows.group().ranks()[r]));
    all.places.insert(all.places.end(), of.begin() + 1, of.end() - own);
    all.costs.insert(all.costs.end(), of.end() - own, of.end());
    all.owner.insert(all.owner.end(), static_cast<std::size_t>(own), static_cast<int>(r));
  }
  if (std::ranges::all_of(all.costs, [](double c) { return c == 0; }))
    throw InvalidArgument("no row costs anything; measure costs first");
  return all;
}

// Parts become ranks: those that own most of them already, the largest share first.
std::vector<int> with_ranks_kept(std::vector<int> part, const std::vector<int>& owner, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  std::vector<std::int64_t> shared(n * n, 0);
  for (std::size_t i = 0; i < part.size(); ++i)
    ++shared[static_cast<std::size_t>(part[i]) * n + static_cast<std::size_t>(owner[i])];
  std::vector<std::size_t> pairs(n * n);
  std::iota(pairs.begin(), pairs.end(), std::size_t{0});
  std::stable_sort(pairs.begin(), pairs.end(),
                   [&](std::size_t a, std::size_t b) { return shared[a] > shared[b]; });
  std::vector<int> rank_of(n, -1);
  std::vector<bool> taken(n, false);
  for (const std::size_t pair : pairs) {
    if (rank_of[pair / n] >= 0 || taken[pair % n]) continue;
    rank_of[pair / n] = static_cast<int>(pair % n);
    taken[pair % n] = true;
  }
  for (int& p : part) p = rank_of[static_cast<std::size_t>(p)];
  return part;
}

double imbalance_of(const std::vector<int>& owner, const std::vector<double>& costs, int ranks) {
  std::vector<double> of_rank(static_cast<std::size_t>(ranks), 0);
  for (std::size_t i = 0; i < owner.size(); ++i)
    of_rank[static_cast<std::size_t>(owner[i])] += costs[i];
  return *std::ranges::max_element(of_rank) * ranks /
         std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
}

std::vector<int> new_owners(const MeasuredRows& rows, int ranks, const RebalanceOptions& options) {
  const auto dims = static_cast<int>(rows.dims);
  std::vector<int> owner =
      with_ranks_kept(options.by == RebalanceOptions::By::curve
                          ? partition_along_curve(rows.places, dims, ranks, rows.costs)
                          : bisect_points(rows.places, dims, ranks, rows.costs),
                      rows.owner, ranks);
  const double before = imbalance_of(rows.owner, rows.costs, ranks);
  const bool better = imbalance_of(owner, rows.costs, ranks) < before;
  return before > options.tolerance && better ? owner : rows.owner;
}

std::span<const std::int64_t> span_over(const at::Tensor& numbers) {
  return {numbers.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(numbers.numel())};
}

// The axes of the mesh on which the rows are sharded.
std::vector<int> axes_of_rows(const OwnedRows& rows) {
  std::vector<int> axes;
  const auto placements = rows.placements();
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (placements[a].is_shard()) axes.push_back(static_cast<int>(a));
  return axes;
}

}  // namespace

at::Tensor Rebalanced::move(const at::Tensor& t) const {
  agree::all(rows.group(), "Rebalanced::move", [&] {
    const bool fits = t.defined() && is_sharded(t) && t.dim() > 0 && t.size(0) == rows.size() &&
                      spec(t).mesh() == rows.mesh() && spec(t).sizes().contains(0) &&
                      spec(t).sizes().at(0) == old_sizes;
    if (!fits)
      throw InvalidArgument(concat("a tensor that is not sharded along dim 0 as the rows were, ",
                                   list(old_sizes), ": make it by OwnedRows::shard()"));
  });
  const at::NoGradGuard none;
  return t.detach().index_select(0, from).set_requires_grad(t.requires_grad());
}

Rebalanced rebalance(const OwnedRows& rows, const at::Tensor& places, const at::Tensor& costs,
                     const std::vector<at::Tensor>& tensors, const RebalanceOptions& options) {
  const Group group = rows.group(), everyone = rows.mesh().all();
  const int ranks = group.size();
  std::vector<double> here;
  agree::all_same(everyone, kRebalance, [&] {
    if (!(options.tolerance >= 1))
      throw InvalidArgument(concat("a tolerance of ", options.tolerance, "; give at least 1"));
    if (options.edges.defined() && (options.edges.dim() != 2 || options.edges.size(0) != 2))
      throw InvalidArgument(concat("edges of shape ", options.edges.sizes(), "; give 2 x edges"));
    here = measured_here(rows, places, costs);
    return concat(tensors.size(), " tensors, ", options.edges.defined() ? "with" : "without",
                  " edges, by ", static_cast<int>(options.by), " to ", options.tolerance);
  });
  const auto of_ranks = agree::all<std::vector<double>>(group, kRebalance, [&] { return here; });
  MeasuredRows all;
  agree::all(everyone, kRebalance, [&] { all = measured(rows, of_ranks); });
  // Ranks that hold the same rows have measured other costs: those of the first count.
  all.costs = agree::first<std::vector<double>>(everyone, kRebalance, [&] { return all.costs; });
  const auto owner = agree::first<std::vector<int>>(
      everyone, kRebalance, [&] { return new_owners(all, ranks, options); });
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(ranks), 0), mine;
  for (std::size_t i = 0; i < owner.size(); ++i) {
    ++sizes[static_cast<std::size_t>(owner[i])];
    if (owner[i] == group.rank()) mine.push_back(static_cast<std::int64_t>(i));
  }
  const auto tensor_of = [](const std::vector<std::int64_t>& numbers) {
    return at::from_blob(const_cast<std::int64_t*>(numbers.data()),
                         {static_cast<std::int64_t>(numbers.size())}, at::kLong)
        .clone();
  };
  const at::Tensor from = from_local(tensor_of(mine), rows.mesh(), rows.placements(), {{0, sizes}});
  const at::Tensor ids = to_local(rows.shard(tensor_of(rows.ids())).index_select(0, from));
  Rebalanced made{
      OwnedRows(rows.mesh(), axes_of_rows(rows), span_over(ids.contiguous())), {}, from};
  made.old_sizes = rows.sizes();
  made.imbalance_before = imbalance_of(all.owner, all.costs, ranks);
  made.imbalance_after = imbalance_of(owner, all.costs, ranks);
  for (std::size_t i = 0; i < owner.size(); ++i) made.rows_moved += owner[i] != all.owner[i];
  for (const at::Tensor& t : tensors) made.moved.push_back(made.move(t));
  if (options.edges.defined()) {
    const at::Tensor edges = full_tensor(options.edges).to(at::kCPU, at::kLong).contiguous();
    const at::Tensor source = edges.select(0, 0), target = edges.select(0, 1);
    made.quality_before = quality_of(all.owner, ranks, span_over(source), span_over(target));
    made.quality_after = quality_of(owner, ranks, span_over(source), span_over(target));
  }
  return made;
}

std::string Rebalanced::summary() const {
  std::string text =
      concat("imbalance of costs ", fixed(imbalance_before, 2), " -> ", fixed(imbalance_after, 2),
             "; ", rows_moved, " of ", rows.size(), " rows moved\n");
  if (quality_before) text += concat("before: ", quality_before->summary());
  if (quality_after) text += concat("after:  ", quality_after->summary());
  return text;
}

}  // namespace tessera
