#include "tessera/ops/ghosts/rebalance.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/partition/internal/division.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera {
namespace {

constexpr auto kRebalance = "rebalance";

std::vector<double> numbers_of(const at::Tensor& given) {
  const at::Tensor local = (is_sharded(given) ? to_local(given) : given).detach();
  const at::Tensor host = local.to(at::kCPU, at::kDouble).contiguous();
  const auto* const first = host.const_data_ptr<double>();
  return {first, first + host.numel()};
}

// Places and then costs of this rank's rows.
std::vector<double> measured_here(const OwnedRows& rows, const at::Tensor& places,
                                  const at::Tensor& costs) {
  const auto own = static_cast<std::int64_t>(rows.ids().size());
  const auto local = [](const at::Tensor& t) { return is_sharded(t) ? to_local(t) : t; };
  if (!places.defined() || places.dim() != 2 || local(places).size(0) != own ||
      !places.is_floating_point() || places.size(1) < 1)
    throw InvalidArgument(
        "places of ",
        places.defined() ? concat("shape ", local(places).sizes()) : std::string("nothing"),
        "; give the ", own, " rows of this rank x dims");
  if (!costs.defined() || costs.dim() > 1 || (costs.dim() == 1 && local(costs).size(0) != own))
    throw InvalidArgument(
        "costs of ",
        costs.defined() ? concat("shape ", local(costs).sizes()) : std::string("nothing"),
        "; give one for each of the ", own, " rows of this rank, or one number of all");
  std::vector<double> all = numbers_of(places), cost = numbers_of(costs);
  for (const double x : all)
    if (!std::isfinite(x)) throw InvalidArgument("a place at ", x);
  for (const double c : cost)
    if (!std::isfinite(c) || c < 0) throw InvalidArgument("a row that costs ", c);
  if (costs.dim() == 0)
    cost.assign(static_cast<std::size_t>(own), own == 0 ? 0 : cost[0] / static_cast<double>(own));
  all.insert(all.end(), cost.begin(), cost.end());
  return all;
}

// The axes of the mesh on which the rows are sharded, or the others.
std::vector<int> axes_of_rows(const OwnedRows& rows, bool sharded = true) {
  return detail::axes_where(rows.placements(),
                            [&](const Placement& p) { return p.is_shard() == sharded; });
}

// The parts that have most of each rank's rows take part in who becomes which rank: so many.
constexpr std::size_t kMostShared = 8;

// Parts become ranks: those that own most of them already, the largest share first.
std::vector<int> ranks_of_parts(const Group& group, const std::vector<int>& part) {
  std::map<int, std::int64_t> rows_of;
  for (const int p : part) ++rows_of[p];
  std::vector<std::tuple<std::int64_t, int, int>> shares;  // rows, from the most; part; rank
  for (const auto& [p, rows] : rows_of) shares.emplace_back(-rows, p, group.rank());
  std::ranges::sort(shares);
  const auto said = agree::all<std::vector<std::int64_t>>(group, kRebalance, [&] {
    std::vector<std::int64_t> mine;
    for (std::size_t i = 0; i < std::min(shares.size(), kMostShared); ++i)
      mine.insert(mine.end(), {std::get<0>(shares[i]), std::get<1>(shares[i])});
    return mine;
  });
  shares.clear();
  for (std::size_t r = 0; r < said.size(); ++r)
    for (std::size_t i = 0; i < said[r].size(); i += 2)
      shares.emplace_back(said[r][i], static_cast<int>(said[r][i + 1]), static_cast<int>(r));
  std::ranges::sort(shares);
  std::vector<int> rank_of(said.size(), -1);
  std::vector<bool> taken(said.size(), false);
  const auto give = [&](std::size_t p, std::size_t r) {
    rank_of[p] = static_cast<int>(r);
    taken[r] = true;
  };
  for (const auto& [rows, p, r] : shares)
    if (rank_of[static_cast<std::size_t>(p)] < 0 && !taken[static_cast<std::size_t>(r)])
      give(static_cast<std::size_t>(p), static_cast<std::size_t>(r));
  std::size_t free = 0;
  for (std::size_t p = 0; p < rank_of.size(); ++p) {
    if (rank_of[p] >= 0) continue;
    while (taken[free]) ++free;
    give(p, free);
  }
  return rank_of;
}

detail::SharedSums over_ranks_of(const Group& group) {
  const auto by = [&group](ReduceOp op) {
    return [&group, op](std::span<std::int64_t> numbers) {
      group.all_reduce(
          at::from_blob(numbers.data(), {static_cast<std::int64_t>(numbers.size())}, at::kLong), op,
          {.name = kRebalance});
    };
  };
  return {by(ReduceOp::sum), by(ReduceOp::max)};
}

// Who owns each of this rank's rows from now on, and what that costs.
struct NewOwners {
  std::vector<int> of;
  double before = 1, after = 1;
};

NewOwners new_owners(const OwnedRows& rows, int dims, std::span<const double> measured,
                     const RebalanceOptions& options) {
  const Group group = rows.group();
  const auto over = over_ranks_of(group);
  const auto own = rows.ids().size(), coordinates = own * static_cast<std::size_t>(dims);
  const detail::PointsHere points{measured.first(coordinates), dims, measured.subspan(coordinates),
                                  true, rows.begin()};
  const auto costs = detail::whole_costs(points, over);
  NewOwners made{std::vector<int>(own, group.rank())};
  const auto imbalance_of = [&](const std::vector<int>& owner) {
    std::vector<std::int64_t> of_rank(static_cast<std::size_t>(group.size()), 0);
    for (std::size_t i = 0; i < own; ++i) of_rank[static_cast<std::size_t>(owner[i])] += costs[i];
    over.sum(of_rank);
    const auto all = std::accumulate(of_rank.begin(), of_rank.end(), std::int64_t{0});
    if (all == 0) throw InvalidArgument("no row costs anything; measure costs first");
    return static_cast<double>(std::ranges::max(of_rank)) * group.size() / static_cast<double>(all);
  };
  made.before = made.after = imbalance_of(made.of);
  if (made.before <= options.tolerance) return made;
  auto owner = options.by == RebalanceOptions::By::curve
                   ? detail::along_curve(points, costs, group.size(), over)
                   : detail::bisected(points, costs, group.size(), over);
  const auto rank_of = ranks_of_parts(group, owner);
  for (int& p : owner) p = rank_of[static_cast<std::size_t>(p)];
  if (const double after = imbalance_of(owner); after < made.before) {
    made.after = after;
    made.of = std::move(owner);
  }
  return made;
}

// The numbers of the rows that this rank owns from now on, in ascending order.
std::vector<std::int64_t> arrived(const OwnedRows& rows, const std::vector<int>& owner) {
  const Group group = rows.group();
  detail::IdsByRank leave{std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), 0), {}};
  for (std::size_t i = 0; i < owner.size(); ++i) {
    ++leave.counts[static_cast<std::size_t>(owner[i])];
    leave.values.push_back(rows.begin() + static_cast<std::int64_t>(i));
  }
  std::ranges::stable_sort(leave.values, {}, [&](std::int64_t number) {
    return owner[static_cast<std::size_t>(number - rows.begin())];
  });
  return detail::carried_by(group, leave).values;
}

