#include "tessera/nn/embedding_table.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera {

TableBags bags_from_local(const at::Tensor& indices, const at::Tensor& offsets,
                          const DeviceMesh& mesh, std::vector<Placement> placements) {
  if (placements.empty()) placements.assign(static_cast<std::size_t>(mesh.mesh().dims()), Shard(0));
  const bool known = indices.defined() && offsets.defined() && indices.dim() == 1 &&
                     offsets.dim() == 1 && at::isIntegralType(indices.scalar_type(), false) &&
                     at::isIntegralType(offsets.scalar_type(), false);
  // What one rank alone gets wrong it tells the others after the calls that all of them make.
  const auto empty = at::zeros({0}, at::TensorOptions(at::kLong));
  const at::Tensor ids = from_local(known ? indices : empty, mesh, placements);
  const std::int64_t count = known ? indices.numel() : 0;
  const auto context = detail::MeshContext::of(mesh);
  try {
    if (!known)
      throw InvalidArgument("bags_from_local: indices and offsets are integers of one dim each");
    if (offsets.numel() == 0 ? count > 0 : offsets[0].item<std::int64_t>() != 0)
      throw InvalidArgument("bags_from_local: the first bag of a rank begins at its index 0");
    if (offsets.numel() > 0 &&
        (offsets.diff().lt(0).any().item<bool>() || offsets[-1].item<std::int64_t>() > count))
      throw InvalidArgument("bags_from_local: offsets do not decrease and are at most ", count,
                            ", the number of this rank's indices");
  } catch (...) {
    detail::rethrow_to_all("bags_from_local", *context);
  }
  const at::Tensor starts = from_local(offsets + spec(ids).local_offset()[0], mesh, placements);
  return {ids, starts};
}

namespace {

constexpr char kDense[] =
    ": the gradient of a table is dense: make its layer with sparse = true, or give an optimizer "
    "of torch's the table";

// The rows of a table that a gradient has touched, on this rank.
struct Touched {
  at::Tensor table, ids, rows;
  at::ScalarType wide;
  // Of a row that other ranks have more columns of.
  std::optional<Group> columns;
};

Touched touched(const char* who, const at::Tensor& table, const at::Tensor& gradient) {
  if (table.dim() != 2 || !at::isFloatingType(table.scalar_type()))
    throw InvalidArgument(who, ": a table is of floating-point numbers, [rows, columns], not ",
                          table.sizes());
  if (!gradient.is_sparse()) throw InvalidArgument(who, kDense);
  if (is_sharded(table) != is_sharded(gradient) ||
      (is_sharded(table) && !(spec(table) == spec(gradient))))
    throw InvalidArgument(who, ": the gradient of a table lies as ",
                          is_sharded(gradient) ? spec(gradient).to_string() : "a plain tensor",
                          ", the table does not");
  const at::Tensor shard = detail::local_values(table);
  Touched t{shard, {}, {}, at::toOpMathType(table.scalar_type()), std::nullopt};
  const at::Tensor rows = detail::local_values(gradient).coalesce();
  if (rows.sparse_dim() != 1)
    throw InvalidArgument(who, ": the gradient of a table is sparse along its rows alone");
  t.ids = rows._indices()[0];
  t.rows = rows._values().to(t.wide);
  if (!is_sharded(table)) return t;
  if (const auto& axes = spec(table).dim(1).axes; !axes.empty())
    t.columns = spec(table).mesh().group(axes);
  return t;
}

// In memory of their own.
at::Tensor touched_rows(const Touched& t) {
  const at::Tensor rows = t.table.index_select(0, t.ids);
  return rows.scalar_type() == t.wide ? rows : rows.to(t.wide);
}

void write_rows(const Touched& t, const at::Tensor& to, const at::Tensor& rows) {
  t.table.index_copy_(0, t.ids, rows.to(t.table.scalar_type()));
  detail::wrote_shard(to);
}

void require_options(const char* who, bool good) {
  if (!good)
    throw InvalidArgument(who,
                          ": a learning rate, an eps or an initial value is negative, "
                          "or a beta is not in [0, 1)");
}

[[noreturn]] void refuse_archives(const char* who) {
  throw NotAvailable(who,
                     " is not saved to libtorch's archives, which hold what one rank "
                     "has: use add_optimizer() and load_optimizer()");
}

template <class State>
State* state_of(torch::optim::Optimizer& optimizer, const at::Tensor& p) {
  const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : static_cast<State*>(found->second.get());
}

// Calls `update` for each table with a gradient.
template <class Options, class State, class Fresh, class Update>
at::Tensor stepped(torch::optim::Optimizer& optimizer,
                   const torch::optim::Optimizer::LossClosure& closure, const Fresh& fresh,
                   const Update& update) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  for (auto& group : optimizer.param_groups()) {
    auto& options = static_cast<Options&>(group.options());
    for (const at::Tensor& p : group.params()) {
      if (!p.grad().defined()) continue;
      auto* state = state_of<State>(optimizer, p);
      if (!state) {
        auto made = std::make_unique<State>();
        fresh(*made, p, options);
        state = made.get();
        optimizer.state()[p.unsafeGetTensorImpl()] = std::move(made);
      }
      update(*state, p, options);
    }
  }
  return loss;
}

}  // namespace

