// Writing by index: each rank writes what belongs to its shard. Only indices and what is written
// move.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera::detail::scatter_rules {
namespace {

// Kernels check only slices that are written, which not every rank has.
void require_slices(const OpCall& call, const TensorInfo& x, const TensorInfo& index,
                    const TensorInfo& source, int d) {
  const std::int64_t count = index.spec.numel();
  const bool copies = call.schema().name().starts_with("aten::index_copy");
  if (copies && source.spec.dims() == 0 && x.spec.dims() == 1 && count == 1) return;
  Shape needed = x.spec.shape();
  needed[d] = count;
  if (source.spec.shape() != needed)
    throw InvalidArgument(call.name(), ": source has shape ", list(source.spec.shape()),
                          ", and needs ", list(needed), " for ", count, " indices along dim ", d,
                          " of ", list(x.spec.shape()));
}

// Where the result has no elements no rank looks at the indices.
void require_elements(const OpCall& call, const TensorInfo& x, const TensorInfo& index, int d) {
  if (x.spec.shape()[d] == 0 && index.spec.numel() > 0)
    throw InvalidArgument(call.name(), ": there are indices along dim ", d, ", which has size 0");
}

// index_add, index_copy, index_fill, index_reduce: complete slices along a dim.
Plan slices(const OpCall& call, bool adds) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const TensorInfo* source = call.find("source");
  const int n = x.spec.dims();
  if (n == 0) return on_gathered(call);
  const int d = normal_dim(call.integer("dim"), n);
  if (index.spec.dims() > 1)
    throw InvalidArgument(call.name(), ": index has ", index.spec.dims(), " dims, and needs one");
  if (source) require_slices(call, x, index, *source, d);
  require_elements(call, x, index, d);
  const bool sums = adds && index.spec.dims() == 1;
  const int along = sums ? kIndex : kUnsharded;
  LabelProblem p(call, {}, {all_labels(n)}, {x.spec.shape()});
  label_arguments(p,
                  {{"self", all_labels(n)}, {"index", {along}}, {"source", except(n, d, along)}});
  p.contract = {kIndex};  // what ranks write is added up
  p.additive = {0};
  Plan plan = solve(p);
  plan.local = [d, part = part_of(*plan.inputs[0], d), sharded = plan.inputs[0]->is_sharded(d),
                has_source = source != nullptr, name = call.name(),
                fills = call.find("source") == nullptr && call.argument("source") < 0,
                in_place = call.in_place()](const OperatorHandle& op, Stack a) {
    if (sharded) {
      const at::Tensor given = a[2].toTensor().reshape(-1);
      part.check(given, name.c_str(), fills);
      const at::Tensor at = part.global(given), positions = part.mine(at).nonzero().view(-1);
      a[2] = at.index_select(0, positions) - part.begin;
      if (has_source) {
        const at::Tensor source = a[3].toTensor();
        a[3] = (source.dim() == 0 ? source.reshape({1}) : source).index_select(d, positions);
      }
    }
    const at::Tensor self = a[0].toTensor();
    // some kernels expect a slice
    if (a[2].toTensor().numel() == 0 || self.numel() == 0)
      return Stack{in_place ? self : self.clone()};
    // libtorch's kernel for products of half precision refuses slices of one element.
    const auto type = self.scalar_type();
    if (has_source && at::isReducedFloatingType(type) && self.numel() == self.size(d)) {
      a[0] = self.to(at::kFloat);
      a[3] = a[3].toTensor().to(at::kFloat);
      op.callBoxed(a);
      const at::Tensor result = a[0].toTensor();
      return Stack{in_place ? self.copy_(result) : result.to(type)};
    }
    op.callBoxed(a);
    return a;
  };
  return plan;
}

// Single elements along a dim. Those of other ranks are written to an extra slice behind the local
// one, which is dropped.
Plan scatter(const OpCall& call, bool adds) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const TensorInfo* src = call.find("src");
  const int n = x.spec.dims();
  bool same_dims = n > 0;
  for (const TensorInfo& t : call.tensors())
    same_dims &= t.spec.dims() == n || (&t != &x && &t != &index && &t != src);
  if (!same_dims) return on_gathered(call);
  const int d = normal_dim(call.integer("dim"), n);
  require_elements(call, x, index, d);
  const Labels labels = aligned_labels(call, d);
  const bool sums = adds && src && src->spec.shape()[d] == index.spec.shape()[d];
  Labels of_index = labels;
  of_index[d] = sums ? kIndex : kUnsharded;
  LabelProblem p(call, {}, {labels}, {x.spec.shape()});
  label_arguments(p, {{"self", labels}, {"index", of_index}, {"src", of_index}});
  p.contract = {kIndex};
  p.additive = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), in_place = call.in_place()](
                   const OperatorHandle& op, Stack a) {
    const at::Tensor t = a[0].toTensor(), at = a[2].toTensor();
    require_range(at, part.extent, "scatter");
    Shape slot = t.sizes().vec();
    slot[d] = 1;
    a[0] = at::cat({t, t.new_zeros(slot)}, d);
    a[2] = at::where(part.mine(at), at - part.begin, part.size);
    op.callBoxed(a);
    const at::Tensor result = a[0].toTensor().narrow(d, 0, part.size);
    a[0] = in_place ? t.copy_(result) : result;
    return a;
  };
  return plan;
}

