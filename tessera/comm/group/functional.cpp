#include "tessera/comm/group/functional.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <numeric>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"

namespace tessera::functional {
namespace {

using at::Tensor;

// A linear map over the ranks and its adjoint. The adjoint is made of the functions of this file,
// so that it can be differentiated again.
struct LinearMap : torch::CustomClassHolder {
  std::function<Tensor(const Tensor&)> map, adjoint;
};

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const c10::intrusive_ptr<LinearMap>& linear) {
    context->saved_data["map"] = c10::IValue::make_capsule(linear);
    return linear->map(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["map"].toCapsule();
    auto* linear = static_cast<LinearMap*>(capsule.get());
    return {linear->adjoint(gradients[0]), Tensor()};
  }
};

template <class Map, class Adjoint>
Tensor apply(const Tensor& x, Map map, Adjoint adjoint) {
  auto linear = c10::make_intrusive<LinearMap>();
  linear->map = std::move(map);
  linear->adjoint = std::move(adjoint);
  return LinearFunction::apply(x, linear);
}

// Ranks that disagree about needing a gradient would wait for each other in backward; this name of
// the call is compared.
CallOptions options_for(const Tensor& x) {
  CallOptions options;
  if (at::GradMode::is_enabled() && x.requires_grad()) options.name = "with gradient";
  return options;
}

double weight(const Group& group, ReduceOp op, const char* call) {
  switch (op.kind) {
    case ReduceOp::Kind::sum:
      return 1.0;
    case ReduceOp::Kind::avg:
      return 1.0 / group.size();
    case ReduceOp::Kind::premultiplied:
      return op.factor;
    default:
      throw InvalidArgument("functional::", call, " with ", to_string(op.kind),
                            " is not linear; use sum, avg or premultiplied");
  }
}

Tensor weighted(const Tensor& x, double factor) { return factor == 1.0 ? x : x * factor; }

Tensor with_rows(const Tensor& x, std::int64_t rows) {
  auto shape = x.sizes().vec();
  if (shape.empty()) shape.push_back(1);
  shape[0] = rows;
  return at::empty(shape, x.options().requires_grad(false));
}

// A copy that a collective changes in place.
template <class Change>
auto on_copy(const Change& change) {
  return [change](const Tensor& t) {
    auto y = t.clone(at::MemoryFormat::Contiguous);
    change(y);
    return y;
  };
}

// A result of so many rows that a collective fills.
template <class Fill>
auto into_rows(std::int64_t rows, const Fill& fill) {
  return [rows, fill](const Tensor& t) {
    auto y = with_rows(t, rows);
    fill(y, t);
    return y;
  };
}

std::int64_t rows_of(const Tensor& x) { return x.dim() == 0 ? 1 : x.size(0); }

std::int64_t equal_rows(const Group& group, const Tensor& x, const char* call) {
  if (rows_of(x) % group.size() != 0)
    throw InvalidArgument("functional::", call, " in group '", group.name(), "': ", rows_of(x),
                          " rows cannot be divided evenly among ", group.size(),
                          " ranks; give sizes");
  return rows_of(x) / group.size();
}

// The value on the root and zeros elsewhere, for a value that is the same on all ranks.
Tensor at_root(const Group& group, const Tensor& x, int root) {
  return apply(
      x,
      [group, root](const Tensor& t) {
        return group.rank() == root ? t.clone() : at::zeros_like(t);
      },
      [group, root](const Tensor& g) { return broadcast(group, g, root, Cotangent::replicated); });
}

}  // namespace

Tensor all_reduce(const Group& group, const Tensor& x, ReduceOp op, Cotangent cotangent) {
  const double factor = weight(group, op, "all_reduce");
  const auto options = options_for(x);
  return apply(
      x, on_copy([=](const Tensor& y) { group.all_reduce(y, op, options); }), [=](const Tensor& g) {
        return weighted(cotangent == Cotangent::summed ? all_reduce(group, g) : replicate(group, g),
                        factor);
      });
}

Tensor replicate(const Group& group, const Tensor& x) {
  return apply(
      x, [](const Tensor& t) { return t.clone(); },
      [group](const Tensor& g) {
        return all_reduce(group, g, ReduceOp::sum, Cotangent::replicated);
      });
}

Tensor all_gather(const Group& group, const Tensor& x, const Sizes& sizes, Cotangent cotangent) {
  const auto options = options_for(x);
  const Sizes all = sizes.empty() ? Sizes(group.size(), rows_of(x)) : sizes;
  const bool scalar = x.dim() == 0;
  return apply(
      x,
      into_rows(detail::total_of(all),
                [=](const Tensor& y, const Tensor& t) { group.all_gather(y, t, sizes, options); }),
      [=](const Tensor& g) {
        auto d = cotangent == Cotangent::summed ? reduce_scatter(group, g, sizes)
                                                : own_rows(group, g, all);
        return scalar ? d.squeeze(0) : d;
      });
}

