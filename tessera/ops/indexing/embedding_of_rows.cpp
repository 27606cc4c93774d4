// Embeddings whose table stays where it is: its rows are sharded, and neither they nor their
// gradient are gathered. Each rank asks the owners of the rows that its indices name, once for each
// row, and backward sends the sum of each row's gradients back to its owner.

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "tessera/comm/group/group.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/carry.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/failure.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::embedding_of_rows {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Which rows this rank needs and which of its own others do: one for each lookup, shared by its
// backward.
struct Exchange {
  ShardSpec table, result;
  Group ranks;
  // How many rows this rank asks of each rank, and each rank of it.
  Sizes asked, given;
  // Of each index: which of the rows that were asked for.
  at::Tensor place;
  // Rows of this rank's shard that were asked of it, by the rank that did.
  at::Tensor rows;
  // Whether the gradient of this rank's result counts: where several have the same indices, that of
  // one does.
  bool counts = true;
  // A row of the whole table whose gradient is none; -1: there is none.
  std::int64_t padding = -1;
  bool by_frequency = false;

  at::Tensor to_owners(const at::Tensor& mine, const char* name) const {
    return sent(mine, given, asked, name);
  }
  at::Tensor from_owners(const at::Tensor& theirs, const char* name) const {
    return sent(theirs, asked, given, name);
  }

 private:
  at::Tensor sent(const at::Tensor& input, const Sizes& out, const Sizes& in,
                  const char* name) const {
    if (ranks.size() == 1) return input;
    auto shape = input.sizes().vec();
    shape[0] = std::accumulate(out.begin(), out.end(), std::int64_t{0});
    const at::Tensor output = at::empty(shape, input.options());
    ranks.all_to_all(output, input.contiguous(), out, in, {.name = name});
    return output;
  }
};

using ExchangePtr = std::shared_ptr<const Exchange>;

Sizes sizes_of(const at::Tensor& counts) {
  const at::Tensor here = counts.to(at::kCPU, at::kLong).contiguous();
  return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + here.numel()};
}

at::Tensor tensor_of(const Sizes& values, const at::Tensor& like) {
  return at::tensor(values, at::TensorOptions(at::kLong)).to(like.device());
}

// Collective over the ranks that share the table.
void agree_on_rows(Exchange& e, const at::Tensor& indices) {
  const DimSharding& rows = e.table.dim(0);
  const at::Tensor wanted = indices.reshape({-1}).to(at::kLong);
  TORCH_CHECK_INDEX(
      wanted.numel() == 0 ||
          wanted.ge(0).logical_and(wanted.lt(rows.partition.extent())).all().item<bool>(),
      "embedding: an index is out of range for a table of ", rows.partition.extent(), " rows");
  const auto [unique, place, none] = at::_unique2(wanted, true, true);
  e.place = place;
  Sizes begins;
  for (int r = 0; r <= rows.partition.parts(); ++r)
    begins.push_back(r < rows.partition.parts() ? rows.partition.begin(r)
                                                : rows.partition.extent());
  const at::Tensor cuts = at::searchsorted(unique, tensor_of(begins, unique));
  const at::Tensor counts = cuts.diff();
  e.asked = sizes_of(counts);
  e.given = e.asked;
  if (e.ranks.size() > 1) {
    const at::Tensor theirs = at::empty_like(counts);
    e.ranks.all_to_all(theirs, counts.contiguous(), {}, {}, {.name = "numbers of rows"});
    e.given = sizes_of(theirs);
  }
  e.rows = e.to_owners(unique, "rows of an embedding") - e.table.local_offset()[0];
}

// The rows of the table that this rank's indices name.
at::Tensor look_up(const Exchange& e, const at::Tensor& table) {
  // The table may lie in host memory: then its rows move to the device, rather than itself.
  const at::Tensor mine = table.index_select(0, e.rows.to(table.device())).to(e.rows.device());
  const at::Tensor rows = e.from_owners(mine, "embedding");
  auto shape = e.result.local_shape();
  return rows.index_select(0, e.place).reshape(shape);
}

// How often each of the rows that were asked for occurs, at their owner, over all ranks.
at::Tensor frequencies(const Exchange& e, const at::Tensor& summed) {
  const at::Tensor mine = at::bincount(e.place, {}, summed.size(0)).mul(e.counts ? 1 : 0);
  const at::Tensor all = at::zeros({e.table.local_shape()[0]}, mine.options())
                             .index_add(0, e.rows, e.to_owners(mine, "frequencies"));
  std::vector<int> others;
  for (int a = 0; a < e.table.mesh_dims(); ++a) {
    if (!e.table.placements()[a].is_shard() && e.result.placements()[a].is_shard())
      others.push_back(a);
  }
  if (!others.empty())
    context_of(e.table)->mesh.group(others).all_reduce(all, ReduceOp::sum, {.name = "frequencies"});
  return all;
}

// The gradient of this rank's rows of the table, of that of the result.
at::Tensor gradient_of_rows(const Exchange& e, const at::Tensor& g) {
  const std::int64_t width = e.table.shape()[1];
  const auto wide = at::toOpMathType(g.scalar_type());
  const std::int64_t mine = std::accumulate(e.asked.begin(), e.asked.end(), std::int64_t{0});
  at::Tensor summed = at::zeros({mine, width}, g.options().dtype(wide));
  if (e.counts) summed.index_add_(0, e.place, g.reshape({-1, width}).to(wide));
  at::Tensor rows = at::zeros({e.table.local_shape()[0], width}, summed.options());
  rows.index_add_(0, e.rows, e.to_owners(summed, "gradient of an embedding"));
  if (e.by_frequency)
    rows.div_(frequencies(e, summed).clamp_min(1).unsqueeze(1).to(rows.scalar_type()));
  if (const std::int64_t here = e.padding - e.table.local_offset()[0];
      e.padding >= 0 && here >= 0 && here < rows.size(0))
    rows.narrow(0, here, 1).zero_();
  return rows.to(g.scalar_type());
}

