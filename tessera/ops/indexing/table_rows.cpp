// Embeddings whose table stays where it is: what detail/table_rows.h says, and aten::embedding.

#include "tessera/ops/indexing/detail/table_rows.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/comm/group/group.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/sparse_rows.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

namespace asked_rows {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows that travel between the ranks that share the table, and which those are here and at their
// owners, by rank.
struct Transfer {
  Sizes asked, given;
  // Of the rows asked for, those that travel; undefined: all. Rows of this rank's shard.
  at::Tensor of_asked, rows;
};

// One for each lookup, shared by its backward.
struct Exchange {
  ShardSpec table;
  Group ranks;
  TableOptions options;
  // In forward all rows that are asked for, in backward those whose gradient counts.
  Transfer values, gradients;
  at::Tensor place;
  // Axes beside the table's that shard ids: over them gradients are added up.
  std::vector<int> others;

  at::Tensor sent(const at::Tensor& input, const Sizes& out, const Sizes& in,
                  const char* name) const {
    if (ranks.size() == 1) return input;
    auto shape = input.sizes().vec();
    shape[0] = c10::sum_integers(out);
    const at::Tensor output = at::empty(shape, input.options());
    ranks.all_to_all(output, input.contiguous(), out, in, {.name = name});
    return output;
  }
  at::Tensor to_owners(const at::Tensor& of_asked, const Transfer& t, const char* name) const {
    const at::Tensor mine = t.of_asked.defined() ? of_asked.index_select(0, t.of_asked) : of_asked;
    return sent(mine, t.given, t.asked, name);
  }
};

using ExchangePtr = std::shared_ptr<const Exchange>;

// For each rank of the group over `axes`: whether its gradients count. Where several have the same
// ids, those of one do.
std::vector<bool> whose_counts(const Exchange& e, const std::vector<Placement>& sharded_by) {
  const auto& context = *context_of(e.table);
  std::vector<bool> counts;
  for (int r = 0; r < e.ranks.size(); ++r) {
    const std::vector<int>& axes = e.table.dim(0).axes;
    int rest = r;
    bool count = true;
    for (auto a = axes.rbegin(); a != axes.rend(); ++a) {
      const int size = context.sizes[*a];
      count &= sharded_by[*a].is_shard() || rest % size == 0;
      rest /= size;
    }
    counts.push_back(count);
  }
  return counts;
}

// Keeps of `rows`, of which each rank has `sizes`, what `keep` says, rank by rank.
at::Tensor kept(const at::Tensor& keep, Sizes& sizes) {
  std::int64_t begin = 0;
  const at::Tensor here = keep.cpu();
  for (std::int64_t& size : sizes) {
    const std::int64_t end = begin + size;
    size = here.narrow(0, begin, size).sum().item<std::int64_t>();
    begin = end;
  }
  return keep.nonzero().squeeze(1);
}

// Which gradients travel: not those of a padding row, nor of ranks whose ids another has too.
Transfer of_gradients(const Exchange& e, const at::Tensor& unique,
                      const std::vector<Placement>& sharded_by) {
  Transfer t = e.values;
  const std::vector<bool> counts = whose_counts(e, sharded_by);
  if (e.options.padding < 0 && std::ranges::all_of(counts, [](bool b) { return b; })) return t;
  at::Tensor here = unique.ne(e.options.padding);
  if (!counts[e.ranks.rank()]) here.fill_(false);
  at::Tensor there = t.rows.ne(e.options.padding - e.table.local_offset()[0]);
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (!counts[r]) there.narrow(0, begin, t.given[r]).fill_(false);
    begin += t.given[r];
  }
  t.of_asked = kept(here, t.asked);
  t.rows = t.rows.index_select(0, kept(there, t.given));
  return t;
}

