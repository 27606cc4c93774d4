#include "tessera/ops/attention/detail/neighborhood_local.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/comm/internal/part.h"
#include "tessera/ops/attention/detail/neighborhood_call.h"
#include "tessera/tensor/dispatch/internal/kernels.h"

namespace tessera {

Neighborhood::Keys Neighborhood::keys(std::int64_t query, std::int64_t extent) const {
  const detail::WindowDim dim{extent, kernel, dilation, causal};
  const detail::Positions seen = dim.keys_of(query);
  return {seen.begin, seen.count};
}

namespace detail {

Interval seen_keys(const Neighborhood& dim, Interval queries, std::int64_t extent) {
  if (queries.empty()) return {queries.begin, queries.begin};
  Interval seen{std::numeric_limits<std::int64_t>::max(), 0};
  for (std::int64_t q = queries.begin; q < queries.end; ++q) {
    const auto keys = dim.keys(q, extent);
    seen = {std::min(seen.begin, keys.begin),
            std::max(seen.end, keys.begin + (keys.count - 1) * dim.dilation + 1)};
  }
  return seen;
}

namespace {

using Rows = std::vector<std::vector<std::int64_t>>;

/// For every query of the box, row-major: the flattened row-major positions of its keys in the box
/// of keys. The lists differ in length where a window is truncated.
Rows key_rows(const LocalNeighborhood& w) {
  Rows rows(static_cast<std::size_t>(volume(w.queries)));
  std::vector<std::int64_t> at;
  for (const Interval& i : w.queries) at.push_back(i.begin);
  for (auto& row : rows) {
    row = {0};
    for (std::size_t d = 0; d < at.size(); ++d) {
      const auto keys = w.dims[d].keys(at[d], w.extents[d]);
      std::vector<std::int64_t> next;
      next.reserve(row.size() * static_cast<std::size_t>(keys.count));
      for (const std::int64_t outer : row)
        for (std::int64_t j = 0; j < keys.count; ++j)
          next.push_back(outer * w.keys[d].size() + keys.begin + j * w.dims[d].dilation -
                         w.keys[d].begin);
      row = std::move(next);
    }
    for (std::size_t d = at.size(); d-- > 0;) {
      if (++at[d] < w.queries[d].end) break;
      at[d] = w.queries[d].begin;
    }
  }
  return rows;
}

/// The operators' list of windows. A causal window beyond the extent is one of the extent.
std::vector<std::int64_t> windows_of(const LocalNeighborhood& w) {
  std::vector<std::int64_t> numbers;
  for (std::size_t d = 0; d < w.dims.size(); ++d) {
    const std::int64_t extent = w.extents[d], most = std::max<std::int64_t>(extent, 1);
    const auto& [kernel, dilation, causal] = w.dims[d];
    for (const std::int64_t number :
         {extent, std::min(kernel, most), std::min(dilation, most), std::int64_t{causal},
          w.queries[d].begin, w.queries[d].size(), w.keys[d].begin, w.keys[d].size()})
      numbers.push_back(number);
  }
  return numbers;
}

using ValueAndLogs = std::tuple<at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Forward = ValueAndLogs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             at::IntArrayRef, double);
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                           double);

ValueAndLogs forward_on_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            at::IntArrayRef windows, double scale) {
  const auto run = [&](const NeighborhoodCall& n) {
    AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "neighborhood_attention", [&] {
      at::parallel_for(0, n.batch * n.queries, 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const Seen keys = seen(n, i / n.queries, i % n.queries);
          for (std::int64_t h = 0; h < n.heads; ++h)
            attend_query<scalar_t, scalar_t>(Alone<scalar_t>(), n, i * n.heads + h, h, keys);
        }
      });
    });
  };
  return forward_by(run, q, k, v, windows, scale);
}

