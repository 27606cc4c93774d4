#include "tessera/ops/attention/detail/neighborhood_local.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "tessera/tensor/dispatch/internal/kernels.h"

namespace tessera {

Neighborhood::Keys Neighborhood::keys(std::int64_t query, std::int64_t extent) const {
  const std::int64_t first = query % dilation, at = query / dilation,
                     members = (extent - first + dilation - 1) / dilation;
  if (causal) {
    const std::int64_t begin = std::max<std::int64_t>(at - kernel + 1, 0);
    return {first + begin * dilation, at - begin + 1};
  }
  const std::int64_t begin = std::min(std::max<std::int64_t>(at - kernel / 2, 0), members - kernel);
  return {first + begin * dilation, kernel};
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

/// Sizes of batch x positions x heads x channels.
struct Sizes4 {
  std::int64_t batch, queries, keys, heads, channels, values;
};

Sizes4 sizes_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return {q.size(0), q.size(1), k.size(1), q.size(2), q.size(3), v.size(3)};
}

template <class T>
T dot(const T* a, const T* b, std::int64_t n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <class T>
void add_scaled(T* to, T factor, const T* from, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

/// Fills `out` and the logarithm of each query's sum of exponentials.
template <class T>
void forward(const Sizes4& n, const Rows& rows, T scale, const T* q, const T* k, const T* v, T* out,
             T* logs) {
  at::parallel_for(0, n.batch * n.queries, 16, [&](std::int64_t begin, std::int64_t end) {
    std::vector<T> scores;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t batch = i / n.queries;
      const auto& row = rows[static_cast<std::size_t>(i % n.queries)];
      scores.resize(row.size());
      for (std::int64_t h = 0; h < n.heads; ++h) {
        const T* mine = q + (i * n.heads + h) * n.channels;
        T most = -std::numeric_limits<T>::infinity();
        for (std::size_t j = 0; j < row.size(); ++j) {
          scores[j] = scale * dot(mine, k + ((batch * n.keys + row[j]) * n.heads + h) * n.channels,
                                  n.channels);
          most = std::max(most, scores[j]);
        }
        T sum = 0;
        for (T& s : scores) sum += s = std::exp(s - most);
        T* result = out + (i * n.heads + h) * n.values;
        std::fill(result, result + n.values, T(0));
        for (std::size_t j = 0; j < row.size(); ++j)
          add_scaled(result, scores[j] / sum,
                     v + ((batch * n.keys + row[j]) * n.heads + h) * n.values, n.values);
        logs[i * n.heads + h] = most + std::log(sum);
      }
    }
  });
}

template <class T>
void backward(const Sizes4& n, const Rows& rows, T scale, const T* g, const T* q, const T* k,
              const T* v, const T* out, const T* logs, T* dq, T* dk, T* dv) {
  // In parallel over samples and heads, whose contributions to the keys do not overlap.
  at::parallel_for(0, n.batch * n.heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t bh = begin; bh < end; ++bh) {
      const std::int64_t batch = bh / n.heads, h = bh % n.heads;
      for (std::int64_t i = 0; i < n.queries; ++i) {
        const std::int64_t at = (batch * n.queries + i) * n.heads + h;
        const T *mine = q + at * n.channels, *gradient = g + at * n.values;
        const T all = dot(gradient, out + at * n.values, n.values);
        for (const std::int64_t key : rows[static_cast<std::size_t>(i)]) {
          const std::int64_t there = (batch * n.keys + key) * n.heads + h;
          const T p = std::exp(scale * dot(mine, k + there * n.channels, n.channels) - logs[at]);
          add_scaled(dv + there * n.values, p, gradient, n.values);
          const T ds = scale * p * (dot(gradient, v + there * n.values, n.values) - all);
          add_scaled(dq + at * n.channels, ds, k + there * n.channels, n.channels);
          add_scaled(dk + there * n.channels, ds, mine, n.channels);
        }
      }
    }
  });
}