// Collective over the ranks that share the table.
void agree_on_rows(Exchange& e, const at::Tensor& ids, const std::vector<Placement>& sharded_by) {
  const Partition& rows = e.table.dim(0).partition;
  const std::int64_t extent = e.table.shape()[0];
  const at::Tensor wanted = ids.reshape({-1}).to(at::kLong);
  const auto [unique, place, none] = at::_unique2(wanted, true, true);
  if (const std::int64_t n = unique.numel(); n > 0) {
    const Sizes ends = host_numbers(unique.index_select(0, tensor_of({0, n - 1}, unique)));
    const std::int64_t wrong = ends[0] < 0 ? ends[0] : ends[1];
    TORCH_CHECK_INDEX(wrong >= 0 && wrong < extent, "embedding: index ", wrong, " on rank ",
                      context_of(e.table)->mesh.all().rank(), " is out of range for a table of ",
                      extent, " rows");
  }
  e.place = place;
  Sizes begins;
  for (int r = 0; r < e.ranks.size(); ++r) begins.push_back(e.ranks.size() > 1 ? rows.begin(r) : 0);
  begins.push_back(extent);
  const at::Tensor counts = at::searchsorted(unique, tensor_of(begins, unique)).diff();
  e.values.asked = host_numbers(counts);
  e.values.given = e.values.asked;
  if (e.ranks.size() > 1) {
    const at::Tensor theirs = at::empty_like(counts);
    e.ranks.all_to_all(theirs, counts.contiguous(), {}, {}, {.name = "numbers of rows"});
    e.values.given = host_numbers(theirs);
  }
  e.values.rows = e.to_owners(unique, e.values, "rows of an embedding") - e.table.local_offset()[0];
  e.gradients = of_gradients(e, unique, sharded_by);
}

// The rows of the table that this rank's ids name.
at::Tensor look_up(const Exchange& e, const at::Tensor& table) {
  // The table may lie in host memory: then its rows move to the device, rather than itself.
  const Transfer& t = e.values;
  const at::Tensor mine = table.index_select(0, t.rows.to(table.device())).to(t.rows.device());
  return e.sent(mine, t.asked, t.given, "embedding");
}

// How often each row of this rank occurs, over all ranks.
at::Tensor frequencies(const Exchange& e) {
  const at::Tensor mine = at::bincount(e.place, {}, c10::sum_integers(e.values.asked));
  const at::Tensor all =
      at::zeros({e.table.local_shape()[0]}, mine.options())
          .index_add(0, e.gradients.rows, e.to_owners(mine, e.gradients, "frequencies"));
  if (!e.others.empty())
    context_of(e.table)->mesh.group(e.others).all_reduce(all, ReduceOp::sum,
                                                         {.name = "frequencies"});
  return all;
}

// The rows that any rank of the others has touched, on all of them.
at::Tensor over_others(const Exchange& e, const at::Tensor& rows) {
  if (e.others.empty()) return rows;
  const Group group = context_of(e.table)->mesh.group(e.others);
  if (group.size() == 1) return rows;
  const at::Tensor ids = rows._indices().squeeze(0).contiguous(), values = rows._values();
  const at::Tensor counts = at::empty({group.size()}, ids.options());
  group.all_gather(counts, tensor_of({ids.numel()}, ids), {}, {.name = "numbers of rows"});
  const Sizes sizes = host_numbers(counts);
  const std::int64_t total = c10::sum_integers(sizes);
  const at::Tensor all_ids = at::empty({total}, ids.options());
  const at::Tensor all = at::empty({total, values.size(1)}, values.options());
  group.all_gather(all_ids, ids, sizes, {.name = "rows of a gradient"});
  group.all_gather(all, values.contiguous(), sizes, {.name = "gradient of an embedding"});
  return summed_rows(all_ids, all, rows.sizes());
}

