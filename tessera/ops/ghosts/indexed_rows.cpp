// Operators by index where rows and index are sharded over the same ranks: nodes of a graph, and
// edges. Neither is gathered: each rank gets the rows of others that its indices name, and sends
// what it has added for them to their owners. A rule would have to choose before it sees an index.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/ops/ghosts/detail/row_plan.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail::indexed_rows {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool in_place_of_its_own(const ShardMeta& meta) {
  return !meta.copy && !meta.layout->parameter && !meta.layout->stays &&
         !meta.spec().has_partial() && !in_host_memory(meta);
}

// True if each place of the index along dim 0 names one row for all that lies behind it.
bool names_rows(const ShardMeta& index) {
  const Layout& layout = *index.layout;
  if (layout.dtype != at::kLong && layout.dtype != at::kInt) return false;
  for (int d = 1; d < layout.spec.dims(); ++d)
    if (layout.spec.shape()[d] != 1 && layout.strides[d] != 0) return false;
  return true;
}

// The dim, counted from the front, along which the index names rows of `x` that lie on the same
// ranks; none: the rule knows better.
std::optional<int> fit(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  const ShardMeta *rows = meta_of(x), *places = meta_of(index);
  if (!rows || !places || x.dim() == 0 || index.dim() == 0) return {};
  if (dim < -x.dim() || dim >= x.dim()) return {};
  const int d = static_cast<int>(dim < 0 ? dim + x.dim() : dim);
  // Of a tensor with as many dims as the index, the index is along dim 0 as well.
  if (index.dim() > 1 && d != 0) return {};
  const auto& axes = rows->spec().dim(d).axes;
  const bool own = !axes.empty() && places->spec().dim(0).axes == axes && names_rows(*places) &&
                   in_place_of_its_own(*rows) && in_place_of_its_own(*places) &&
                   context_of(rows->spec()) == context_of(places->spec()) &&
                   rows->local.device() == places->local.device() &&
                   rows->local.layout() == at::kStrided && !rows->local.is_conj() &&
                   !rows->local.is_neg();
  return own ? std::optional(d) : std::nullopt;
}

template <class Run>
at::Tensor on_local(const char* op, const RowPlan& plan, const ShardSpec& spec, const Run& run) {
  const OriginScope scope(plan.origin);
  return on_locals(op, *context_of(spec), run);
}

// The rows of `x` that the indices name: sharded as they are.
at::Tensor selected(const char* op, const at::Tensor& x, int d, const at::Tensor& index,
                    const RowPlan& plan) {
  const ShardMeta& meta = *meta_of(x);
  at::Tensor local = on_local(op, plan, meta.spec(), [&] {
    const at::Tensor own = meta.local.movedim(d, 0),
                     all = plan.all_ghosts > 0 ? rows_and_ghosts(plan.state, own) : own;
    return all.index_select(0, plan.rows).movedim(0, d);
  });
  const ShardSpec spec = with_places(meta.spec(), d, meta_of(index)->spec());
  return wrap_fresh(local.contiguous(), make_layout(spec, x.scalar_type(), x.device()));
}

// What is added to rows, sharded as the index; undefined if bringing it there is the rule's
// affair.
at::Tensor local_source(const at::Tensor& x, int d, const at::Tensor& index,
                        const at::Tensor& source) {
  const ShardMeta *to = meta_of(x), *from = meta_of(source);
  if (!from || context_of(from->spec()) != context_of(to->spec()) || from->copy ||
      source.dim() != x.dim() || in_host_memory(*from) || source.scalar_type() != x.scalar_type())
    return {};
  const ShardSpec wanted = with_places(to->spec(), d, meta_of(index)->spec());
  if (from->spec().shape() != wanted.shape()) return {};
  if (from->spec() == wanted) return from->local;
  for (int a = 0; a < wanted.mesh_dims(); ++a)
    if (from->spec().placements()[a].is_shard()) return {};
  // Replicated, or a partial sum: a gradient of a sum, which is expanded. Each rank takes its own.
  return redistribute_local(from->local, from->spec(), wanted);
}