Gradients backward_on_cpu(const at::Tensor& g, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v, const at::Tensor& out, const at::Tensor& logs,
                          at::IntArrayRef windows, double scale) {
  const auto run = [&](const NeighborhoodCall& n) {
    AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "neighborhood_attention_backward", [&] {
      // In parallel over samples and heads, whose contributions to the keys do not overlap.
      at::parallel_for(0, n.batch * n.heads, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t bh = begin; bh < end; ++bh) {
          const std::int64_t batch = bh / n.heads, h = bh % n.heads;
          for (std::int64_t i = 0; i < n.queries; ++i)
            gradient_of_query<scalar_t, scalar_t, true>(
                Alone<scalar_t>(), n, (batch * n.queries + i) * n.heads + h, h, seen(n, batch, i));
        }
      });
    });
  };
  return backward_by(run, true, g, q, k, v, out, logs, windows, scale);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "_neighborhood_forward(Tensor q, Tensor k, Tensor v, int[] windows, float scale) -> (Tensor, "
      "Tensor)");
  m.def(
      "_neighborhood_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, "
      "int[] windows, float scale) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("_neighborhood_forward", &forward_on_cpu);
  m.impl("_neighborhood_backward", &backward_on_cpu);
}

/// Loads the kernels for GPUs, if this build has them: they register themselves.
void load_cuda_kernels() {
  static const LoadedPart part = load_part("libtessera_cuda.so");  // once for the process
  if (part.built && !part.library)
    throw NotAvailable("neighborhood_attention on CUDA: ", part.problem,
                       ". Install what libtorch_cuda.so needs (the dependencies of the torch "
                       "wheel), or set LD_LIBRARY_PATH to it");
}

/// Whether the operators have a kernel for the device of `t`; that of the meta device only throws.
bool has_kernel(const c10::OperatorHandle& op, const at::Tensor& t) {
  if (t.is_cuda()) load_cuda_kernels();
  return t.is_cpu() || (!t.is_meta() && op.hasComputedKernelForDispatchKey(c10::computeDispatchKey(
                                            t.scalar_type(), c10::kStrided, t.device())));
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// The keys of every query as one list of `most` each: lists that are shorter repeat their first
// key, whose bias then makes its weight zero.
struct Picked {
  at::Tensor index, bias;
  std::int64_t most = 0;
};

Picked picked_of(const Rows& rows, const at::TensorOptions& options) {
  std::size_t most = 0;
  for (const auto& row : rows) most = std::max(most, row.size());
  std::vector<std::int64_t> index;
  std::vector<double> bias;
  for (const auto& row : rows)
    for (std::size_t j = 0; j < most; ++j) {
      index.push_back(j < row.size() ? row[j] : row[0]);
      bias.push_back(j < row.size() ? 0 : -std::numeric_limits<double>::infinity());
    }
  const auto count = static_cast<std::int64_t>(most);
  return {at::tensor(index, at::kLong).to(options.device(), /*non_blocking=*/true),
          at::tensor(bias, at::kDouble)
              .to(options, /*non_blocking=*/true)
              .view({1, static_cast<std::int64_t>(rows.size()), count, 1}),
          count};
}

/// batch x queries x keys x heads x channels: what each query sees of `t`.
at::Tensor around(const at::Tensor& t, const Picked& picked, std::int64_t queries) {
  return t.index_select(1, picked.index)
      .view({t.size(0), queries, picked.most, t.size(2), t.size(3)});
}

// The gradients of q, k and v, composed so that they have derivatives of their own.
Gradients composed_gradients(const at::Tensor& g, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const Rows& rows, double scale) {
  const Picked picked = picked_of(rows, q.options());
  const std::int64_t count = q.size(1);
  const at::Tensor near = around(k, picked, count), near_values = around(v, picked, count);
  // batch x queries x keys x heads
  const at::Tensor p = ((q.unsqueeze(2) * near).sum(-1) * scale + picked.bias).softmax(2);
  const at::Tensor dp = (g.unsqueeze(2) * near_values).sum(-1);
  const at::Tensor ds = (p * (dp - (p * dp).sum({2}, true)) * scale).unsqueeze(-1);
  const auto back = [&](const at::Tensor& each, const at::Tensor& like) {
    const at::Tensor none = at::zeros(like.sizes(), like.options());
    return none.index_add(
        1, picked.index,
        each.reshape({each.size(0), count * picked.most, each.size(3), each.size(4)}));
  };
  return {(ds * near).sum(2), back(ds * q.unsqueeze(2), k),
          back(p.unsqueeze(-1) * g.unsqueeze(2), v)};
}

/// Value and logs on devices without a kernel: every query's keys and values are gathered.
ValueAndLogs composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const Rows& rows, double scale) {
  if (rows.empty())
    return {at::zeros({q.size(0), 0, q.size(2), v.size(3)}, q.options()),
            at::zeros({q.size(0), 0, q.size(2)}, q.options())};
  const Picked picked = picked_of(rows, q.options());
  const std::int64_t count = q.size(1);
  // batch x queries x keys x heads
  const at::Tensor scores =
      (q.unsqueeze(2) * around(k, picked, count)).sum(-1) * scale + picked.bias;
  const at::Tensor value = (scores.softmax(2).unsqueeze(-1) * around(v, picked, count)).sum(2);
  return {value, scores.logsumexp({2})};
}