// The gradient of the table: complete where its rows are sharded, a partial sum over the other axes
// that shard the indices.
ShardSpec gradient_of_table(const Exchange& e) {
  auto placements = e.table.placements();
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (!placements[a].is_shard() && e.result.placements()[a].is_shard()) placements[a] = Partial();
  }
  return make_spec(context_of(e.table), e.table.shape(), std::move(placements),
                   std::vector<const DimSharding*>{&e.table.dim(0), nullptr});
}

// Runs on locals; what fails on one rank alone is told to the others.
template <class Run>
at::Tensor on_locals(const ShardSpec& of, at::ScalarType dtype, c10::Device device, Run run) {
  try {
    at::Tensor local;
    {
      const LocalCallGuard guard;
      local = run();
    }
    return wrap_fresh(std::move(local), make_layout(of, dtype, device));
  } catch (...) {
    rethrow_to_all("aten::embedding", *context_of(of));
  }
}

ExchangePtr held(AutogradContext* ctx) { return carried<ExchangePtr>(ctx, "exchange"); }
void hold(AutogradContext* ctx, const ExchangePtr& e) {
  ctx->set_materialize_grads(false);
  carry(ctx, e, "exchange");
}

// Linear in its input, as Lookup is: each is the other's gradient.
struct GradientOfTable : torch::autograd::Function<GradientOfTable> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& g, const ExchangePtr& e) {
    hold(ctx, e);
    const ShardMeta& meta = fresh_meta(g);
    return on_locals(gradient_of_table(*e), g.scalar_type(), g.device(),
                     [&] { return gradient_of_rows(*e, meta.local); });
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g);
};

struct Lookup : torch::autograd::Function<Lookup> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& table, const ExchangePtr& e) {
    hold(ctx, e);
    const ShardMeta& meta = fresh_meta(table);
    return on_locals(e->result, table.scalar_type(), table.device(),
                     [&] { return look_up(*e, meta.local); });
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto e = held(ctx);
    const at::Tensor gy = redistribute(sharded_gradient(g[0], e->result), e->result);
    return {GradientOfTable::apply(gy, e), at::Tensor()};
  }
};

variable_list GradientOfTable::backward(AutogradContext* ctx, const variable_list& g) {
  if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
  const auto e = held(ctx);
  TORCH_CHECK_NOT_IMPLEMENTED(!e->by_frequency,
                              "embedding: no second derivative with scale_grad_by_freq");
  at::Tensor table = redistribute(sharded_gradient(g[0], e->table), e->table);
  if (e->padding >= 0) {
    const at::Tensor none = at::tensor({e->padding}, at::TensorOptions(at::kLong));
    table = table.index_fill(0, none.to(table.device()), 0);
  }
  return {Lookup::apply(table, e), at::Tensor()};
}

bool is_asked_for(const at::Tensor& weight, const at::Tensor& indices) {
  const ShardMeta *table = meta_of(weight), *asked = meta_of(indices);
  return table && asked && table->layout->stays && !table->copy && weight.dim() == 2 &&
         table->spec().is_sharded(0) && !table->spec().is_sharded(1) &&
         !table->spec().has_partial() && at::isIntegralType(indices.scalar_type(), false) &&
         context_of(table->spec()) == context_of(asked->spec());
}

ShardSpec result_spec(const ShardSpec& table, const ShardSpec& indices) {
  auto shape = indices.shape();
  shape.push_back(table.shape()[1]);
  std::vector<const DimSharding*> dims;
  for (int d = 0; d < indices.dims(); ++d) dims.push_back(&indices.dim(d));
  dims.push_back(nullptr);
  return make_spec(context_of(table), std::move(shape), indices.placements(), dims);
}

bool embedding(Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 5);
  const at::Tensor weight = arguments[0].toTensor();
  at::Tensor indices = arguments[1].toTensor();
  if (!is_asked_for(weight, indices)) return false;
  if (arguments[4].toBool())
    throw ShardingError(
        "aten::embedding: the gradient of a table that stays is that of this rank's rows, and is "
        "dense: make the embedding with sparse = false");
  const ShardSpec table = meta_of(weight)->spec();
  if (spec(indices).has_partial()) indices = redistribute(indices, without_partial(spec(indices)));
  const auto e = std::make_shared<Exchange>();
  e->table = table;
  e->result = result_spec(table, spec(indices));
  e->ranks = context_of(table)->mesh.group(table.dim(0).axes);
  e->padding = arguments[2].toInt();
  e->by_frequency = arguments[3].toBool();
  for (const int axis : table.dim(0).axes) {
    if (!e->result.placements()[axis].is_shard())
      e->counts &= context_of(table)->coordinate[axis] == 0;
  }
  try {
    const LocalCallGuard guard;
    const at::NoGradGuard no_grad;
    agree_on_rows(*e, meta_of(indices)->local);
  } catch (...) {
    rethrow_to_all("aten::embedding", *context_of(table));
  }
  at::Tensor result = Lookup::apply(weight, e);
  torch::jit::drop(*stack, 5);
  torch::jit::push(*stack, std::move(result));
  return true;
}

const AtStart registered([] { register_above("aten::embedding", embedding); });

}  // namespace

}  // namespace tessera::detail::embedding_of_rows