// The first input is written to, however it is sharded; all others are replicated.
Plan written_part(const OpCall& call) {
  const Labels all = all_labels(call.tensor(0).spec.dims());
  LabelProblem p(call, {}, {all}, {call.tensor(0).spec.shape()});
  label_arguments(p, {{"self", all}});
  return solve(p);
}

// Checks what libtorch refuses, before any rank begins.
void require_type(const OpCall& call, const char* name, at::ScalarType type) {
  if (const auto got = call.find(name)->dtype; got != type)
    throw InvalidArgument(call.name(), ": ", name, " is ", c10::toString(got), ", and must be ",
                          c10::toString(type), "; convert it");
}

// The elements of the source are taken in order where the mask is true: the global mask determines
// how many come before a rank's shard.
Plan masked_scatter(const OpCall& call) {
  const TensorInfo* x = call.find("self");
  const auto* out = call.in_place() ? nullptr : call.outputs();
  if (!x || !call.find("mask") || !call.find("source") ||
      (out && (*out)[0].shape != x->spec.shape()))
    return on_gathered(call);
  require_type(call, "mask", at::kBool);
  require_type(call, "source", x->dtype);
  Plan plan = written_part(call);
  const ShardSpec& spec = *plan.inputs[0];
  plan.local = [spec, in_place = call.in_place()](const OperatorHandle&, Stack a) {
    const at::Tensor t = a[0].toTensor(), mask = a[1].toTensor().expand(spec.shape()),
                     source = a[2].toTensor().reshape(-1);
    const at::Tensor before = mask.reshape(-1).cumsum(0) - 1;
    TORCH_CHECK(before.numel() == 0 || before[-1].item<std::int64_t>() < source.numel(),
                "masked_scatter: the mask takes more elements than the ", source.numel(),
                " of the source");
    if (source.numel() == 0 || t.numel() == 0) return Stack{in_place ? t : t.clone()};
    const at::Tensor which = local_slice(before.view(spec.shape()), spec).clamp_min(0);
    const at::Tensor result =
        at::where(local_slice(mask, spec), source.index_select(0, which.reshape(-1)).view_as(t), t);
    return Stack{in_place ? t.copy_(result) : result};
  };
  return plan;
}

// By the index into the flattened tensor.
Plan put(const OpCall& call) {
  if (call.tensors().size() != 3) return on_gathered(call);
  require_type(call, "index", at::kLong);
  require_type(call, "source", call.find("self")->dtype);
  if (const auto n = call.find("index")->spec.numel(), values = call.find("source")->spec.numel();
      n != values)
    throw InvalidArgument(call.name(), ": ", values, " values for ", n,
                          " indices; give one per index");
  Plan plan = written_part(call);
  const ShardSpec& spec = *plan.inputs[0];
  plan.local = [shape = spec.shape(), offset = spec.local_offset(), local = spec.local_shape(),
                extent = spec.numel(), in_place = call.in_place()](const OperatorHandle&, Stack a) {
    const at::Tensor t = in_place ? a[0].toTensor() : a[0].toTensor().clone();
    const DimShard all{0, extent, extent};
    const at::Tensor given = a[1].toTensor().reshape(-1);
    all.check(given, "put", true);
    const auto at = coordinates(all.global(given), shape);
    at::Tensor mine = at::ones_like(given, at::kBool), own = at::zeros_like(given);
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const at::Tensor i = at[d] - offset[d];
      mine = mine.logical_and(i.ge(0)).logical_and(i.lt(local[d]));
      own = own * local[d] + i;
    }
    const at::Tensor positions = mine.nonzero().view(-1);
    if (positions.numel() > 0)
      t.put_(own.index_select(0, positions), a[2].toTensor().reshape(-1).index_select(0, positions),
             a[3].toBool());
    return Stack{t};
  };
  return plan;
}

Plan diagonal_scatter(const OpCall& call) {
  const TensorInfo& x = *call.find("self");
  const int n = x.spec.dims();
  const auto a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  Labels self = all_labels(n), src;
  self[a] = self[b] = kUnsharded;
  for (int d = 0; d < n; ++d)
    if (d != a && d != b) src.push_back(d);
  src.push_back(kUnsharded);
  return solve({call, {self, src}, {self}, {x.spec.shape()}});
}

// The elements of the source that were taken, the first ones, have a gradient; the others have
// none.
at::Tensor masked_scatter_backward(const at::Tensor& grad, const at::Tensor& mask,
                                   c10::SymIntArrayRef sizes) {
  c10::SymInt count = 1;
  for (const c10::SymInt& n : sizes) count = count * n;
  at::Tensor picked = grad.masked_select(mask);
  const c10::SymInt missing = count - picked.sym_numel();
  if (missing > 0) picked = at::cat({picked, picked.new_zeros_symint({missing})}, 0);
  return picked.view_symint(sizes);
}

const AtStart registered([] {
  register_rule("aten::index_add", [](const OpCall& c) { return slices(c, true); });
  register_rules({"aten::index_copy", "aten::index_fill", "aten::index_reduce"},
                 [](const OpCall& c) { return slices(c, false); });
  register_rule("aten::scatter_add", [](const OpCall& c) { return scatter(c, true); });
  register_rules({"aten::scatter", "aten::scatter_reduce"},
                 [](const OpCall& c) { return scatter(c, false); });
  register_rule("aten::masked_scatter", masked_scatter);
  register_rule("aten::put", put);
  register_rule("aten::diagonal_scatter", diagonal_scatter);
  register_decomposition("masked_scatter_backward", masked_scatter_backward);
});

}  // namespace
}  // namespace tessera::detail::scatter_rules