Tensor own_rows(const Group& group, const Tensor& x, const Sizes& sizes) {
  if (static_cast<int>(sizes.size()) != group.size() || detail::total_of(sizes) != rows_of(x))
    throw InvalidArgument("functional::own_rows in group '", group.name(), "' of ", group.size(),
                          " ranks: sizes ", list(sizes), " are not one per rank for ", rows_of(x),
                          " rows");
  const auto begin = std::accumulate(sizes.begin(), sizes.begin() + group.rank(), std::int64_t{0});
  return apply(
      x, [=](const Tensor& t) { return t.narrow(0, begin, sizes[group.rank()]).clone(); },
      [=](const Tensor& g) { return all_gather(group, g, sizes, Cotangent::replicated); });
}

Tensor reduce_scatter(const Group& group, const Tensor& x, const Sizes& sizes, ReduceOp op) {
  const double factor = weight(group, op, "reduce_scatter");
  const auto options = options_for(x);
  const auto mine = sizes.empty() ? equal_rows(group, x, "reduce_scatter") : sizes.at(group.rank());
  return apply(
      x,
      into_rows(mine, [=](const Tensor& y,
                          const Tensor& t) { group.reduce_scatter(y, t, op, sizes, options); }),
      [=](const Tensor& g) { return weighted(all_gather(group, g, sizes), factor); });
}

Tensor all_to_all(const Group& group, const Tensor& x, const Sizes& output_sizes,
                  const Sizes& input_sizes) {
  const auto options = options_for(x);
  const auto rows = output_sizes.empty() ? rows_of(x) : detail::total_of(output_sizes);
  return apply(x,
               into_rows(rows,
                         [=](const Tensor& y, const Tensor& t) {
                           group.all_to_all(y, t, output_sizes, input_sizes, options);
                         }),
               [=](const Tensor& g) { return all_to_all(group, g, input_sizes, output_sizes); });
}

Tensor broadcast(const Group& group, const Tensor& x, int root, Cotangent cotangent) {
  const auto options = options_for(x);
  return apply(x, on_copy([=](const Tensor& y) { group.broadcast(y, root, options); }),
               [=](const Tensor& g) {
                 return cotangent == Cotangent::summed ? reduce(group, g, root)
                                                       : at_root(group, g, root);
               });
}

Tensor reduce(const Group& group, const Tensor& x, int root, ReduceOp op) {
  const double factor = weight(group, op, "reduce");
  const auto options = options_for(x);
  return apply(x, on_copy([=](const Tensor& y) {
                 group.reduce(y, root, op, options);
                 if (group.rank() != root) y.zero_();
               }),
               [=](const Tensor& g) { return weighted(broadcast(group, g, root), factor); });
}

Tensor gather(const Group& group, const Tensor& x, int root, const Sizes& sizes) {
  const auto options = options_for(x);
  const Sizes all = sizes.empty() ? Sizes(group.size(), rows_of(x)) : sizes;
  const bool scalar = x.dim() == 0;
  return apply(x,
               into_rows(group.rank() == root ? detail::total_of(all) : 0,
                         [=](const Tensor& y, const Tensor& t) {
                           group.gather(group.rank() == root ? y : Tensor(), t, root, sizes,
                                        options);
                         }),
               [=](const Tensor& g) {
                 auto d = scatter(group, g, root, all);
                 return scalar ? d.squeeze(0) : d;
               });
}

Tensor scatter(const Group& group, const Tensor& x, int root, const Sizes& sizes) {
  const auto options = options_for(x);
  if (static_cast<int>(sizes.size()) != group.size())
    throw InvalidArgument("functional::scatter in group '", group.name(), "': ", sizes.size(),
                          " sizes for ", group.size(), " ranks");
  // The gradient of `x` on a rank other than the root has the shape given there: zeros.
  const auto shape = x.sizes().vec();
  return apply(x,
               into_rows(sizes[group.rank()],
                         [=](const Tensor& y, const Tensor& t) {
                           group.scatter(y, group.rank() == root ? t : Tensor(), root, sizes,
                                         options);
                         }),
               [=](const Tensor& g) {
                 auto whole = gather(group, g, root, sizes);
                 // Off the root `whole` has no elements: its sum keeps the call in the graph of a
                 // second derivative.
                 return group.rank() == root ? whole : at::zeros(shape, g.options()) + whole.sum();
               });
}

Tensor send(const Group& group, const Tensor& x, int to) {
  const auto options = options_for(x);
  const auto shape = x.sizes().vec();
  return apply(
      x,
      [=](const Tensor& t) {
        group.send(t, to, options);
        return at::empty({0}, t.options().requires_grad(false));
      },
      [=](const Tensor& g) { return receive(group, at::zeros(shape, g.options()) + g.sum(), to); });
}

Tensor receive(const Group& group, const Tensor& like, int from) {
  const auto options = options_for(like);
  return apply(
      like,
      [=](const Tensor& t) {
        auto y = at::empty(t.sizes(), t.options().requires_grad(false));
        group.receive(y, from, options);
        return y;
      },
      [=](const Tensor& g) { return at::zeros_like(g) + send(group, g, from).sum(); });
}

}  // namespace tessera::functional
