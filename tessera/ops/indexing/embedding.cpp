// Embeddings: rows of a table, looked up by index. If the rows are sharded each rank looks up those
// that it has; the result is Partial, or, if the indices are sharded by the same axes, sharded like
// them.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>

#include <limits>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail::embedding_rules {

namespace {

// The rows of the table that this rank has at these indices, zeros for the others.
at::Tensor rows_here(const at::Tensor& table, const at::Tensor& at, const DimShard& part) {
  TORCH_CHECK_INDEX(at.numel() == 0 || at.ge(0).logical_and(at.lt(part.extent)).all().item<bool>(),
                    "embedding: an index is out of range");
  Shape shape = at.sizes().vec();
  shape.push_back(table.size(1));
  if (part.size == 0) return nothing_like(table, shape);
  const at::Tensor rows =
      table.index_select(0, (at - part.begin).clamp(0, part.size - 1).reshape(-1)).view(shape);
  return masked(rows, part.mine(at), 0);
}

// If rows of the table and indices are sharded by the same axes: the indices are gathered, each
// rank looks up the rows that it has, and the rows are sent to the ranks that asked for them.
// nullopt if gathering the table moves less, unless it stays.
std::optional<Plan> exchanged(const OpCall& call, const TensorInfo& weight,
                              const TensorInfo& indices) {
  if (!weight.stays && indices.spec.numel() >= weight.spec.shape()[0]) return std::nullopt;
  const ShardSpec table = without_partial(weight.spec), asked = without_partial(indices.spec);
  const int n = indices.spec.dims();
  std::vector<Placement> all_asked = asked.placements(), of_terms, of_result;
  bool together = false;
  for (std::size_t a = 0; a < table.placements().size(); ++a) {
    const Placement t = table.placements()[a], i = asked.placements()[a];
    if (t.is_shard(1) && i.is_shard()) return std::nullopt;
    together |= t.is_shard(0) && i.is_shard();
    if (t.is_shard(0)) all_asked[a] = Replicate();
    of_terms.push_back(t.is_shard(0) ? Placement(Partial()) : t.is_shard(1) ? Shard(n) : i);
    of_result.push_back(t.is_shard(0) && i.is_shard() ? i : of_terms.back());
  }
  if (!together) return std::nullopt;
  const ShardSpec gathered = asked.with_placements(all_asked);
  Shape shape = indices.spec.shape();
  shape.push_back(weight.spec.shape()[1]);
  const auto result = [&](const ShardSpec& of_indices, std::vector<Placement> placements) {
    std::vector<const DimSharding*> dims;
    for (int d = 0; d < n; ++d) dims.push_back(&of_indices.dim(d));
    dims.push_back(&table.dim(1));
    return make_spec(context_of(table), shape, std::move(placements), dims);
  };
  const ShardSpec summands = result(gathered, of_terms), out = result(asked, of_result);
  Plan plan;
  plan.inputs.resize(call.tensors().size());
  plan.inputs[call.index_of(weight)] = table;
  plan.inputs[call.index_of(indices)] = asked;
  plan.outputs = {{out}};
  plan.local = [asked, gathered, summands, out, part = part_of(table, 0)](const OperatorHandle&,
                                                                          Stack a) {
    const at::Tensor at = redistribute_local(a[1].toTensor(), asked, gathered);
    return Stack{redistribute_local(rows_here(a[0].toTensor(), at, part), summands, out)};
  };
  return plan;
}

// The result of a table whose data are sharded along their sequence: reduce-scattered at once.
ShardSpec along_sequence(const OpCall& call, const TensorInfo& weight, const ShardSpec& terms) {
  const ShardMeta* table = meta_of(call.arguments()[weight.argument].toTensor());
  const SequenceSharding where = table->layout->sequence;
  if (!where || where.dim < 0 || where.dim + 1 >= terms.dims() ||
      !terms.placements()[where.axis].is_partial())
    return terms;
  auto placements = terms.placements();
  placements[where.axis] = Shard(where.dim);
  return terms.with_placements(placements);
}

Plan embedding(const OpCall& call) {
  const TensorInfo &weight = *call.find("weight"), &indices = *call.find("indices");
  if (weight.spec.dims() != 2)
    throw InvalidArgument(concat("aten::embedding: weight has ", weight.spec.dims(),
                                 " dims, and needs 2: rows and columns"));
  if (auto plan = exchanged(call, weight, indices)) return *plan;
  const int n = indices.spec.dims();
  LabelProblem p(call);
  p.inputs = {{kIndex, n}, all_labels(n)};
  p.outputs = {all_labels(n + 1)};
  Shape shape = indices.spec.shape();
  shape.push_back(weight.spec.shape()[1]);
  p.output_shapes = {shape};
  p.contract = {kIndex};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(0)) return plan;
  const ShardSpec terms = plan.outputs[0].spec;
  const ShardSpec out = along_sequence(call, weight, terms);
  plan.outputs[0].spec = out;
  plan.local = [terms, out, part = part_of(*plan.inputs[0], 0)](const OperatorHandle&, Stack a) {
    const at::Tensor rows = rows_here(a[0].toTensor(), a[1].toTensor(), part);
    return Stack{terms == out ? rows : redistribute_local(rows, terms, out)};
  };
  return plan;
}

