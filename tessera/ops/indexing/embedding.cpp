// Embeddings: rows of a table, looked up by index. If the rows are sharded each rank looks up those
// that it has; the result is Partial, or, if the indices are sharded by the same axes, sharded like
// them.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <limits>
#include <tuple>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/indexing/detail/table_rows.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::embedding_rules {
namespace {

// The rows of the table that this rank has at these indices, zeros for the others.
at::Tensor rows_here(const at::Tensor& table, const at::Tensor& at, const DimShard& part) {
  require_range(at, part.extent, "embedding");
  Shape shape = at.sizes().vec();
  shape.push_back(table.size(1));
  return slices_here(table, 0, at, part, shape);
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
  const ShardSpec gathered = asked.with_placements(all_asked),
                  summands = lookup_spec(gathered, table, of_terms),
                  out = lookup_spec(asked, table, of_result);
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
  return terms.with_placement(where.axis, Shard(where.dim));
}

Plan embedding(const OpCall& call) {
  const TensorInfo &weight = *call.find("weight"), &indices = *call.find("indices");
  if (weight.spec.dims() != 2)
    throw InvalidArgument("aten::embedding: weight has ", weight.spec.dims(),
                          " dims, and needs 2: rows and columns");
  if (auto plan = exchanged(call, weight, indices)) return *plan;
  const int n = indices.spec.dims();
  Shape shape = indices.spec.shape();
  shape.push_back(weight.spec.shape()[1]);
  LabelProblem p(call, {{kIndex, n}, all_labels(n)}, {all_labels(n + 1)}, {shape});
  p.contract = {kIndex};
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
  const Shape table{call.integer("num_weights"), g.spec.shape()[n]};
  LabelProblem p(call, {}, {{kUnsharded, n}}, {table});
  label_arguments(p, {{"grad_output", all_labels(n + 1)}, {"indices", all_labels(n)}});
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
  const TensorInfo& weight = call.tensor(0);
  Plan plan;
  for (const TensorInfo& t : call.tensors()) plan.inputs.emplace_back(replicated(t.spec));
  if (weight.spec.dims() != 2)
    throw InvalidArgument(call.name(), ": the table has ", weight.spec.dims(),
                          " dims, and needs two: rows and columns");
  const ShardSpec table = without_partial(weight.spec);
  plan.inputs[0] = table;
  plan.outputs = {{table}};
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

// ----
// Bags of embeddings, written as an embedding whose rows are added up by bag.

using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

enum Mode : std::int64_t { kSum, kMean, kMax };

std::optional<std::int64_t> wrapped(std::optional<std::int64_t> padding, std::int64_t rows) {
  if (!padding) return padding;
  TORCH_CHECK(*padding >= -rows && *padding < rows, "embedding_bag: padding_idx ", *padding, " of ",
              rows, " rows: it must be from ", -rows, " to ", rows - 1);
  return *padding < 0 ? *padding + rows : *padding;
}

// Number of indices that are in bags: those behind an offset that ends the last bag are in none.
std::int64_t used(const at::Tensor& offsets, std::int64_t count, bool include_last) {
  const Sizes at = host_numbers(offsets);
  if (at.empty()) return 0;
  TORCH_CHECK(at[0] == 0, "embedding_bag: offsets[0] is ", at[0],
              ", but the first bag must start at index 0");
  TORCH_CHECK(std::ranges::is_sorted(at), "embedding_bag: offsets must not decrease");
  TORCH_CHECK(at.back() <= count, "embedding_bag: offsets[-1] is ", at.back(), ", but there are ",
              count, " indices");
  return include_last ? at.back() : count;
}

// The largest element of each bag; of several that are equal the first gets the gradient, as with
// libtorch's kernel.
at::Tensor greatest(at::Tensor rows, const at::Tensor& bag, const at::Tensor& size,
                    const at::Tensor& none, const at::Tensor& skipped) {
  if (none.size(0) == 0 || rows.size(0) == 0) return none + rows.sum(0);
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  if (skipped.defined()) rows = rows.masked_fill(skipped.unsqueeze(1), kLowest);
  at::Tensor first;
  {
    const at::NoGradGuard no_grad;
    const std::int64_t count = rows.size(0);
    const at::Tensor top = (none + kLowest).index_reduce(0, bag, rows, "amax", true);
    const at::Tensor of_bag = top.index_select(0, bag);
    const at::Tensor position =
        at::arange(count, at::TensorOptions(at::kLong).device(rows.device())).unsqueeze(1);
    const at::Tensor places =
        at::where(rows.eq(of_bag).logical_or(rows.isnan()), position, count - 1);
    first = at::full_like(none, count - 1, none.options().dtype(at::kLong))
                .index_reduce(0, bag, places, "amin", true);
  }
  return at::where(size.eq(0).unsqueeze(1), none, rows.gather(0, first));
}

void check_bags(const at::Tensor& weight, const at::Tensor& given, const at::Tensor& given_offsets,
                std::int64_t mode, const at::Tensor& weights) {
  TORCH_CHECK(given.dim() == 1 && given_offsets.dim() == 1 && weight.dim() == 2,
              "embedding_bag: weight, indices and offsets have ", weight.dim(), ", ", given.dim(),
              " and ", given_offsets.dim(), " dims, and need 2, 1 and 1");
  const auto is_index = [](const at::Tensor& t) {
    return t.scalar_type() == at::kLong || t.scalar_type() == at::kInt;
  };
  if (!at::isFloatingType(weight.scalar_type()) || !is_index(given) || !is_index(given_offsets))
    throw InvalidArgument("embedding_bag of ", c10::toString(weight.scalar_type()), " at ",
                          c10::toString(given.scalar_type()), " indices and ",
                          c10::toString(given_offsets.scalar_type()),
                          " offsets: give floating-point values, and int or long indices");
  TORCH_CHECK(mode >= kSum && mode <= kMax, "embedding_bag: mode ", mode, " is none of 0 to 2");
  TORCH_CHECK(!weights.defined() || mode == kSum, "embedding_bag: per_sample_weights are for sums");
  TORCH_CHECK(!weights.defined() || weights.numel() == given.numel(), "embedding_bag: there are ",
              weights.numel(), " per_sample_weights for ", given.numel(), " indices");
}

Four embedding_bag_padded(const at::Tensor& weight, const at::Tensor& given,
                          const at::Tensor& given_offsets, bool scale_grad_by_freq,
                          std::int64_t mode, bool sparse, const std::optional<at::Tensor>& weights,
                          bool include_last, std::optional<std::int64_t> padding) {
  const bool weighted = weights && weights->defined();
  check_bags(weight, given, given_offsets, mode, weighted ? *weights : at::Tensor());
  const ShardMeta* meta = meta_of(weight)  ? meta_of(weight)
                          : meta_of(given) ? meta_of(given)
                                           : meta_of(given_offsets);
  TORCH_CHECK(meta, "embedding_bag of sharded tensors: of weight, indices and offsets none is");
  const auto context = context_of(meta->spec());
  const auto sharded = [&](const at::Tensor& t) { return meta_of(t) ? t : promote(t, context); };
  padding = wrapped(padding, weight.size(0));
  if (sparse || rows_are_asked_for(weight, sparse))
    return bags_of_table(
        sharded(weight), sharded(given), given_offsets, weighted ? sharded(*weights) : at::Tensor(),
        {static_cast<int>(mode), include_last, {padding.value_or(-1), scale_grad_by_freq, sparse}});
  const at::Tensor offsets = meta_of(given_offsets) ? full_tensor(given_offsets) : given_offsets;
  const std::int64_t bags = offsets.size(0) - (include_last ? 1 : 0);
  TORCH_CHECK(bags >= 0, "embedding_bag: include_last_offset without offsets");
  const std::int64_t count = used(offsets, given.size(0), include_last);
  // The bag of each index; there is none for empty bags.
  const at::Tensor bag_of =
      at::bucketize(at::arange(count, offsets.options()), offsets.narrow(0, 0, bags), false, true) -
      1;
  const at::Tensor indices = sharded(given).narrow(0, 0, count), bag = sharded(bag_of);
  const at::Tensor skipped = padding ? indices.eq(*padding) : at::Tensor();
  const at::Tensor counts = padding ? skipped.logical_not().to(at::kLong)
                                    : at::ones_like(indices, indices.options().dtype(at::kLong));
  at::Tensor rows =
      at::embedding(sharded(weight), indices, padding.value_or(-1), scale_grad_by_freq);
  if (weighted) rows = rows * sharded(*weights).narrow(0, 0, count).unsqueeze(1);
  const at::Tensor size =
      sharded(at::zeros({bags}, offsets.options().dtype(at::kLong))).index_add(0, bag, counts);
  // Sums of half precision are computed in float32.
  const auto type = rows.scalar_type(), wide = at::toOpMathType(type);
  const at::Tensor none = sharded(
      at::zeros({bags, weight.size(1)}, offsets.options().dtype(mode == kMax ? type : wide)));
  at::Tensor result;
  if (mode == kMax) {
    result = greatest(rows, bag, size, none, skipped);
  } else {
    if (padding) rows = rows.masked_fill(skipped.unsqueeze(1), 0);
    result = none.index_add(0, bag, rows.to(wide));
    if (mode == kMean) result = result / size.clamp_min(1).unsqueeze(1);
  }
  return {result.to(type), bag, size.to(offsets.scalar_type()),
          at::zeros_like(size, size.options().dtype(offsets.scalar_type()))};
}

Four embedding_bag(const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                   bool scale_grad_by_freq, std::int64_t mode, bool sparse,
                   const std::optional<at::Tensor>& weights, bool include_last) {
  return embedding_bag_padded(weight, indices, offsets, scale_grad_by_freq, mode, sparse, weights,
                              include_last, std::nullopt);
}

const AtStart registered([] {
  register_rule("aten::embedding_renorm_", renorm);
  register_rule("aten::embedding", embedding);
  register_rule("aten::embedding_dense_backward", embedding_backward);
  register_decomposition("embedding_bag", embedding_bag);
  register_decomposition("embedding_bag.padding_idx", embedding_bag_padded);
});

}  // namespace
}  // namespace tessera::detail::embedding_rules
