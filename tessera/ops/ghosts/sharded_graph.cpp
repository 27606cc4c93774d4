#include "tessera/ops/ghosts/sharded_graph.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

using detail::span_over;

void check_numbers(const at::Tensor& t, std::int64_t end, const char* what) {
  const auto all = span_over(t);
  for (std::size_t i = 0; i < all.size(); ++i)
    if (all[i] < 0 || all[i] >= end)
      throw InvalidArgument(what, " ", all[i], " (place ", i, "); there are ", end);
}

// Whole numbers on the host. Throws InvalidArgument for others, and for another number of dims.
at::Tensor whole_numbers(const at::Tensor& t, std::int64_t dims, const char* what) {
  if (!t.defined() || is_sharded(t) || t.dim() != dims ||
      !at::isIntegralType(t.scalar_type(), false))
    throw InvalidArgument(what, " is a plain tensor of whole numbers of ", dims, " dims");
  return t.to(at::kCPU, at::kLong).contiguous();
}

at::Tensor rows_of(const at::Tensor& whole, const at::Tensor& own, std::int64_t rows,
                   const Group& group) {
  agree::all(group, "ShardedGraph", [&] {
    if (!whole.defined() || whole.dim() == 0 || whole.size(0) != rows)
      throw InvalidArgument("a tensor without a row for each of ", rows, " nodes or edges");
  });
  return whole.index_select(0, own.to(whole.device()));
}

}  // namespace

at::Tensor ShardedGraph::of_nodes(const at::Tensor& whole) const {
  return nodes.shard(
      rows_of(whole, at::tensor(nodes.ids(), at::kLong), nodes.size(), nodes.group()));
}

at::Tensor ShardedGraph::of_edges(const at::Tensor& whole) const {
  return from_local(rows_of(whole, own_edges, edges.size(1), nodes.group()), nodes.mesh(),
                    nodes.placements(), {{0, edge_sizes}});
}

ShardedGraph shard_graph(const DeviceMesh& mesh, std::vector<int> axes, const at::Tensor& owner,
                         const at::Tensor& index, bool ordered) {
  std::ranges::sort(axes);
  const Group group = mesh.group(axes);
  at::Tensor owners, ends;
  agree::all_same(group, "shard_graph", [&] {
    owners = whole_numbers(owner, 1, "the owners of nodes");
    ends = whole_numbers(index, 2, "the list of edges");
    if (ends.size(0) != 2)
      throw InvalidArgument("a list of edges of shape ", ends.sizes(), "; give 2 x edges");
    check_numbers(owners, group.size(), "rank");
    check_numbers(ends, owners.size(0), "node");
    Hash hash;
    for (const at::Tensor& t : {owners, ends})
      hash.number(static_cast<std::uint64_t>(t.numel())).bytes(t.const_data_ptr(), t.nbytes());
    return concat(ordered ? "in order" : "in any order", ", a graph of hash ", hash.value());
  });
  const at::Tensor of_target = owners.index_select(0, ends[1]);
  const at::Tensor own = owners.eq(group.rank()).nonzero().flatten(),
                   own_edges = of_target.eq(group.rank()).nonzero().flatten();
  const at::Tensor source = ends[0].index_select(0, own_edges),
                   target = ends[1].index_select(0, own_edges);
  const at::Tensor counts = of_target.bincount({}, group.size());
  const OwnedRows nodes(mesh, axes, span_over(own));
  const auto order = ordered ? std::optional(span_over(own_edges)) : std::nullopt;
  const auto sizes = span_over(counts);
  return {nodes,
          nodes.edges(span_over(source), span_over(target), false, order),
          {sizes.begin(), sizes.end()},
          own_edges};
}

}  // namespace tessera
