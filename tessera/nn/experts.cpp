#include "tessera/nn/experts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/nn/detail/routes.h"
#include "tessera/tensor/dispatch/internal/gathered_parameters.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace {

using detail::Routes;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using RoutesPtr = std::shared_ptr<const Routes>;

RoutesPtr routes_of(AutogradContext* ctx) { return detail::carried<RoutesPtr>(ctx, "routes"); }

// The matrices of this rank's experts. Collective where they are gathered.
at::Tensor local_weights(const at::Tensor& weights, const Routes& routes, c10::Device device) {
  if (!routes.rows) return weights;
  const at::Tensor w = detail::sharded_gradient(weights, *routes.rows);
  const ShardSpec to = routes.weights(w.sizes(), false);
  at::Tensor local;
  if (spec(w) == to) local = detail::fresh_meta(w).local;
  if (!local.defined()) local = detail::gathered_by_source(w, to);
  if (!local.defined()) local = to_local(redistribute(w, to));
  return local.device() == device ? local : local.to(device);
}

// Calls `body` with each expert that has rows, and where they are.
template <class Body>
void each_expert(const Routes& routes, const Body& body) {
  std::int64_t begin = 0;
  for (std::size_t e = 0; e < routes.mine.size(); ++e) {
    const std::int64_t rows = routes.mine[e];
    if (rows > 0) body(static_cast<std::int64_t>(e), begin, rows);
    begin += rows;
  }
}

// Of each expert the rows of `x`, transposed, times those of `y`: [experts, in, out], sharded as
// the gradient of weights is.
struct GroupedOuter : torch::autograd::Function<GroupedOuter> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& y,
                            std::int64_t experts, const RoutesPtr& routes) {
    ctx->save_for_backward({x, y});
    ctx->set_materialize_grads(false);
    detail::carry(ctx, routes, "routes");
    at::Tensor made = routes->told("grouped_product", [&] {
      at::Tensor all = at::zeros(
          {static_cast<std::int64_t>(routes->mine.size()), x.size(1), y.size(1)}, x.options());
      each_expert(*routes, [&](std::int64_t e, std::int64_t begin, std::int64_t rows) {
        at::Tensor one = all.select(0, e);
        at::mm_out(one, x.narrow(0, begin, rows).t(), y.narrow(0, begin, rows));
      });
      return all;
    });
    if (!routes->rows) return made;
    return from_local(made, routes->weights({experts, x.size(1), y.size(1)}, true));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g);
};

struct GroupedProduct : torch::autograd::Function<GroupedProduct> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weights,
                            const RoutesPtr& routes) {
    ctx->save_for_backward({x, weights});
    ctx->set_materialize_grads(false);
    detail::carry(ctx, routes, "routes");
    return routes->told("grouped_product", [&] {
      const at::Tensor local = local_weights(weights, *routes, x.device());
      at::Tensor made = at::empty({x.size(0), weights.size(2)}, x.options());
      each_expert(*routes, [&](std::int64_t e, std::int64_t begin, std::int64_t rows) {
        at::Tensor part = made.narrow(0, begin, rows);
        at::mm_out(part, x.narrow(0, begin, rows), local.select(0, e));
      });
      return made;
    });
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    variable_list result(3);
    if (!g[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const RoutesPtr routes = routes_of(ctx);
    if (ctx->needs_input_grad(0)) result[0] = apply(g[0], saved[1].transpose(1, 2), routes);
    if (ctx->needs_input_grad(1))
      result[1] = GroupedOuter::apply(saved[0], g[0], saved[1].size(0), routes);
    return result;
  }
};

variable_list GroupedOuter::backward(AutogradContext* ctx, const variable_list& g) {
  variable_list result(4);
  if (!g[0].defined()) return result;
  const auto saved = ctx->get_saved_variables();
  const RoutesPtr routes = routes_of(ctx);
  if (ctx->needs_input_grad(0))
    result[0] = GroupedProduct::apply(saved[1], g[0].transpose(1, 2), routes);
  if (ctx->needs_input_grad(1)) result[1] = GroupedProduct::apply(saved[0], g[0], routes);
  return result;
}

// What all ranks see alike of their weights.
void check_weights(const at::Tensor& weights, const Routes& routes) {
  const std::int64_t experts = routes.probabilities.size(1);
  if (!weights.defined() || weights.dim() != 3 || weights.size(0) != experts)
    throw InvalidArgument("grouped_product: weights are [", experts, ", in, out]; given is ",
                          weights.defined() ? list(weights.sizes().vec()) : "none");
  if (is_sharded(weights) != routes.rows.has_value() ||
      (routes.rows && !(spec(weights).mesh() == routes.rows->mesh())))
    throw InvalidArgument(
        "grouped_product: weights are plain where the routing's probabilities are, else sharded on "
        "the same mesh (distribute_module() with experts_on())");
}

// And of this rank's rows it alone.
void check_rows(const at::Tensor& rows, const at::Tensor& weights, const Routes& routes) {
  const std::int64_t n = c10::sum_integers(routes.mine), in = weights.size(1);
  if (!rows.defined() || is_sharded(rows) || rows.dim() != 2 || rows.size(0) != n ||
      rows.size(1) != in)
    throw InvalidArgument("grouped_product: rows are plain, [", n, ", ", in, "]; given is ",
                          rows.defined() ? list(rows.sizes().vec()) : "none");
  if (rows.scalar_type() != weights.scalar_type())
    throw InvalidArgument("grouped_product of ", rows.scalar_type(), " rows and ",
                          weights.scalar_type(), " weights: convert one of them");
}

}  // namespace