Plan embedding_backward(const OpCall& call) {
  const TensorInfo& indices = *call.find("indices");
  const TensorInfo& g = *call.find("grad_output");
  const int n = indices.spec.dims();
  LabelProblem p(call);
  label_arguments(p, {{"grad_output", all_labels(n + 1)}, {"indices", all_labels(n)}});
  p.outputs = {{kUnsharded, n}};
  p.output_shapes = {{call.integer("num_weights"), g.spec.shape()[n]}};
  p.contract = first_dims(n);
  // the frequency is that of the global batch
  if (call.argument("scale_grad_by_freq") >= 0 && call.boolean("scale_grad_by_freq"))
    p.contract.clear();
  return solve(p);
}

// Scales the rows that are looked up and longer than `most`, in place. Their columns may be on
// several ranks. The same small number is added as by libtorch's kernel.
void scale_rows(const at::Tensor& table, const at::Tensor& rows, double most, double order,
                const OverRanks& over_columns) {
  const at::Tensor which = std::get<0>(at::_unique(rows.reshape(-1)));
  if (which.numel() == 0) return;
  const at::Tensor values = table.index_select(0, which).to(at::kDouble);
  const bool largest = order == std::numeric_limits<double>::infinity(),
             smallest = order == -std::numeric_limits<double>::infinity(),
             powers = !largest && !smallest && order != 0;
  at::Tensor norms;
  if (values.size(1) == 0) {
    norms = at::full({values.size(0)}, smallest ? -order : 0.0, values.options());
  } else {
    norms = at::linalg_vector_norm(values, order, {1});
    if (powers) norms = norms.pow(order);
  }
  norms = over_columns(norms, largest ? ReduceOp::max : smallest ? ReduceOp::min : ReduceOp::sum);
  if (powers) norms = norms.pow(1 / order);
  const at::Tensor factor = at::where(norms.gt(most), most / (norms + 1e-7), at::ones_like(norms));
  table.index_copy_(0, which, (values * factor.unsqueeze(1)).to(table.scalar_type()));
}

// max_norm: the rows that are looked up are scaled in place.
Plan renorm(const OpCall& call) {
  const TensorInfo &weight = call.tensor(0), &indices = *call.find("indices");
  Plan plan;
  for (const TensorInfo& t : call.tensors()) plan.inputs.emplace_back(replicated(t.spec));
  if (weight.spec.dims() != 2)
    throw InvalidArgument(concat(call.name(), ": the table has ", weight.spec.dims(),
                                 " dims, and needs two: rows and columns"));
  const ShardSpec table = without_partial(weight.spec);
  plan.inputs[0] = table;
  plan.outputs = {{table}};
  plan.inputs[call.index_of(indices)] = replicated(indices.spec);
  if (!table.has_shard()) return plan;
  const OverRanks over_columns{context_of(table), axes_that_shard(table, 1), "embedding_renorm_"};
  plan.local = [part = part_of(table, 0), over_columns](const OperatorHandle& op, Stack a) {
    const at::Tensor at = a[1].toTensor();
    part.check(at, "embedding_renorm_", false);
    const at::Tensor rows = (at.masked_select(part.mine(at)) - part.begin).to(at.scalar_type());
    if (!over_columns.axes.empty()) {
      scale_rows(a[0].toTensor(), rows, a[2].toDouble(), a[3].toDouble(), over_columns);
      return Stack{a[0]};
    }
    a[1] = rows;
    op.callBoxed(a);
    return a;
  };
  return plan;
}

at::Tensor sparse_backward(const at::Tensor&, const at::Tensor&, std::int64_t, std::int64_t, bool) {
  throw ShardingError(
      "embedding with sparse=True: the gradient of this table would be a sparse tensor, and those "
      "cannot be sharded. Make the layer with sparse=False.");
}

const AtStart registered([] {
  register_decomposition("embedding_sparse_backward", sparse_backward);
  register_rule("aten::embedding_renorm_", renorm);
  register_rule("aten::embedding", embedding);
  register_rule("aten::embedding_dense_backward", embedding_backward);
});

}  // namespace

}  // namespace tessera::detail::embedding_rules