// A tensor with its positions in one dim; one of half precision in float32, unless `mixed`: CUDA's
// kernel takes it as it is, and sums in float32 itself.
at::Tensor flattened(const at::Tensor& t, const Box& box, bool mixed = false) {
  const at::Tensor flat = t.reshape({t.size(0), volume(box), t.size(-2), t.size(-1)}).contiguous();
  return at::isReducedFloatingType(t.scalar_type()) && !mixed ? flat.to(at::kFloat) : flat;
}

std::array<at::Tensor, 3> shaped_as(const Gradients& gradients, const at::Tensor& q,
                                    const at::Tensor& k, const at::Tensor& v) {
  const auto& [dq, dk, dv] = gradients;
  const auto type = q.scalar_type();
  return {dq.view(q.sizes()).to(type), dk.view(k.sizes()).to(type), dv.view(v.sizes()).to(type)};
}

struct Attend : torch::autograd::Function<Attend> {
  using AttentionPtr = std::shared_ptr<const Attention>;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, const AttentionPtr& how) {
    const Attention::Result result = how->forward(q, k, v);
    ctx->save_for_backward({q, k, v, result.value, result.logs});
    carry(ctx, how, "how");
    return result.value;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto how = carried<AttentionPtr>(ctx, "how");
    const auto all =
        at::GradMode::is_enabled()
            ? differentiable_gradients(gradients[0], saved[0], saved[1], saved[2], how->where())
            : how->backward(gradients[0], saved[0], saved[1], saved[2], {saved[3], saved[4]});
    return {all[0], all[1], all[2], at::Tensor()};
  }
};

}  // namespace

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const LocalNeighborhood& where) {
  return Attend::apply(q, k, v, std::make_shared<const Attention>(where));
}

std::array<at::Tensor, 3> differentiable_gradients(const at::Tensor& gradient, const at::Tensor& q,
                                                   const at::Tensor& k, const at::Tensor& v,
                                                   const LocalNeighborhood& where) {
  return shaped_as(composed_gradients(flattened(gradient, where.queries),
                                      flattened(q, where.queries), flattened(k, where.keys),
                                      flattened(v, where.keys), key_rows(where), where.scale),
                   q, k, v);
}

Attention::Attention(LocalNeighborhood where)
    : where_(std::move(where)), windows_(windows_of(where_)) {}

Attention::Result Attention::forward(const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v) const {
  static const auto op = operator_named("tessera::_neighborhood_forward").typed<Forward>();
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool kernel = has_kernel(op, q), mixed = kernel && q.is_cuda();
  const at::Tensor queries = flattened(q, where_.queries, mixed),
                   keys = flattened(k, where_.keys, mixed),
                   values = flattened(v, where_.keys, mixed);
  const auto [value, logs] = kernel
                                 ? op.call(queries, keys, values, windows_, where_.scale)
                                 : composed(queries, keys, values, key_rows(where_), where_.scale);
  auto shape = q.sizes().vec();
  shape.back() = v.size(-1);
  return {value.view(shape).to(q.scalar_type()), logs};
}

std::array<at::Tensor, 3> Attention::backward(const at::Tensor& gradient, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v,
                                              const Result& result) const {
  static const auto op = operator_named("tessera::_neighborhood_backward").typed<Backward>();
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool kernel = has_kernel(op, q), mixed = kernel && q.is_cuda();
  const at::Tensor g = flattened(gradient, where_.queries, mixed),
                   queries = flattened(q, where_.queries, mixed),
                   keys = flattened(k, where_.keys, mixed),
                   values = flattened(v, where_.keys, mixed);
  return shaped_as(
      kernel ? op.call(g, queries, keys, values, flattened(result.value, where_.queries, mixed),
                       result.logs, windows_, where_.scale)
             : composed_gradients(g, queries, keys, values, key_rows(where_), where_.scale),
      q, k, v);
}

}  // namespace detail
}  // namespace tessera
