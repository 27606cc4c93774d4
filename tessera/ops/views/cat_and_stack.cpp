// Joins: along any dim the inputs may be sharded. If the joined dim is, each rank receives what its
// shard of the result consists of, and nothing else moves.

#include <ATen/ops/cat.h>

#include "tessera/ops/halo/halo.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"

namespace tessera::detail::cat_and_stack_rules {
namespace {

// What a rank takes of one input: if that is sharded along the joined dim, by an exchange.
struct Piece {
  Halo halo;
  Interval slice;  // of the joined dim
};

// The largest input that is sharded along the joined dim; the others are redistributed like it.
const TensorInfo* largest_sharded(const OpCall& call, int n, int d) {
  const TensorInfo* found = nullptr;
  for (const TensorInfo& t : call.tensors()) {
    if (t.spec.dims() != n) return nullptr;
    if (is_distributed(t.spec, d) && (!found || t.spec.numel() > found->spec.numel())) found = &t;
  }
  return found;
}

// A rank's shard of the result is as large as its shards of the inputs together. What is not
// sharded along the dim goes to the first rank in front of those that are, and else to the last:
// a class token in front of a sharded sequence moves nothing.
Partition joined(const std::vector<ShardSpec>& inputs, int d, int parts) {
  Shape sizes(parts, 0);
  bool behind = false;
  for (const ShardSpec& t : inputs) {
    if (!t.is_sharded(d)) {
      sizes[behind ? parts - 1 : 0] += t.shape()[d];
      continue;
    }
    behind = true;
    for (int r = 0; r < parts; ++r) sizes[r] += t.dim(d).partition.size(r);
  }
  return Partition(sizes);
}

at::Tensor put_together(const std::vector<Piece>& pieces, const std::vector<at::Tensor>& given,
                        int d) {
  std::vector<HaloValues> values(given.size());
  for (std::size_t i = 0; i < given.size(); ++i)
    if (pieces[i].halo) values[i] = pieces[i].halo.start_exchange(given[i]);
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Piece& p = pieces[i];
    if (!p.halo) {
      parts.push_back(given[i].narrow(d, p.slice.begin, p.slice.size()));
      continue;
    }
    at::Tensor part = values[i].assemble(p.halo.needed());
    Shape shape = given[i].sizes().vec();
    shape[d] = p.slice.size();
    parts.push_back(volume(p.halo.needed()) == 0 ? given[i].new_empty(shape) : part);
  }
  return at::cat(parts, d);
}

std::optional<Plan> across_ranks(const OpCall& call, int n, int d) {
  const TensorInfo* like = largest_sharded(call, n, d);
  if (!like) return std::nullopt;
  const ShardSpec base = without_partial(like->spec);
  const DimSharding& along = base.dim(d);
  Plan plan;
  std::vector<ShardSpec> inputs;
  Shape shape = base.shape();
  shape[d] = 0;
  for (const TensorInfo& t : call.tensors()) {
    std::vector<int> from = all_labels(n);
    std::vector<std::pair<int, Partition>> parts;
    if (t.spec.is_sharded(d) && t.spec.dim(d).axes == along.axes)
      parts = {{d, t.spec.dim(d).partition}};
    else
      from[d] = -1;
    inputs.push_back(mapped_spec(base, t.spec.shape(), from, false, parts));
    plan.inputs.emplace_back(inputs.back());
    shape[d] += t.spec.shape()[d];
  }
  const ShardSpec out = mapped_spec(base, shape, all_labels(n), false,
                                    {{d, joined(inputs, d, along.partition.parts())}});
  plan.outputs = {{out}};
  std::vector<Piece> pieces;
  std::int64_t begin = 0;
  for (const ShardSpec& t : inputs) {
    const Interval whole{0, t.shape()[d]};
    const auto wanted = [=](const Interval& of_out) {
      const Interval common = intersect(of_out.shifted(-begin), whole);
      return common.empty() ? Interval() : common;
    };
    Piece piece;
    if (t.is_sharded(d)) {
      piece.halo = Halo(t, std::vector<Edge>(n, Edge::zero),
                        [wanted, d, from = t.sharding(), to = out.sharding()](int position) {
                          Box box = from.box(position);
                          box[d] = wanted(to.box(position)[d]);
                          return volume(box) == 0 ? Box(box.size()) : box;
                        });
    }
    const auto first = out.local_offset()[d];
    piece.slice = wanted({first, first + out.local_shape()[d]});
    pieces.push_back(std::move(piece));
    begin += whole.end;
  }
  plan.local = [pieces, d](const OperatorHandle&, Stack a) {
    return Stack{put_together(pieces, a[0].toTensorVector(), d)};
  };
  return plan;
}

Plan cat(const OpCall& call) {
  // Empty tensors of one dim are allowed among others and say nothing.
  std::size_t first = 0;
  while (first + 1 < call.tensors().size() && call.tensor(first).spec.dims() == 1 &&
         call.tensor(first).spec.numel() == 0)
    ++first;
  const int n = call.tensor(first).spec.dims();
  for (const TensorInfo& t : call.tensors())
    if (t.spec.dims() == 0)
      throw InvalidArgument("aten::cat: a tensor without dims cannot be concatenated; use stack");
  const int d = normal_dim(call.integer("dim"), n);
  if (auto plan = across_ranks(call, n, d)) return *plan;
  Labels labels = all_labels(n);
  labels[d] = kUnsharded;
  LabelProblem p(call, {}, {labels});
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(t.spec.dims() == n ? labels : unsharded_labels(t));
  p.linear_together = all_summands_keep_type(call);
  return solve(p);
}

Plan stack(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const int d = normal_dim(call.integer("dim"), n + 1);
  Labels out = all_labels(n);
  out.insert(out.begin() + d, kUnsharded);
  LabelProblem p(call, std::vector(call.tensors().size(), all_labels(n)), {out});
  p.linear_together = all_summands_keep_type(call);
  return solve(p);
}

const AtStart registered([] {
  register_rule("aten::cat", cat);
  register_rule("aten::stack", stack);
  register_rules({"aten::block_diag", "aten::_chunk_cat"}, on_gathered);
});

}  // namespace
}  // namespace tessera::detail::cat_and_stack_rules