// `reduce` of index_reduce and scatter_reduce; none: a reduction that ghosts cannot take part in.
std::optional<ReduceOp> reduced_by(std::string_view reduce) {
  if (reduce == "sum" || reduce == "mean") return ReduceOp::sum;
  if (reduce == "amax") return ReduceOp::max;
  if (reduce == "amin") return ReduceOp::min;
  return std::nullopt;
}

at::Tensor along_rows(const at::Tensor& of_rows, const at::Tensor& like) {
  return as_dim(of_rows, 0, like.dim()).expand(like.sizes());
}

at::Tensor reduced_here(const at::Tensor& rows, const RowPlan& plan, const at::Tensor& source,
                        c10::string_view reduce, bool include_self) {
  return rows.scatter_reduce(0, along_rows(plan.rows, source), source, reduce, include_self);
}

// The rows, with the rows of `source` added where the indices say; on the owners of the rows.
at::Tensor added(const RowPlan& plan, const at::Tensor& rows, const at::Tensor& source,
                 const at::Scalar& alpha) {
  if (plan.ordered)
    return summed_in_order(*plan.ordered, plan.state->group(), rows,
                           alpha.equal(1) ? source : source * alpha);
  if (plan.all_ghosts == 0) return rows.index_add(0, plan.rows, source, alpha);
  auto shape = rows.sizes().vec();
  shape[0] += plan.state->rows.ghosts;
  at::Tensor all = at::zeros(shape, rows.options());
  all.narrow(0, 0, plan.owned()).copy_(rows);
  return reduced_to_owners(plan.state, all.index_add_(0, plan.rows, source, alpha), ReduceOp::sum);
}

// By summands, or what they and the rows are reduced to.
at::Tensor reduced_with_ghosts(const RowPlan& plan, const at::Tensor& rows,
                               const at::Tensor& source, const std::string& reduce, ReduceOp op,
                               bool include_self) {
  if (op == ReduceOp::sum && plan.ordered)
    return added(plan, include_self ? rows : at::zeros_like(rows), source, 1);
  auto shape = rows.sizes().vec();
  shape[0] += plan.state->rows.ghosts;
  const at::Scalar nothing =
      op == ReduceOp::sum ? at::Scalar(0) : neutral(rows.scalar_type(), op == ReduceOp::min);
  const at::Tensor all = at::full(shape, nothing, rows.options());
  const at::Tensor here =
      reduced_here(all, plan, source, op == ReduceOp::sum ? "sum" : reduce, true);
  const at::Tensor result = reduced_to_owners(plan.state, here, op);
  if (!include_self) return result;
  return op == ReduceOp::sum   ? rows + result
         : op == ReduceOp::max ? at::maximum(rows, result)
                               : at::minimum(rows, result);
}

at::Tensor reduced(const RowPlan& plan, const at::Tensor& rows, const at::Tensor& source,
                   const std::string& reduce, bool include_self) {
  const auto by = reduced_by(reduce);
  if (plan.all_ghosts == 0 && !(plan.ordered && by == ReduceOp::sum))
    return reduced_here(rows, plan, source, reduce, include_self);
  at::Tensor result = reduced_with_ghosts(plan, rows, source, reduce, *by, include_self);
  const at::Tensor counts = along_rows(plan.counts, rows);
  if (reduce == "mean") result = result / (counts + (include_self ? 1 : 0)).clamp_min(1);
  return include_self ? result : at::where(counts.gt(0), result, rows);
}

// Gives the result its spec, which is the target's, or writes it to the target.
at::Tensor returned(const OpInfo& info, const at::Tensor& target, std::int64_t d, at::Tensor rows) {
  const ShardMeta& meta = *meta_of(target);
  const LocalCallGuard guard;
  if (!info.writes)
    return wrap_fresh(rows.movedim(0, d).contiguous(),
                      make_layout(meta.spec(), target.scalar_type(), target.device()));
  meta.local.copy_(rows.movedim(0, d));
  RankState& state = *context_of(meta.spec())->state;
  if (state.copies.any()) state.copies.wrote(meta.local, nullptr);
  return target;
}