// The gradient of this rank's rows of the table, of that of the rows that it asked for.
at::Tensor gradient_of_rows(const Exchange& e, const at::Tensor& g) {
  const auto wide = at::toOpMathType(g.scalar_type());
  const at::Tensor arrived = e.to_owners(g, e.gradients, "gradient of an embedding").to(wide);
  if (e.options.sparse) {
    const at::Tensor rows =
        summed_rows(e.gradients.rows, arrived, e.table.local_shape(), e.ranks.size() == 1);
    return over_others(e, rows).to(g.scalar_type());
  }
  // Not of a sparse tensor, which some devices have not.
  at::Tensor dense = at::zeros(e.table.local_shape(), arrived.options());
  dense.index_add_(0, e.gradients.rows, arrived);
  if (e.options.by_frequency)
    dense.div_(frequencies(e).clamp_min(1).unsqueeze(1).to(dense.scalar_type()));
  return dense.to(g.scalar_type());
}

// The gradient of the table: complete where it is sharded. A dense one is a partial sum over the
// other axes that shard ids, a sparse one is complete there too.
ShardSpec gradient_of_table(const Exchange& e) {
  auto placements = e.table.placements();
  if (!e.options.sparse)
    for (const int a : e.others) placements[a] = Partial();
  return make_spec(context_of(e.table), e.table.shape(), std::move(placements),
                   std::vector<const DimSharding*>{&e.table.dim(0), &e.table.dim(1)});
}

constexpr auto kEmbedding = "aten::embedding";

ExchangePtr held(AutogradContext* ctx) { return carried<ExchangePtr>(ctx, "exchange"); }
void hold(AutogradContext* ctx, const ExchangePtr& e) {
  ctx->set_materialize_grads(false);
  carry(ctx, e, "exchange");
}

// Linear in its input, as Lookup is: each is the other's gradient. Of plain rows.
struct GradientOfTable : torch::autograd::Function<GradientOfTable> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& g, const ExchangePtr& e) {
    hold(ctx, e);
    const at::Tensor local =
        on_locals(kEmbedding, *context_of(e->table), [&] { return gradient_of_rows(*e, g); });
    const ShardSpec spec = gradient_of_table(*e);
    if (e->options.sparse) return wrap_sparse(local, spec);
    return wrap_fresh(local, make_layout(spec, g.scalar_type(), g.device()));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g);
};

struct Lookup : torch::autograd::Function<Lookup> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& table, const ExchangePtr& e) {
    hold(ctx, e);
    const ShardMeta& meta = fresh_meta(table);
    return on_locals(kEmbedding, *context_of(e->table), [&] { return look_up(*e, meta.local); });
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
    return {GradientOfTable::apply(g[0], held(ctx)), at::Tensor()};
  }
};

variable_list GradientOfTable::backward(AutogradContext* ctx, const variable_list& g) {
  if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
  const auto e = held(ctx);
  TORCH_CHECK_NOT_IMPLEMENTED(!e->options.by_frequency && !e->options.sparse,
                              "embedding: no second derivative with scale_grad_by_freq or sparse");
  at::Tensor table = redistribute(sharded_gradient(g[0], e->table), e->table);
  if (e->options.padding >= 0) {
    table = table.index_fill(0, tensor_of({e->options.padding}, table), 0);
  }
  return {Lookup::apply(table, e), at::Tensor()};
}

bool embedding(Stack* stack) {
  const auto a = torch::jit::last(*stack, 5);
  const at::Tensor weight = a[0].toTensor();
  at::Tensor indices = a[1].toTensor();
  const bool sparse = a[4].toBool();
  if (!rows_are_asked_for(weight, sparse)) return false;
  const ShardMeta *table = meta_of(weight), *asked = meta_of(indices);
  if (!asked || !at::isIntegralType(indices.scalar_type(), false) ||
      context_of(table->spec()) != context_of(asked->spec()))
    return false;
  TORCH_CHECK(!sparse || !a[3].toBool(),
              "embedding: scale_grad_by_freq is not there for sparse gradients");
  const ShardSpec where = table->spec();
  const auto wanted = without_partial(asked->spec()).placements();
  indices = redistribute(indices, beside_columns(where, wanted));
  const ShardSpec ids = spec(indices);
  const TableRows found =
      table_rows(weight, meta_of(indices)->local, ids.placements(),
                 {.padding = a[2].toInt(), .by_frequency = a[3].toBool(), .sparse = sparse});
  const int n = ids.dims();
  const ShardSpec made = lookup_spec(ids, where, with_columns(where, ids.placements(), n));
  // On the CPU backward of libtorch's embedding() takes four times as long as index_select()'s; on
  // a device it is the one that adds in float, and in the same order every time.
  const at::Tensor picked = found.rows.is_cpu() ? found.rows.index_select(0, found.place)
                                                : at::embedding(found.rows, found.place);
  at::Tensor result = from_local(picked.view(made.local_shape()), made);
  if (auto out = with_columns(where, wanted, n); out != made.placements())
    result = redistribute(result, out);
  return answer(stack, 5, std::move(result));
}