Attention::Result attend_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const Rows& rows, double scale) {
  const Sizes4 n = sizes_of(q, k, v);
  at::Tensor out = at::empty({n.batch, n.queries, n.heads, n.values}, q.options()),
             logs = at::empty({n.batch, n.queries, n.heads}, q.options());
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "neighborhood_attention", [&] {
    detail::forward<scalar_t>(n, rows, static_cast<scalar_t>(scale), q.const_data_ptr<scalar_t>(),
                              k.const_data_ptr<scalar_t>(), v.const_data_ptr<scalar_t>(),
                              out.mutable_data_ptr<scalar_t>(), logs.mutable_data_ptr<scalar_t>());
  });
  return {out, logs};
}

std::array<at::Tensor, 3> attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                                          const at::Tensor& k, const at::Tensor& v,
                                          const Attention::Result& result, const Rows& rows,
                                          double scale) {
  const at::Tensor g = gradient.contiguous();
  at::Tensor dq = at::zeros_like(q), dk = at::zeros_like(k), dv = at::zeros_like(v);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "neighborhood_attention_backward", [&] {
    detail::backward<scalar_t>(
        sizes_of(q, k, v), rows, static_cast<scalar_t>(scale), g.const_data_ptr<scalar_t>(),
        q.const_data_ptr<scalar_t>(), k.const_data_ptr<scalar_t>(), v.const_data_ptr<scalar_t>(),
        result.value.const_data_ptr<scalar_t>(), result.logs.const_data_ptr<scalar_t>(),
        dq.mutable_data_ptr<scalar_t>(), dk.mutable_data_ptr<scalar_t>(),
        dv.mutable_data_ptr<scalar_t>());
  });
  return {dq, dk, dv};
}

struct ScaledRows {
  Rows rows;
  double scale;
};
using ScaledRowsPtr = std::shared_ptr<const ScaledRows>;

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
std::array<at::Tensor, 3> composed_gradients(const at::Tensor& g, const at::Tensor& q,
                                             const at::Tensor& k, const at::Tensor& v,
                                             const Rows& rows, double scale) {
  const Picked picked = picked_of(rows, q.options());
  const std::int64_t queries = q.size(1);
  const at::Tensor near = around(k, picked, queries), values = around(v, picked, queries);
  // batch x queries x keys x heads
  const at::Tensor p = ((q.unsqueeze(2) * near).sum(-1) * scale + picked.bias).softmax(2);
  const at::Tensor dp = (g.unsqueeze(2) * values).sum(-1);
  const at::Tensor ds = (p * (dp - (p * dp).sum({2}, true)) * scale).unsqueeze(-1);
  const auto back = [&](const at::Tensor& each, const at::Tensor& like) {
    const at::Tensor none = at::zeros(like.sizes(), like.options());
    return none.index_add(
        1, picked.index,
        each.reshape({each.size(0), queries * picked.most, each.size(3), each.size(4)}));
  };
  return {(ds * near).sum(2), back(ds * q.unsqueeze(2), k),
          back(p.unsqueeze(-1) * g.unsqueeze(2), v)};
}

/// On the CPU: float or double, batch x positions x heads x channels, contiguous.
struct Attend : torch::autograd::Function<Attend> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, const ScaledRowsPtr& given) {
    const Attention::Result result = attend_forward(q, k, v, given->rows, given->scale);
    ctx->save_for_backward({q, k, v, result.value, result.logs});
    carry(ctx, given, "rows");
    return result.value;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto given = carried<ScaledRowsPtr>(ctx, "rows");
    if (at::GradMode::is_enabled()) {
      const auto graph =
          composed_gradients(gradients[0], saved[0], saved[1], saved[2], given->rows, given->scale);
      return {graph[0], graph[1], graph[2], at::Tensor()};
    }
    const auto all = attend_backward(gradients[0], saved[0], saved[1], saved[2],
                                     {saved[3], saved[4]}, given->rows, given->scale);
    return {all[0], all[1], all[2], at::Tensor()};
  }
};

/// On other devices: every query's keys and values are gathered.
at::Tensor composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Rows& rows,
                    double scale) {
  const Picked picked = picked_of(rows, q.options());
  const std::int64_t queries = q.size(1);
  // batch x queries x keys x heads
  const at::Tensor scores =
      (q.unsqueeze(2) * around(k, picked, queries)).sum(-1) * scale + picked.bias;
  return (scores.softmax(2).unsqueeze(-1) * around(v, picked, queries)).sum(2);
}