bool give(torch::jit::Stack* stack, const OpInfo& info, at::Tensor result) {
  return answer(stack, info.kinds.size(), std::move(result));
}

// index_add, index_reduce, scatter_add, scatter_reduce, in place too.
struct Target {
  const char* op;
  at::Tensor x, index, source;
  std::int64_t dim;
  RowPlanPtr plan = nullptr;
  at::Tensor local_source = {};

  bool ready(std::string_view reduce, bool writes) {
    if (fits(reduce, writes)) return true;
    const ShardMeta* edges = meta_of(index);
    if (edges && reduced_by(reduce) == ReduceOp::sum && order_of(edges->local))
      throw InvalidArgument(
          op, " by edges that have an order, into ", x.sizes(),
          ", which is not sharded as their nodes are, or of another dtype than ",
          "what is added; open an OwnedRowsScope, or give edges without an order");
    return false;
  }
  bool fits(std::string_view reduce, bool writes) {
    if (!reduces_ghosts_of(x.scalar_type()) || !source.defined()) return false;
    if (!writes) take_rows();
    const auto d = fit(x, dim, index);
    if (!d || index.size(0) != source.size(*d)) return false;
    dim = *d;
    if (reduce != "sum" && (x.is_complex() || (reduce == "mean" && !x.is_floating_point())))
      return false;
    local_source = indexed_rows::local_source(x, *d, index, source);
    if (!local_source.defined()) return false;
    plan = row_plan(op, index, meta_of(x)->spec().dim(*d));
    return plan && (plan->all_ghosts == 0 || reduced_by(reduce));
  }
  // Of a target that every rank has whole, as factories make them: the rows in scope.
  void take_rows() {
    const ShardMeta* meta = meta_of(x);
    if (!meta || !meta->spec().is_replicated() || !in_place_of_its_own(*meta)) return;
    const ShardSpec rows = spec_in_scope(context_of(meta->spec()), x.sizes());
    if (!rows) return;
    const LocalCallGuard guard;
    x = wrap_fresh(redistribute_local(meta->local, meta->spec(), rows).contiguous(),
                   make_layout(rows, x.scalar_type(), x.device()));
  }
  template <class Run>
  bool run(const OpInfo& info, torch::jit::Stack* stack, const Run& run) {
    const ShardMeta& meta = *meta_of(x);
    at::Tensor rows = on_local(op, *plan, meta.spec(), [&] {
      return run(meta.local.movedim(dim, 0), local_source.movedim(dim, 0));
    });
    return give(stack, info, returned(info, x, dim, std::move(rows)));
  }
};

// The arguments of a call, in their order.
struct Given {
  const OpInfo& info;
  torch::jit::Stack& stack;
  const c10::IValue& operator[](std::size_t i) const {
    return stack[stack.size() - info.kinds.size() + i];
  }
  at::Tensor tensor(std::size_t i) const { return (*this)[i].toTensor(); }
};

// Of index_add(x, dim, index, source, ...) and its kin.
Target target_of(const char* op, const Given& a) {
  return {op, a.tensor(0), a.tensor(2), a.tensor(3), a[1].toInt()};
}

// Into a target that every rank has whole and that is smaller than what is added to it, as the
// energies of graphs by those of nodes: ranks add up their own, in zeros, and these are reduced.
template <class Sum>
bool added_to_whole(const OpInfo& info, torch::jit::Stack* stack, const Sum& sum) {
  const Given a{info, *stack};
  at::Tensor x = a.tensor(0);
  const at::Tensor source = a.tensor(3);
  const ShardMeta *to = meta_of(x), *from = meta_of(source);
  if (!info.writes || !to || !to->spec().is_replicated() || !in_place_of_its_own(*to) || !from ||
      from->spec().is_replicated() || x.numel() >= source.numel())
    return false;
  x.add_(sum(at::zeros_like(x)));
  return give(stack, info, x);
}

bool same_but_rows(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() > 0 && a.dim() == b.dim() && a.sizes().slice(1) == b.sizes().slice(1);
}

