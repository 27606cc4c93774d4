#include "tessera/ops/ghosts/owned_rows.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/ops/ghosts/detail/ordered_sums.h"
#include "tessera/ops/ghosts/ghost_plan.h"
#include "tessera/partition/partition.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

using Ids = std::vector<std::int64_t>;

constexpr auto kEdges = "OwnedRows::edges";

// Edges of this rank whose target another one owns, as a message; empty: there are none.
std::string strayed(const Group& group, const Sizes& sizes, std::span<const std::int64_t> source,
                    std::span<const std::int64_t> target, const Ids& row) {
  const Partition rows(sizes);
  std::string text;
  int count = 0;
  for (std::size_t e = 0; e < target.size(); ++e) {
    const int owner = rows.owner(row[source.size() + e]);
    if (owner == group.rank() || ++count > 8) continue;
    text += concat(count > 1 ? ", " : "", source[e], " -> ", target[e], " (edge ", e, "; rank ",
                   group.ranks()[static_cast<std::size_t>(owner)], " owns ", target[e], ")");
  }
  return count > 8 ? concat(text, ", ... (", count, " in all)") : text;
}

}  // namespace

OwnedRows::OwnedRows(const DeviceMesh& mesh, std::span<const std::int64_t> owned)
    : OwnedRows(mesh, detail::all_axes(mesh), owned) {}

OwnedRows::OwnedRows(const DeviceMesh& mesh, std::vector<int> axes,
                     std::span<const std::int64_t> owned)
    : mesh_(mesh), axes_(std::move(axes)), ids_(owned.begin(), owned.end()) {
  std::ranges::sort(axes_);
  const GhostPlan alone(mesh_, axes_, ids_, Ids{});  // each id has one owner
  const Group ranks = group();
  sizes_ = agree::all<std::int64_t>(ranks, "OwnedRows",
                                    [&] { return static_cast<std::int64_t>(ids_.size()); });
  begin_ = std::accumulate(sizes_.begin(), sizes_.begin() + ranks.rank(), std::int64_t{0});
  size_ = std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{0});
}

std::vector<Placement> OwnedRows::placements(int dim) const {
  std::vector<Placement> all(static_cast<std::size_t>(mesh_.mesh().dims()), Replicate());
  for (const int axis : axes_) all[static_cast<std::size_t>(axis)] = Shard(dim);
  return all;
}

at::Tensor OwnedRows::shard(const at::Tensor& rows) const {
  agree::all(group(), "OwnedRows::shard", [&] {
    if (!rows.defined() || rows.dim() == 0 ||
        rows.size(0) != static_cast<std::int64_t>(ids_.size()))
      throw InvalidArgument(
          "OwnedRows::shard of a tensor with ",
          rows.defined() && rows.dim() > 0 ? concat(rows.size(0), " rows") : "no rows",
          "; this rank owns ", ids_.size());
  });
  return from_local(rows, mesh_, placements(), {{0, sizes_}});
}

std::vector<std::int64_t> OwnedRows::numbers(std::span<const std::int64_t> ids) const {
  const Ids ghosts = ghosts_of(ids_, ids);
  const GhostPlan plan(mesh_, axes_, ids_, ghosts);
  const at::Tensor own = at::arange(begin_, begin_ + static_cast<std::int64_t>(ids_.size()),
                                    at::TensorOptions(at::kLong));
  const at::Tensor all = ghost_exchange(plan, own);
  const auto* const number = all.const_data_ptr<std::int64_t>();
  Ids rows = local_rows(ids_, ghosts, ids);
  for (std::int64_t& row : rows) row = number[row];
  return rows;
}

void OwnedRows::check_order(std::span<const std::int64_t> order) const {
  try {
    const GhostPlan each_has_one_edge(mesh_, axes_, order, Ids{});
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(kEdges,
                          ": the order of edges has their numbers in place of ids, at least ",
                          "0 and each for one edge: ", e.what());
  }
}

at::Tensor OwnedRows::edges(std::span<const std::int64_t> source,
                            std::span<const std::int64_t> target, bool anywhere,
                            const std::optional<std::span<const std::int64_t>>& order) const {
  const Group ranks = group();
  agree::all_same(ranks, kEdges, [&] {
    if (source.size() != target.size() || (order && order->size() != target.size()))
      throw InvalidArgument(source.size(), " sources of edges and ", target.size(), " targets",
                            order ? concat(", in an order of ", order->size()) : "");
    return std::string(order ? "with an order" : "without an order");
  });
  if (order) check_order(*order);
  Ids ends(source.begin(), source.end());
  ends.insert(ends.end(), target.begin(), target.end());
  Ids rows = numbers(ends);
  const auto counts = agree::all<std::int64_t>(ranks, kEdges, [&] {
    if (const auto text = anywhere ? std::string() : strayed(ranks, sizes_, source, target, rows);
        !text.empty())
      throw InvalidArgument("edges whose target another rank owns: ", text,
                            "; give each to the owner of its target, or say `anywhere`");
    return static_cast<std::int64_t>(source.size());
  });
  return from_local(
      detail::with_order(
          std::move(rows), 2,
          order ? std::make_shared<const Ids>(order->begin(), order->end()) : nullptr),
      mesh_, placements(1), {{1, counts}});
}

OwnedRowsScope::OwnedRowsScope(const OwnedRows& rows) : outer_(detail::rows_in_scope()) {
  detail::rows_in_scope() =
      ShardSpec(rows.mesh(), {rows.size()}, rows.placements(), {{0, rows.sizes()}});
}
OwnedRowsScope::~OwnedRowsScope() { detail::rows_in_scope() = outer_; }

ShardSpec OwnedRowsScope::current() { return detail::rows_in_scope(); }

std::string OwnedRows::summary() const {
  std::string text = concat(size_, " rows on ", sizes_.size(), " ranks: ");
  for (std::size_t r = 0; r < std::min<std::size_t>(sizes_.size(), 8); ++r)
    text += concat(r > 0 ? ", " : "", sizes_[r]);
  if (sizes_.size() > 8) text += ", ...";
  return concat(text, "; this rank's are ", begin_, " to ",
                begin_ + static_cast<std::int64_t>(ids_.size()) - 1, "\n");
}

}  // namespace tessera