const AtStart registered([] { register_above_and_below<embedding>(kEmbedding); });

}  // namespace
}  // namespace asked_rows

bool rows_are_asked_for(const at::Tensor& weight, bool sparse) {
  const ShardMeta* table = meta_of(weight);
  if (!table || table->copy || weight.dim() != 2 || table->spec().has_partial()) return false;
  const bool stays =
      table->layout->stays && table->spec().is_sharded(0) && !table->spec().is_sharded(1);
  if (sparse && in_host_memory(*table))
    throw ShardingError(
        "embedding with sparse=True: this table lies in host memory while the program computes on "
        "a device, where its gradient is dense: make the layer with sparse=False.");
  if (sparse && !stays && context_of(table->spec())->state->sources.find(table->local).first)
    throw ShardingError(
        "embedding with sparse=True: fully_shard gathers this table, whose gradient is dense then. "
        "Name it in FullyShardOptions::stay, or make the layer with sparse=False.");
  return stays || sparse;
}

Sizes host_numbers(const at::Tensor& t) {
  const at::Tensor here = t.to(at::kCPU, at::kLong).contiguous();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

at::Tensor tensor_of(const Sizes& numbers, const at::Tensor& like) {
  return at::tensor(numbers, at::TensorOptions(at::kLong)).to(like.device());
}

ShardSpec lookup_spec(const ShardSpec& ids, const ShardSpec& table,
                      std::vector<Placement> placements) {
  Shape shape = ids.shape();
  shape.push_back(table.shape()[1]);
  std::vector<const DimSharding*> dims;
  for (int d = 0; d < ids.dims(); ++d) dims.push_back(&ids.dim(d));
  dims.push_back(&table.dim(1));
  return make_spec(context_of(table), std::move(shape), std::move(placements), dims);
}

std::vector<Placement> beside_columns(const ShardSpec& table, std::vector<Placement> placements) {
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (placements[a].is_partial() || table.placements()[a].is_shard(1))
      placements[a] = Replicate();
  return placements;
}

std::vector<Placement> with_columns(const ShardSpec& table, std::vector<Placement> placements,
                                    int d) {
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (table.placements()[a].is_shard(1) && !placements[a].is_shard()) placements[a] = Shard(d);
  return placements;
}

TableRows table_rows(const at::Tensor& weight, const at::Tensor& ids,
                     const std::vector<Placement>& sharded_by, const TableOptions& options) {
  const ShardSpec table = meta_of(weight)->spec();
  const auto e = std::make_shared<asked_rows::Exchange>();
  e->table = table;
  e->options = options;
  e->ranks = context_of(table)->mesh.group(table.dim(0).axes);
  for (int a = 0; a < table.mesh_dims(); ++a)
    if (!table.placements()[a].is_shard() && sharded_by[a].is_shard()) e->others.push_back(a);
  on_locals(asked_rows::kEmbedding, *context_of(table), [&] {
    const at::NoGradGuard no_grad;
    asked_rows::agree_on_rows(*e, ids, sharded_by);
  });
  return {asked_rows::Lookup::apply(weight, asked_rows::ExchangePtr(e)), e->place};
}

}  // namespace tessera::detail