// The index of index_add has one dim, that of scatter_add the shape of what is scattered.
bool may_name_rows(const Given& a, bool scatters) {
  const at::Tensor index = a.tensor(2);
  if (!scatters) return index.dim() == 1;
  return a[3].isTensor() && index.sizes() == a.tensor(3).sizes() &&
         same_but_rows(index, a.tensor(0));
}

// index_add, or scatter_add.
template <bool scatters>
bool add_at_rows(const OpInfo& info, torch::jit::Stack* stack) {
  const Given a{info, *stack};
  if (!may_name_rows(a, scatters)) return false;
  const at::Scalar alpha = scatters ? at::Scalar(1) : a[4].toScalar();
  Target t = target_of(scatters ? "aten::scatter_add" : "aten::index_add", a);
  if (!t.ready("sum", info.writes))
    return added_to_whole(info, stack, [&](const at::Tensor& zeros) {
      const std::int64_t dim = a[1].toInt();
      return scatters ? zeros.scatter_add(dim, t.index, t.source)
                      : zeros.index_add(dim, t.index, t.source, alpha);
    });
  return t.run(info, stack, [&](const at::Tensor& rows, const at::Tensor& source) {
    return added(*t.plan, rows, source, alpha);
  });
}

// index_reduce, or scatter_reduce.
template <bool scatters>
bool reduce_at_rows(const OpInfo& info, torch::jit::Stack* stack) {
  const Given a{info, *stack};
  if (!may_name_rows(a, scatters)) return false;
  const std::string reduce(a[4].toStringRef());
  const bool include_self = a[5].toBool();
  Target t = target_of(scatters ? "aten::scatter_reduce" : "aten::index_reduce", a);
  if (!t.ready(reduce, info.writes)) return false;
  return t.run(info, stack, [&](const at::Tensor& rows, const at::Tensor& source) {
    return reduced(*t.plan, rows, source, reduce, include_self);
  });
}

// One number into the rows that an index names: what a reduction without them has as gradient.
bool fill_rows(const char* op, const OpInfo& info, torch::jit::Stack* stack) {
  const Given a{info, *stack};
  const at::Tensor x = a.tensor(0), index = a.tensor(2);
  const auto d = fit(x, a[1].toInt(), index);
  if (!d || a[3].toScalar().isComplex()) return false;
  const RowPlanPtr plan = row_plan(op, index, meta_of(x)->spec().dim(*d));
  if (!plan) return false;
  at::Tensor rows = on_local(op, *plan, meta_of(x)->spec(), [&] {
    const at::Tensor here = meta_of(x)->local.movedim(*d, 0);
    return here.masked_fill(along_rows(plan->counts.gt(0), here), a[3].toScalar());
  });
  return give(stack, info, returned(info, x, *d, std::move(rows)));
}

bool scatter_value(const OpInfo& info, torch::jit::Stack* stack) {
  const Given a{info, *stack};
  return same_but_rows(a.tensor(2), a.tensor(0)) && fill_rows("aten::scatter", info, stack);
}

bool index_fill(const OpInfo& info, torch::jit::Stack* stack) {
  return Given{info, *stack}.tensor(2).dim() == 1 && fill_rows("aten::index_fill", info, stack);
}

bool gather(const OpInfo& info, torch::jit::Stack* stack) {
  const Given a{info, *stack};
  const at::Tensor x = a.tensor(0), index = a.tensor(2);
  if (!same_but_rows(index, x) || !fit(x, a[1].toInt(), index)) return false;
  const RowPlanPtr plan = row_plan("aten::gather", index, meta_of(x)->spec().dim(0));
  if (!plan) return false;
  return give(stack, info, selected("aten::gather", x, 0, index, *plan));
}

// Backward of index_select knows how the rows were sharded: libtorch's formula knows the shape.
struct SelectRows : torch::autograd::Function<SelectRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, std::int64_t d,
                            const at::Tensor& index, const RowPlanPtr& plan) {
    ctx->set_materialize_grads(false);
    carry(ctx, meta_of(x)->spec());
    ctx->saved_data["dim"] = d;
    ctx->save_for_backward({index});
    return selected("aten::index_select", x, static_cast<int>(d), index, *plan);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    variable_list gradients(4);
    if (!g[0].defined()) return gradients;
    const ShardSpec spec = carried(ctx);
    gradients[0] = zeros(spec, g[0].options())
                       .index_add(ctx->saved_data["dim"].toInt(), ctx->get_saved_variables()[0],
                                  sharded_gradient(g[0], spec));
    return gradients;
  }
};