namespace detail {

at::Tensor row_state(const at::Tensor& table, double value) {
  const auto options = table.options()
                           .dtype(at::toOpMathType(table.scalar_type()))
                           .layout(at::kStrided)
                           .requires_grad(false);
  if (!is_sharded(table)) return at::full({table.size(0)}, value, options);
  const ShardSpec of = spec(table);
  auto placements = of.placements();
  for (Placement& p : placements)
    if (!p.is_shard(0)) p = Replicate();
  ShardSizes sizes;
  if (of.is_sharded(0)) sizes[0] = of.dim(0).partition.sizes();
  return full(ShardSpec(of.mesh(), {table.size(0)}, placements, sizes), value, options);
}

at::Tensor element_state(const at::Tensor& table) {
  const auto options =
      table.options().dtype(at::toOpMathType(table.scalar_type())).requires_grad(false);
  return is_sharded(table) ? zeros(spec(table), options) : at::zeros(table.sizes(), options);
}

void rowwise_adagrad(const at::Tensor& table, const at::Tensor& gradient, const at::Tensor& sum,
                     double rate, double eps) {
  const at::NoGradGuard no_grad;
  const Touched t = touched("RowwiseAdagrad", table, gradient);
  const at::Tensor squares = at::linalg_vector_norm(t.rows, 2, {1}).square_();
  if (t.columns) t.columns->all_reduce(squares, ReduceOp::sum, {.name = "squares of rows"});
  const at::Tensor sums = local_values(sum);
  const at::Tensor now = sums.index_select(0, t.ids) +
                         squares / static_cast<double>(std::max<std::int64_t>(table.size(1), 1));
  sums.index_copy_(0, t.ids, now);
  const at::Tensor rates = now.sqrt_().add_(eps).reciprocal_().unsqueeze(1);
  write_rows(t, table, touched_rows(t).addcmul_(t.rows, rates, -rate));
}

void sparse_adam(const at::Tensor& table, const at::Tensor& gradient, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, std::int64_t step, double rate,
                 std::pair<double, double> betas, double eps) {
  const at::NoGradGuard no_grad;
  const Touched t = touched("SparseAdam", table, gradient);
  const auto moved = [&](const at::Tensor& state, const at::Tensor& towards, double beta) {
    const at::Tensor all = local_values(state);
    const at::Tensor now = all.index_select(0, t.ids).lerp_(towards, 1 - beta);
    all.index_copy_(0, t.ids, now);
    return now;
  };
  const at::Tensor first = moved(exp_avg, t.rows, betas.first);
  const at::Tensor second = moved(exp_avg_sq, t.rows.square(), betas.second);
  const auto steps = static_cast<double>(step);
  const double correction =
      std::sqrt(1 - std::pow(betas.second, steps)) / (1 - std::pow(betas.first, steps));
  write_rows(t, table,
             touched_rows(t).addcdiv_(first, second.sqrt_().add_(eps), -rate * correction));
}

}  // namespace detail

RowwiseAdagrad::RowwiseAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               RowwiseAdagradOptions defaults)
    : Optimizer(groups, std::make_unique<RowwiseAdagradOptions>(defaults)) {
  require_options("RowwiseAdagrad", defaults.lr() >= 0 && defaults.eps() >= 0 &&
                                        defaults.initial_accumulator_value() >= 0);
}

at::Tensor RowwiseAdagrad::step(LossClosure closure) {
  using State = RowwiseAdagradParamState;
  return stepped<RowwiseAdagradOptions, State>(
      *this, closure,
      [](State& state, const at::Tensor& p, RowwiseAdagradOptions& o) {
        state.sum(detail::row_state(p, o.initial_accumulator_value()));
      },
      [](State& state, const at::Tensor& p, RowwiseAdagradOptions& o) {
        detail::rowwise_adagrad(p, p.grad(), state.sum(), o.lr(), o.eps());
      });
}
void RowwiseAdagrad::save(torch::serialize::OutputArchive&) const {
  refuse_archives("RowwiseAdagrad");
}
void RowwiseAdagrad::load(torch::serialize::InputArchive&) { refuse_archives("RowwiseAdagrad"); }

SparseAdam::SparseAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       SparseAdamOptions defaults)
    : Optimizer(groups, std::make_unique<SparseAdamOptions>(defaults)) {
  const auto [first, second] = defaults.betas();
  require_options("SparseAdam", defaults.lr() >= 0 && defaults.eps() >= 0 && first >= 0 &&
                                    first < 1 && second >= 0 && second < 1);
}

at::Tensor SparseAdam::step(LossClosure closure) {
  using State = SparseAdamParamState;
  return stepped<SparseAdamOptions, State>(
      *this, closure,
      [](State& state, const at::Tensor& p, SparseAdamOptions&) {
        state.exp_avg(detail::element_state(p)).exp_avg_sq(detail::element_state(p));
      },
      [](State& state, const at::Tensor& p, SparseAdamOptions& o) {
        // Counted when it is done: a gradient that is refused is no step.
        detail::sparse_adam(p, p.grad(), state.exp_avg(), state.exp_avg_sq(), state.step() + 1,
                            o.lr(), {std::get<0>(o.betas()), std::get<1>(o.betas())}, o.eps());
        state.step(state.step() + 1);
      });
}
void SparseAdam::save(torch::serialize::OutputArchive&) const { refuse_archives("SparseAdam"); }
void SparseAdam::load(torch::serialize::InputArchive&) { refuse_archives("SparseAdam"); }

}  // namespace tessera