// What both partitions cost on the edges, of which every rank then has all.
void tell_quality(Rebalanced& made, const Group& group, const std::vector<int>& owner,
                  const at::Tensor& given) {
  const at::Tensor edges = full_tensor(given).to(at::kCPU, at::kLong).contiguous();
  const at::Tensor source = edges.select(0, 0), target = edges.select(0, 1);
  const auto quality = [&](const std::vector<int>& of) {
    std::vector<int> all;
    for (const auto& part : agree::all<std::vector<int>>(group, kRebalance, [&] { return of; }))
      all.insert(all.end(), part.begin(), part.end());
    return quality_of(all, group.size(), detail::span_over(source), detail::span_over(target));
  };
  made.quality_before = quality(std::vector<int>(owner.size(), group.rank()));
  made.quality_after = quality(owner);
}

}  // namespace

at::Tensor Rebalanced::move(const at::Tensor& t) const {
  agree::all(rows.group(), "Rebalanced::move", [&] {
    const bool fits = t.defined() && is_sharded(t) && t.dim() > 0 && t.size(0) == rows.size() &&
                      spec(t).mesh() == rows.mesh() && spec(t).sizes().contains(0) &&
                      spec(t).sizes().at(0) == old_sizes;
    if (!fits)
      throw InvalidArgument("a tensor that is not sharded along dim 0 as the rows were, ",
                            list(old_sizes), ": make it by OwnedRows::shard()");
  });
  const at::NoGradGuard none;
  return t.detach().index_select(0, from).set_requires_grad(t.requires_grad());
}

Rebalanced rebalance(const OwnedRows& rows, const at::Tensor& places, const at::Tensor& costs,
                     const std::vector<at::Tensor>& tensors, const RebalanceOptions& options) {
  const Group group = rows.group();
  std::vector<double> here;
  agree::all_same(rows.mesh().all(), kRebalance, [&] {
    if (!(options.tolerance >= 1))
      throw InvalidArgument("a tolerance of ", options.tolerance, "; give at least 1");
    if (options.edges.defined() && (options.edges.dim() != 2 || options.edges.size(0) != 2))
      throw InvalidArgument("edges of shape ", options.edges.sizes(), "; give 2 x edges");
    here = measured_here(rows, places, costs);
    if (options.by == RebalanceOptions::By::curve)
      detail::require_curve(static_cast<int>(places.size(1)));
    return concat("places of ", places.size(1), " dims, ", tensors.size(), " tensors, ",
                  options.edges.defined() ? "with" : "without", " edges, by ",
                  static_cast<int>(options.by), " to ", options.tolerance);
  });
  // Ranks that hold the same rows have measured other costs: those of the first count.
  if (const auto copies = axes_of_rows(rows, false); !copies.empty())
    here = agree::first<std::vector<double>>(rows.mesh().group(copies), kRebalance,
                                             [&] { return here; });
  const NewOwners owner = new_owners(rows, static_cast<int>(places.size(1)), here, options);
  const auto mine = arrived(rows, owner.of);
  const auto sizes = agree::all<std::int64_t>(
      group, kRebalance, [&] { return static_cast<std::int64_t>(mine.size()); });
  const at::Tensor from =
      from_local(detail::tensor_over(mine).clone(), rows.mesh(), rows.placements(), {{0, sizes}});
  const at::Tensor ids =
      to_local(rows.shard(detail::tensor_over(rows.ids()).clone()).index_select(0, from));
  Rebalanced made{
      OwnedRows(rows.mesh(), axes_of_rows(rows), detail::span_over(ids.contiguous())), {}, from};
  made.old_sizes = rows.sizes();
  made.imbalance_before = owner.before;
  made.imbalance_after = owner.after;
  const auto stay = std::ranges::count(owner.of, group.rank());
  const auto moved = agree::all<std::int64_t>(
      group, kRebalance, [&] { return static_cast<std::int64_t>(owner.of.size()) - stay; });
  made.rows_moved = std::accumulate(moved.begin(), moved.end(), std::int64_t{0});
  for (const at::Tensor& t : tensors) made.moved.push_back(made.move(t));
  if (options.edges.defined()) tell_quality(made, group, owner.of, options.edges);
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