at::Tensor flattened(const at::Tensor& t, std::int64_t positions) {
  return t.reshape({t.size(0), positions, t.size(-2), t.size(-1)});
}

struct Prepared {
  at::Tensor q, k, v;
};

// The tensors as batch x positions x heads x channels, contiguous; half types as float.
Prepared prepared(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const LocalNeighborhood& where) {
  const auto one = [&](const at::Tensor& t, const Box& box) {
    const at::Tensor flat = flattened(t, volume(box));
    return (at::isReducedFloatingType(t.scalar_type()) ? flat.to(at::kFloat) : flat).contiguous();
  };
  return {one(q, where.queries), one(k, where.keys), one(v, where.keys)};
}

std::vector<std::int64_t> shape_of_value(const at::Tensor& q, const at::Tensor& v) {
  auto shape = q.sizes().vec();
  shape.back() = v.size(-1);
  return shape;
}

at::Tensor composed_of(const Prepared& p, const Rows& rows, double scale) {
  if (!rows.empty()) return composed(p.q, p.k, p.v, rows, scale);
  return (p.q.sum() + p.k.sum() + p.v.sum()) * 0 +
         at::empty({p.q.size(0), 0, p.q.size(2), p.v.size(3)}, p.q.options());
}

}  // namespace

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const LocalNeighborhood& where) {
  auto rows = key_rows(where);
  const Prepared p = prepared(q, k, v, where);
  const at::Tensor out =
      q.is_cpu()
          ? Attend::apply(p.q, p.k, p.v,
                          std::make_shared<ScaledRows>(ScaledRows{std::move(rows), where.scale}))
          : composed_of(p, rows, where.scale);
  return out.to(q.scalar_type()).view(shape_of_value(q, v));
}

std::array<at::Tensor, 3> differentiable_gradients(const at::Tensor& gradient, const at::Tensor& q,
                                                   const at::Tensor& k, const at::Tensor& v,
                                                   const LocalNeighborhood& where) {
  const Prepared p = prepared(q, k, v, where);
  const at::Tensor g = flattened(gradient, volume(where.queries)).to(p.q.scalar_type());
  auto all = composed_gradients(g, p.q, p.k, p.v, key_rows(where), where.scale);
  all[0] = all[0].to(q.scalar_type()).view(q.sizes());
  all[1] = all[1].to(k.scalar_type()).view(k.sizes());
  all[2] = all[2].to(v.scalar_type()).view(v.sizes());
  return all;
}

Attention::Attention(LocalNeighborhood where) : where_(std::move(where)), rows_(key_rows(where_)) {}

Attention::Result Attention::forward(const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v) const {
  const Prepared p = prepared(q, k, v, where_);
  Result result = q.is_cpu() ? attend_forward(p.q, p.k, p.v, rows_, where_.scale)
                             : Result{composed_of(p, rows_, where_.scale), {}};
  result.value = result.value.to(q.scalar_type()).view(shape_of_value(q, v));
  return result;
}

std::array<at::Tensor, 3> Attention::backward(const at::Tensor& gradient, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v,
                                              const Result& result) const {
  Prepared p = prepared(q, k, v, where_);
  const at::Tensor g = flattened(gradient, volume(where_.queries)).to(p.q.scalar_type());
  std::array<at::Tensor, 3> all;
  if (q.is_cpu()) {
    const at::Tensor value =
        flattened(result.value, volume(where_.queries)).to(p.q.scalar_type()).contiguous();
    all = attend_backward(g, p.q, p.k, p.v, {value, result.logs}, rows_, where_.scale);
  } else {
    const at::AutoGradMode enabled(true);
    for (at::Tensor* t : {&p.q, &p.k, &p.v}) *t = t->detach().requires_grad_(true);
    const auto gradients =
        torch::autograd::grad({composed_of(p, rows_, where_.scale)}, {p.q, p.k, p.v}, {g});
    all = {gradients[0], gradients[1], gradients[2]};
  }
  all[0] = all[0].to(q.scalar_type()).view(q.sizes());
  all[1] = all[1].to(k.scalar_type()).view(k.sizes());
  all[2] = all[2].to(v.scalar_type()).view(v.sizes());
  return all;
}

}  // namespace detail
}  // namespace tessera