bool select(torch::jit::Stack* stack, std::size_t arguments, const at::Tensor& x, std::int64_t dim,
            const at::Tensor& index) {
  const auto d = fit(x, dim, index);
  if (!d || index.dim() != 1) return false;
  const RowPlanPtr plan = row_plan("aten::index_select", index, meta_of(x)->spec().dim(*d));
  if (!plan) return false;
  return answer(stack, arguments, SelectRows::apply(x, std::int64_t{*d}, index, plan));
}

bool index_select(torch::jit::Stack* stack) {
  const auto a = torch::jit::last(*stack, 3);
  return select(stack, 3, a[0].toTensor(), a[1].toInt(), a[2].toTensor());
}

// x[index], x[:, index]: one index tensor.
bool index(torch::jit::Stack* stack) {
  const auto a = torch::jit::last(*stack, 2);
  if (!a[0].isTensor() || !a[1].isList()) return false;
  const auto list = a[1].toListRef();
  std::optional<std::size_t> at;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].isTensor() || !list[i].toTensor().defined()) continue;
    if (at) return false;
    at = i;
  }
  if (!at) return false;
  const at::Tensor x = a[0].toTensor(), by = list[*at].toTensor();
  return select(stack, 2, x, static_cast<std::int64_t>(*at), by);
}

// new_zeros and its kin, of as many rows as the scope's: sharded as those.
bool new_rows(const OpInfo& info, torch::jit::Stack* stack) {
  const Given a{info, *stack};
  const ShardMeta* meta = meta_of(a.tensor(0));
  if (!rows_in_scope() || !meta || in_host_memory(*meta)) return false;
  const auto size = a[1].toIntVector();
  const ShardSpec& in = meta->spec();
  const ShardSpec spec = spec_in_scope(context_of(in), size);
  if (!spec || in.dims() == 0 || in.is_replicated()) return false;
  // Of rows of its own.
  if (in.shape()[0] == size[0] && in.dims() == static_cast<int>(size.size())) return false;
  const LocalCallGuard guard;
  torch::jit::Stack local = torch::jit::last(*stack, info.kinds.size()).vec();
  local[0] = meta->local;
  local[1] = spec.local_shape();
  info.op.callBoxed(&local);
  const at::Tensor made = local.back().toTensor();
  return give(stack, info, wrap_fresh(made, make_layout(spec, made.scalar_type(), made.device())));
}

const AtStart registered([] {
  register_above_and_below<index_select>("aten::index_select");
  register_above_and_below<index>("aten::index.Tensor");
  for (const char* form : {"", "_"}) {
    register_before_rule(concat("aten::index_add", form), add_at_rows<false>);
    register_before_rule(concat("aten::index_reduce", form), reduce_at_rows<false>);
    register_before_rule(concat("aten::scatter_add", form), add_at_rows<true>);
    register_before_rule(concat("aten::scatter_reduce", form, ".two"), reduce_at_rows<true>);
    register_before_rule(concat("aten::scatter", form, ".value"), scatter_value);
    register_before_rule(concat("aten::index_fill", form, ".int_Scalar"), index_fill);
  }
  register_before_rule("aten::gather", gather);
  for (const char* name :
       {"aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full"})
    register_before_rule(name, new_rows);
});

}  // namespace

bool names_rows_of(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  return fit(x, dim, index).has_value();
}

ShardSpec with_places(const ShardSpec& x, int d, const ShardSpec& index) {
  auto shape = x.shape();
  shape[d] = index.shape()[0];
  std::vector<DimSharding> dims;
  for (int i = 0; i < x.dims(); ++i) dims.push_back(i == d ? index.dim(0) : x.dim(i));
  return make_spec(context_of(x), std::move(shape), x.placements(), std::move(dims));
}

}  // namespace tessera::detail::indexed_rows