at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weights,
                           const Routing& routing) {
  const RoutesPtr& routes = routing.routes_;
  check_weights(weights, *routes);
  routes->told("grouped_product", [&] { check_rows(rows, weights, *routes); });
  return GroupedProduct::apply(rows, weights, routes);
}

ExpertsImpl::ExpertsImpl(ExpertsOptions given) : options(std::move(given)) {
  if (options.experts < 1 || options.features < 1 || options.hidden < 1)
    throw InvalidArgument("Experts: ", options.experts, " experts of ", options.features,
                          " features and ", options.hidden,
                          " hidden ones; give at least 1 of each");
  router = register_parameter("router", at::empty({options.experts, options.features}));
  up = register_parameter("up", at::empty({options.experts, options.features, options.hidden}));
  down = register_parameter("down", at::empty({options.experts, options.hidden, options.features}));
  reset_parameters();
}

void ExpertsImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  const double outer = 1 / std::sqrt(static_cast<double>(options.features));
  const double inner = 1 / std::sqrt(static_cast<double>(options.hidden));
  router.uniform_(-outer, outer);
  up.uniform_(-outer, outer);
  down.uniform_(-inner, inner);
}

ExpertsOutput ExpertsImpl::forward(const at::Tensor& x) {
  if (!x.defined() || x.dim() < 1 || x.size(-1) != options.features)
    throw InvalidArgument("Experts: the input is [..., ", options.features, "], given is ",
                          x.defined() ? list(x.sizes().vec()) : "none");
  const at::Tensor tokens = x.dim() == 2 ? x : x.reshape({-1, options.features});
  const at::Tensor scores = at::linear(tokens, router);
  const bool low = scores.scalar_type() == at::kHalf || scores.scalar_type() == at::kBFloat16;
  const at::Tensor p = at::softmax(scores, -1, low ? at::kFloat : scores.scalar_type());
  RoutingOptions how{options.chosen, options.capacity, options.normalized, options.axis, {}};
  if (is_sharded(up) && is_sharded(p)) {
    // As they lie, if that is on the axis alone.
    const DimSharding& lies = spec(up).dim(0);
    const auto& axes = spec(up).mesh().mesh().axes();
    if (lies.axes.size() == 1 && axes[static_cast<std::size_t>(lies.axes[0])].name == options.axis)
      how.sizes = lies.partition.sizes();
  }
  const Routing routing(p, how);
  const at::Tensor in = routing.to_experts(tokens).to(up.scalar_type());
  const at::Tensor h = grouped_product(in, up, routing);
  const at::Tensor between = routing.routes_->told(
      "Experts", [&] { return options.activation ? options.activation(h) : at::gelu(h); });
  const at::Tensor out = grouped_product(between, down, routing);
  const at::Tensor y = routing.to_tokens(out.to(x.scalar_type()));
  return {x.dim() == 2 ? y : y.reshape(x.sizes()), routing.balance()};
}

}  // namespace tessera
