// Attention over a sequence that is sharded. Keys and values are passed round a ring, one shard at
// a time, while each rank keeps its queries: with n ranks after n - 1 messages every query has met
// every key, and no rank ever holds the complete sequence. Shards may have any sizes. The softmax
// is computed shard by shard with a running maximum and sum, after M. Milakov, N. Gimelshein,
// "Online normalizer calculation for softmax" (2018); the ring is that of H. Liu, M. Zaharia, P.
// Abbeel, "Ring Attention with Blockwise Transformers" (2023). In backward the gradients of keys
// and values travel with them. The derivative of backward goes round twice: first for sums over
// the keys of each query, then for the gradients. Under a causal mask the rank of the first queries
// would have the least to do and the last one the most: each hands the second half of its queries
// to the rank that mirrors it (the first to the last, and so on), so that all compute alike, and
// gets the results back; that is the balance of the zigzag layout, in any layout. Dropout
// draws by global index, so that it is the same for any number of ranks.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/text.h"
#include "tessera/ops/random/draws.h"
#include "tessera/ops/rules/decomposition.h"
#include "tessera/tensor/dispatch/carry.h"
#include "tessera/tensor/dispatch/execute.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/dispatch/promote.h"
#include "tessera/tensor/dispatch/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail::ring_attention_rules {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Shape = std::vector<std::int64_t>;

// From this many queries per rank on halves of them are handed on to balance a causal mask.
constexpr std::int64_t kBalancedFromQueries = 64;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The layout of a call; the same for forward and backward.
struct Ring : torch::CustomClassHolder {
  std::shared_ptr<MeshContext> context;
  std::vector<int> axes;  // along which keys and values are passed
  ShardSpec query, key, value, mask, out;
  ShardSpec key_gradient, value_gradient, mask_gradient;
  bool causal = false;
  double scale = 1;
  std::int64_t repeat = 1;  // heads of queries per head of keys
  double dropout = 0;
  DrawPosition draw;  // of the dropout

  int dims() const { return query.dims(); }
  int sequence() const { return dims() - 2; }
};

ShardSpec placed(const std::shared_ptr<MeshContext>& context, const Shape& shape,
                 const std::vector<Placement>& placements,
                 const std::vector<const DimSharding*>& parts) {
  return make_spec(context, shape, placements, parts);
}

at::Tensor repeated(const at::Tensor& t, std::int64_t times) {
  return times == 1 ? t : t.repeat_interleave(times, t.dim() - 3);
}

// The adjoint of repeated().
at::Tensor summed(const at::Tensor& t, std::int64_t times) {
  if (times == 1) return t;
  Shape shape = t.sizes().vec();
  const std::size_t head = shape.size() - 3;
  shape[head] /= times;
  shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(head) + 1, times);
  return t.reshape(shape).sum(static_cast<std::int64_t>(head) + 1);
}

// `t` where nothing is dropped.
at::Tensor times(const at::Tensor& t, const at::Tensor& kept) {
  return kept.defined() ? t * kept : t;
}

// The columns of a mask, or of its gradient, that belong to these keys.
at::Tensor of_columns(const at::Tensor& mask, const Interval& keys) {
  return mask.size(-1) == 1 ? mask : mask.narrow(-1, keys.begin, keys.size());
}

void add_to_columns(const at::Tensor& mask, const at::Tensor& scores, const Interval& keys) {
  const at::Tensor part = of_columns(mask, keys);
  part.add_(scores.sum_to_size(part.sizes()));
}

// A run of the queries that this rank computes: where it is in the local tensors, and the global
// index of its first.
struct Run {
  std::int64_t at, count, begin;
};

// The queries of a run: rows of any tensor of [..., queries, columns].
at::Tensor of_run(const at::Tensor& t, const Run& run) { return t.narrow(-2, run.at, run.count); }

// One rank's way round the ring.
struct Round {
  const Ring& ring;
  const Group group;
  const int ranks, me;
  const Partition* parts;  // of the keys, one shard per rank of the ring
  at::ScalarType type;
  std::vector<Run> runs;
  // The rank with which halves of the queries are exchanged; this rank itself: with none.
  int mirror;
  // Queries of the first half, which stays, and of the second ones of both ranks.
  std::int64_t first = 0, second = 0, second_of_mirror = 0;

  Round(const Ring& r, at::ScalarType t)
      : ring(r),
        group(r.context->mesh.group(r.axes)),
        ranks(group.size()),
        me(group.rank()),
        parts(r.key.is_sharded(r.sequence()) ? &r.key.dim(r.sequence()).partition : nullptr),
        type(t),
        mirror(me) {
    const int d = r.sequence();
    const DimSharding& rows = r.query.dim(d);
    // From what all ranks share.
    if (r.causal && !r.mask && ranks > 1 && rows.axes == r.axes &&
        r.query.shape()[d] >= kBalancedFromQueries * ranks)
      mirror = ranks - 1 - me;
    const std::int64_t all = r.query.local_shape()[d], begin = r.query.local_offset()[d];
    if (mirror == me) {
      runs = {{0, all, begin}};
      return;
    }
    const Interval theirs = rows.partition.interval(mirror);
    second = all / 2;
    first = all - second;
    second_of_mirror = theirs.size() / 2;
    runs = {{0, first, begin}, {first, second_of_mirror, theirs.end - second_of_mirror}};
  }

  int owner(int step) const { return (me + step) % ranks; }
  Interval columns(int rank) const {
    return parts ? parts->interval(rank) : Interval{0, ring.key.shape()[ring.sequence()]};
  }

  // Passes `mine` on, and receives what the next rank has, of `columns` rows.
  Request pass(const std::vector<at::Tensor>& mine, std::vector<at::Tensor>& next,
               std::int64_t rows) const {
    std::vector<Message> messages;
    next.clear();
    for (const at::Tensor& t : mine) {
      Shape shape = t.sizes().vec();
      shape[shape.size() - 2] = rows;
      next.push_back(at::empty(shape, t.options().memory_format(c10::nullopt)));
      messages.push_back({Message::Kind::send, t.contiguous(), (me + ranks - 1) % ranks});
      messages.push_back({Message::Kind::receive, next.back(), (me + 1) % ranks});
    }
    return group.start().exchange(messages, {.name = "ring attention"});
  }

  // Exchanges what follows the first half, of which this rank then has `rows`.
  std::vector<at::Tensor> exchanged(const std::vector<at::Tensor>& mine, std::int64_t rows) const {
    if (mirror == me) return mine;
    std::vector<at::Tensor> theirs, all;
    std::vector<Message> messages;
    for (const at::Tensor& t : mine) {
      Shape shape = t.sizes().vec();
      shape[shape.size() - 2] = rows;
      theirs.push_back(at::empty(shape, t.options().memory_format(c10::nullopt)));
      messages.push_back(
          {Message::Kind::send, t.narrow(-2, first, t.size(-2) - first).contiguous(), mirror});
      messages.push_back({Message::Kind::receive, theirs.back(), mirror});
    }
    group.start().exchange(messages, {.name = "ring attention, halves"}).wait();
    for (std::size_t i = 0; i < mine.size(); ++i)
      all.push_back(at::cat({mine[i].narrow(-2, 0, first), theirs[i]}, -2));
    return all;
  }
  // Tensors of this rank's own queries as those of the queries that it computes, and back.
  std::vector<at::Tensor> dealt(const std::vector<at::Tensor>& mine) const {
    return exchanged(mine, second_of_mirror);
  }
  std::vector<at::Tensor> returned(const std::vector<at::Tensor>& computed) const {
    return exchanged(computed, second);
  }

  bool nothing(const Interval& keys, const Run& run) const {
    return keys.empty() || run.count == 0 ||
           (ring.causal && keys.begin > run.begin + run.count - 1);
  }

  // Scores of a run of (scaled) queries with one shard of the keys.
  at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                    const Interval& keys, const Run& run) const {
    at::Tensor s = at::matmul(q, repeated(k.to(type), ring.repeat).transpose(-2, -1));
    if (mask.defined()) {
      const at::Tensor part = of_columns(mask, keys);
      s = part.scalar_type() == at::kBool ? s.masked_fill(part.logical_not(), -kInfinity)
                                          : s + part.to(type);
    }
    if (ring.causal && keys.end - 1 > run.begin) {
      const at::Tensor row = at::arange(run.begin, run.begin + run.count,
                                        s.options().dtype(at::kLong))
                                 .unsqueeze(-1),
                       column = at::arange(keys.begin, keys.end, s.options().dtype(at::kLong));
      s = s.masked_fill(column.gt(row), -kInfinity);
    }
    return s;
  }

  // For weights like `p`: 1 / (1 - dropout) where they are kept, else 0; undefined without dropout.
  at::Tensor kept(const at::Tensor& p, const Interval& keys, const Run& run) const {
    if (ring.dropout == 0) return {};
    if (ring.dropout == 1) return at::zeros_like(p);
    Shape global = ring.query.shape(), offset = ring.query.local_offset();
    global.back() = ring.key.shape()[ring.sequence()];
    offset[ring.sequence()] = run.begin;
    offset.back() = keys.begin;
    return dropout_mask(ring.draw, global, offset, p.sizes().vec(), ring.dropout)
        .to(p.options())
        .div(1 - ring.dropout);
  }
};

// Third derivatives would need a ring of their own.
struct NoThirdDerivative : torch::autograd::Function<NoThirdDerivative> {
  using Maybe = std::optional<at::Tensor>;
  // The other arguments: what the gradient was computed from, each of which may require a gradient.
  static at::Tensor forward(AutogradContext*, const at::Tensor& t, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&, const Maybe&,
                            const Maybe&, const Maybe&, const Maybe&, const Maybe&) {
    const ShardMeta& meta = *meta_of(t);
    return wrap(meta.local, meta.layout);
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw ShardingError(
        "scaled_dot_product_attention over a sharded sequence has no third derivative. "
        "Redistribute query, key and value so that the sequence is "
        "whole.");
  }
};

at::Tensor local_of(const at::Tensor& t) { return meta_of(t)->local; }

at::Tensor given(const at::Tensor& t, const ShardSpec& spec, at::ScalarType dtype) {
  const at::Tensor local = t.to(dtype);
  return wrap_fresh(local, make_layout(spec, dtype, local.device()));
}

std::optional<at::Tensor> if_defined(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

// The gradients of query, key, value and mask, as a function of these and of the result's gradient.
// With P the softmax, M what dropout keeps (over the probability that it does), g the result's
// gradient:  dP = M (g v^T),  dS = P (dP - mean),  mean = the sum of P dP over the keys.
struct RingGradient : torch::autograd::Function<RingGradient> {
  // `mean`, `level`: plain, of this rank's queries; not differentiated through, for they follow
  // from the others.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& gradient,
                               const std::optional<at::Tensor>& mask, const at::Tensor& mean,
                               const at::Tensor& level, bool wants_mask,
                               const c10::intrusive_ptr<Ring>& ring) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["ring"] = c10::IValue::make_capsule(ring);
    ctx->saved_data["mask gradient"] = wants_mask;
    ctx->save_for_backward({query, key, value, gradient, mask.value_or(at::Tensor()), mean, level});
    const LocalCallGuard guard;
    const at::Tensor q = local_of(query), k = local_of(key), v = local_of(value),
                     bias = mask ? local_of(*mask) : at::Tensor();
    const Round round(*ring, at::toOpMathType(q.scalar_type()));
    const auto type = round.type;
    const auto rows =
        round.dealt({q.to(type).mul(ring->scale), local_of(gradient).to(type), mean, level});
    const at::Tensor &scaled = rows[0], &g = rows[1];
    std::vector<at::Tensor> held = {k, v}, next,
                            sums = {at::zeros(k.sizes(), k.options().dtype(type)),
                                    at::zeros(v.sizes(), v.options().dtype(type))},
                            arriving;
    at::Tensor dq = at::zeros_like(scaled), db;
    if (wants_mask) db = at::zeros(bias.sizes(), scaled.options());
    for (int step = 0; step < round.ranks; ++step) {
      const std::int64_t following = round.columns(round.owner(step + 1)).size();
      Request passing;
      if (step + 1 < round.ranks) passing = round.pass(held, next, following);
      const Interval keys = round.columns(round.owner(step));
      for (const Run& run : round.runs) {
        if (round.nothing(keys, run)) continue;
        const at::Tensor q_run = of_run(scaled, run), g_run = of_run(g, run);
        const at::Tensor p =
            (round.scores(q_run, held[0], bias, keys, run) - of_run(rows[3], run)).exp();
        const at::Tensor kept = round.kept(p, keys, run);
        sums[1] += summed(at::matmul(times(p, kept).transpose(-2, -1), g_run), ring->repeat);
        const at::Tensor dp = times(
            at::matmul(g_run, repeated(held[1].to(type), ring->repeat).transpose(-2, -1)), kept);
        const at::Tensor ds = p * (dp - of_run(rows[2], run));
        of_run(dq, run).add_(at::matmul(ds, repeated(held[0].to(type), ring->repeat)) *
                             ring->scale);
        sums[0] += summed(at::matmul(ds.transpose(-2, -1), q_run), ring->repeat);
        if (wants_mask) add_to_columns(db, ds, keys);
      }
      passing.wait();
      if (step + 1 < round.ranks) held.swap(next);
      // The gradients belong to the rank before the one that computes with them next; after the
      // last step they are back.
      if (round.ranks > 1) {
        round.pass(sums, arriving, following).wait();
        sums.swap(arriving);
      }
    }
    dq = round.returned({dq})[0];
    variable_list result = {given(dq, ring->query, q.scalar_type()),
                            given(sums[0], ring->key_gradient, k.scalar_type()),
                            given(sums[1], ring->value_gradient, v.scalar_type())};
    if (wants_mask) result.push_back(given(db, ring->mask_gradient, bias.scalar_type()));
    return result;
  }

  // With a, b, c, e the gradients of dq, dk, dv and of the mask's:  x = scale (a k^T + q b^T) + e
  // is that of dS, y = M (g c^T) that of P by dv. Then, summing over the keys of each query,
  //   w = x dP - x mean - dP sum(P x) + y   is that of P in all,
  //   z = P (w - sum(P w))                  that of the scores,
  //   u = M P (x - sum(P x))                that of g v^T.
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(ctx->saved_data["ring"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    const bool wants_mask = ctx->saved_data["mask gradient"].toBool();
    const auto placed = [&](std::size_t i, const ShardSpec& spec) {
      return i < gradients.size() && gradients[i].defined()
                 ? redistribute(sharded_gradient(gradients[i], spec), spec)
                 : at::Tensor();
    };
    const at::Tensor of_dq = placed(0, ring->query), of_dk = placed(1, ring->key),
                     of_dv = placed(2, ring->value),
                     of_db = wants_mask ? placed(3, ring->mask) : at::Tensor();
    variable_list result(9);
    {
      const at::NoGradGuard no_grad;
      const LocalCallGuard guard;
      const at::Tensor q = local_of(saved[0]),
                       bias = saved[4].defined() ? local_of(saved[4]) : at::Tensor();
      const Round round(*ring, at::toOpMathType(q.scalar_type()));
      const auto type = round.type;
      const auto repeat = ring->repeat;
      const at::Tensor k = local_of(saved[1]).to(type), v = local_of(saved[2]).to(type);
      const auto or_zeros = [&](const at::Tensor& t, const at::Tensor& like) {
        return t.defined() ? local_of(t).to(type) : at::zeros(like.sizes(), like.options());
      };
      const at::Tensor own_scaled = q.to(type).mul(ring->scale);
      const auto rows = round.dealt({own_scaled, or_zeros(of_dq, own_scaled).mul(ring->scale),
                                     local_of(saved[3]).to(type), saved[5], saved[6]});
      const at::Tensor &scaled = rows[0], &mean = rows[3];
      const at::Tensor b = or_zeros(of_dk, k), c = or_zeros(of_dv, v),
                       e = of_db.defined() ? local_of(of_db).to(type) : at::Tensor();
      // A run of the queries with one shard of the keys: what both ways round compute of it.
      struct Block {
        at::Tensor q, a, g, mean, k, v, b, c, p, kept, dp, x, y;
      };
      const auto block = [&](const std::vector<at::Tensor>& held, const Interval& keys,
                             const Run& run) {
        Block s;
        s.q = of_run(scaled, run);
        s.a = of_run(rows[1], run);
        s.g = of_run(rows[2], run);
        s.mean = of_run(mean, run);
        s.k = repeated(held[0], repeat);
        s.v = repeated(held[1], repeat);
        s.b = repeated(held[2], repeat);
        s.c = repeated(held[3], repeat);
        s.p = (round.scores(s.q, held[0], bias, keys, run) - of_run(rows[4], run)).exp();
        s.kept = round.kept(s.p, keys, run);
        s.dp = times(at::matmul(s.g, s.v.transpose(-2, -1)), s.kept);
        s.x = at::matmul(s.a, s.k.transpose(-2, -1)) + at::matmul(s.q, s.b.transpose(-2, -1));
        if (e.defined()) s.x = s.x + of_columns(e, keys);
        s.y = times(at::matmul(s.g, s.c.transpose(-2, -1)), s.kept);
        return s;
      };
      const std::vector<at::Tensor> own = {k, v, b, c};
      std::vector<at::Tensor> held = own, next;
      // Sums over all keys of P x, P x dP and P y.
      at::Tensor px = at::zeros_like(mean), pxd = at::zeros_like(mean), py = at::zeros_like(mean);
      for (int step = 0; step < round.ranks; ++step) {
        Request passing;
        if (step + 1 < round.ranks)
          passing = round.pass(held, next, round.columns(round.owner(step + 1)).size());
        const Interval keys = round.columns(round.owner(step));
        for (const Run& run : round.runs) {
          if (round.nothing(keys, run)) continue;
          const Block s = block(held, keys, run);
          of_run(px, run).add_((s.p * s.x).sum({-1}, true));
          of_run(pxd, run).add_((s.p * s.x * s.dp).sum({-1}, true));
          of_run(py, run).add_((s.p * s.y).sum({-1}, true));
        }
        passing.wait();
        if (step + 1 < round.ranks) held.swap(next);
      }
      const at::Tensor pw = pxd - px * mean * 2 + py;
      held = own;
      std::vector<at::Tensor> sums = {at::zeros_like(k), at::zeros_like(v)}, arriving;
      at::Tensor gq = at::zeros_like(scaled), gg = at::zeros_like(rows[2]), gb;
      const bool masked = bias.defined() && ctx->needs_input_grad(4);
      if (masked) gb = at::zeros(bias.sizes(), scaled.options());
      for (int step = 0; step < round.ranks; ++step) {
        const std::int64_t following = round.columns(round.owner(step + 1)).size();
        Request passing;
        if (step + 1 < round.ranks) passing = round.pass(held, next, following);
        const Interval keys = round.columns(round.owner(step));
        for (const Run& run : round.runs) {
          if (round.nothing(keys, run)) continue;
          const Block s = block(held, keys, run);
          const at::Tensor px_run = of_run(px, run);
          const at::Tensor z =
              s.p * (s.x * s.dp - s.x * s.mean - s.dp * px_run + s.y - of_run(pw, run));
          const at::Tensor ds = s.p * (s.dp - s.mean), u = times(s.p * (s.x - px_run), s.kept);
          of_run(gq, run).add_((at::matmul(z, s.k) + at::matmul(ds, s.b)) * ring->scale);
          of_run(gg, run).add_(at::matmul(u, s.v) + at::matmul(times(s.p, s.kept), s.c));
          sums[0] += summed(
              at::matmul(z.transpose(-2, -1), s.q) + at::matmul(ds.transpose(-2, -1), s.a), repeat);
          sums[1] += summed(at::matmul(u.transpose(-2, -1), s.g), repeat);
          if (masked) add_to_columns(gb, z, keys);
        }
        passing.wait();
        if (step + 1 < round.ranks) held.swap(next);
        if (round.ranks > 1) {
          round.pass(sums, arriving, following).wait();
          sums.swap(arriving);
        }
      }
      const auto own_rows = round.returned({gq, gg});
      result[0] = given(own_rows[0], ring->query, q.scalar_type());
      result[1] = given(sums[0], ring->key_gradient, saved[1].scalar_type());
      result[2] = given(sums[1], ring->value_gradient, saved[2].scalar_type());
      result[3] = given(own_rows[1], ring->out, saved[3].scalar_type());
      if (masked) result[4] = given(gb, ring->mask_gradient, bias.scalar_type());
    }
    if (!at::GradMode::is_enabled()) return result;
    for (at::Tensor& t : result) {
      if (t.defined())
        t = NoThirdDerivative::apply(t, saved[0], saved[1], saved[2], saved[3],
                                     if_defined(saved[4]), if_defined(of_dq), if_defined(of_dk),
                                     if_defined(of_dv), if_defined(of_db));
    }
    return result;
  }
};

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const std::optional<at::Tensor>& given_mask,
                            const c10::intrusive_ptr<Ring>& ring) {
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    const LocalCallGuard guard;
    const at::Tensor q = meta_of(query)->local,
                     bias = mask.defined() ? meta_of(mask)->local : at::Tensor();
    const Round round(*ring, at::toOpMathType(q.scalar_type()));
    const at::Tensor scaled = round.dealt({q.to(round.type).mul(ring->scale)})[0];
    std::vector<at::Tensor> held = {meta_of(key)->local, meta_of(value)->local}, next;
    Shape rows = scaled.sizes().vec(), result = rows;
    rows.back() = 1;
    result.back() = ring->value.shape().back();
    at::Tensor top = at::full(rows, -kInfinity, scaled.options()),
               sum = at::zeros(rows, scaled.options()), out = at::zeros(result, scaled.options());
    for (int step = 0; step < round.ranks; ++step) {
      Request passing;
      if (step + 1 < round.ranks)
        passing = round.pass(held, next, round.columns(round.owner(step + 1)).size());
      const Interval keys = round.columns(round.owner(step));
      for (const Run& run : round.runs) {
        if (round.nothing(keys, run)) continue;
        const at::Tensor s = round.scores(of_run(scaled, run), held[0], bias, keys, run);
        const at::Tensor top_run = of_run(top, run);
        const at::Tensor higher = at::maximum(top_run, s.amax({-1}, true));
        const at::Tensor finite = at::where(higher.eq(-kInfinity), at::zeros_like(higher), higher);
        const at::Tensor e = (s - finite).exp(), before = (top_run - finite).exp();
        of_run(sum, run).mul_(before).add_(e.sum({-1}, true));
        of_run(out, run).mul_(before).add_(at::matmul(
            times(e, round.kept(e, keys, run)), repeated(held[1].to(round.type), ring->repeat)));
        top_run.copy_(higher);
      }
      passing.wait();
      if (step + 1 < round.ranks) held.swap(next);
    }
    // A query whose keys are all masked gives zeros.
    const at::Tensor none = sum.eq(0), divisor = at::where(none, at::ones_like(sum), sum);
    const auto own =
        round.returned({(out / divisor).to(q.scalar_type()),
                        at::where(none, at::full_like(sum, kInfinity), top + divisor.log())});
    out = own[0];
    const at::Tensor level = own[1];
    const at::Tensor wrapped =
        wrap_fresh(out, make_layout(ring->out, out.scalar_type(), out.device()));
    ctx->saved_data["ring"] = c10::IValue::make_capsule(ring);
    ctx->saved_data["mask"] = mask.defined();
    ctx->saved_data["mask gradient"] = mask.defined() && mask.requires_grad();
    ctx->save_for_backward({query, key, value, mask, wrapped, level});
    return wrapped;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list result(5);
    if (!gradients[0].defined()) return result;
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(ctx->saved_data["ring"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    const at::Tensor placed = redistribute(sharded_gradient(gradients[0], ring->out), ring->out);
    at::Tensor mean;
    {
      const at::NoGradGuard no_grad;
      const LocalCallGuard guard;
      const auto type = at::toOpMathType(saved[0].scalar_type());
      mean = (local_of(placed).to(type) * local_of(saved[4]).to(type)).sum({-1}, true);
    }
    const variable_list all =
        RingGradient::apply(saved[0], saved[1], saved[2], placed, if_defined(saved[3]), mean,
                            saved[5], ctx->saved_data["mask gradient"].toBool(), ring);
    std::copy(all.begin(), all.end(), result.begin());
    return result;
  }
};

bool shards_sequence(const at::Tensor& t) {
  const ShardMeta* meta = meta_of(t);
  if (!meta || t.dim() < 3) return false;
  for (const int a : meta->spec().dim(static_cast<int>(t.dim()) - 2).axes) {
    if (context_of(meta->spec())->sizes[a] > 1) return true;
  }
  return false;
}

// The ring's layout; nullptr if libtorch's own composite is to be used.
c10::intrusive_ptr<Ring> plan_ring(const ShardSpec& q, const ShardSpec& k, const ShardSpec& v,
                                   const ShardSpec& mask, bool causal, double scale, bool grouped) {
  const int n = q.dims(), sequence = n - 2;
  if (k.dims() != n || v.dims() != n) return {};
  for (int d = 0; d < n - 2; ++d) {
    const bool heads =
        grouped && d == n - 3 && k.shape()[d] > 0 && q.shape()[d] % k.shape()[d] == 0;
    if (k.shape()[d] != v.shape()[d] || (k.shape()[d] != q.shape()[d] && !heads)) return {};
  }
  if (k.shape()[sequence] != v.shape()[sequence] || q.shape()[n - 1] != k.shape()[n - 1]) return {};
  auto ring = c10::make_intrusive<Ring>();
  ring->context = context_of(q);
  ring->causal = causal;
  ring->scale = scale;
  if (grouped && n >= 3) ring->repeat = q.shape()[n - 3] / k.shape()[n - 3];
  const int axes = q.mesh_dims();
  std::vector<Placement> of_query(axes), of_key(axes);
  std::vector<bool> whole_keys(axes, false);  // axes that shard queries, but not keys
  for (int a = 0; a < axes; ++a) {
    if (k.placements()[a].is_shard(sequence) || v.placements()[a].is_shard(sequence)) {
      of_query[a] = of_key[a] = Shard(sequence);
      ring->axes.push_back(a);
    } else if (q.placements()[a].is_shard(sequence)) {
      of_query[a] = Shard(sequence);
      whole_keys[a] = true;
    } else {
      for (const ShardSpec* s : {&q, &k, &v}) {
        const Placement p = s->placements()[a];
        if (!p.is_shard() || p.dim >= sequence || q.shape()[p.dim] != k.shape()[p.dim]) continue;
        of_query[a] = of_key[a] = p;
        break;
      }
    }
  }
  const auto& context = ring->context;
  std::vector<const DimSharding*> query_parts(n), key_parts(n);
  const auto first_that_fits = [&](int d, const std::vector<const ShardSpec*>& all,
                                   const std::vector<Placement>& placements) {
    std::vector<int> wanted;
    for (int a = 0; a < axes; ++a) {
      if (placements[a].is_shard(d)) wanted.push_back(a);
    }
    for (const ShardSpec* s : all) {
      if (s->dim(d).axes == wanted) return &s->dim(d);
    }
    return static_cast<const DimSharding*>(nullptr);
  };
  for (int d = 0; d < n; ++d) {
    query_parts[d] = first_that_fits(d,
                                     d < sequence ? std::vector<const ShardSpec*>{&q, &k, &v}
                                                  : std::vector<const ShardSpec*>{&q},
                                     of_query);
    key_parts[d] = d < sequence ? query_parts[d] : first_that_fits(d, {&k, &v}, of_key);
  }
  ring->query = placed(context, q.shape(), of_query, query_parts);
  ring->key = placed(context, k.shape(), of_key, key_parts);
  ring->value = placed(context, v.shape(), of_key, key_parts);
  Shape out = q.shape();
  out.back() = v.shape().back();
  std::vector<const DimSharding*> out_parts;
  for (int d = 0; d < n; ++d) out_parts.push_back(&ring->query.dim(d));
  ring->out = placed(context, out, of_query, out_parts);
  auto key_gradient = of_key;
  for (int a = 0; a < axes; ++a) {
    if (whole_keys[a]) key_gradient[a] = Partial();
  }
  ring->key_gradient = ring->key.with_placements(key_gradient);
  ring->value_gradient = ring->value.with_placements(key_gradient);
  if (mask) {
    const int m = mask.dims();
    if (m > n || m < 2 || (mask.shape()[m - 1] != 1 && mask.shape()[m - 1] != k.shape()[sequence]))
      return {};
    std::vector<Placement> of_mask(axes), of_gradient(axes);
    std::vector<const DimSharding*> mask_parts(m);
    for (int a = 0; a < axes; ++a) {
      if (!of_query[a].is_shard()) continue;
      const int d = of_query[a].dim - (n - m);
      const bool sharded = d >= 0 && mask.shape()[d] != 1;
      of_mask[a] = sharded ? Shard(d) : Replicate();
      of_gradient[a] = sharded ? Shard(d) : Partial();
    }
    for (int d = 0; d < m - 1; ++d) {
      const std::int64_t extent = mask.shape()[d];
      if (extent != 1 && extent != q.shape()[d + n - m]) return {};
      mask_parts[d] = &ring->query.dim(d + n - m);
      // The axes are the same in both, but the dims are not.
    }
    ring->mask = placed(context, mask.shape(), of_mask, mask_parts);
    ring->mask_gradient = placed(context, mask.shape(), of_gradient, mask_parts);
  }
  return ring;
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  const bool has_mask = attn_mask.has_value() && attn_mask->defined();
  const auto plain = [&] {
    return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p,
                                                    is_causal, scale, enable_gqa);
  };
  const bool spread = shards_sequence(query) || shards_sequence(key) || shards_sequence(value);
  // Plain libtorch says what is wrong with a probability.
  if (!spread || !(dropout_p >= 0 && dropout_p <= 1) || (has_mask && is_causal) ||
      !at::isFloatingType(query.scalar_type()))
    return plain();
  std::shared_ptr<MeshContext> context;
  for (const at::Tensor* t : {&query, &key, &value}) {
    if (const ShardMeta* meta = meta_of(*t)) context = context_of(meta->spec());
  }
  const auto sharded = [&](const at::Tensor& t) { return meta_of(t) ? t : promote(t, context); };
  const at::Tensor q = sharded(query), k = sharded(key), v = sharded(value),
                   mask = has_mask ? sharded(*attn_mask) : at::Tensor();
  const double by = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(q.size(-1)));
  const auto ring = plan_ring(spec(q), spec(k), spec(v), has_mask ? spec(mask) : ShardSpec(),
                              is_causal, by, enable_gqa);
  if (!ring) return plain();
  std::vector<ImplicitMove> moves = {{"query", spec(q), ring->query, q.element_size()},
                                     {"key", spec(k), ring->key, k.element_size()},
                                     {"value", spec(v), ring->value, v.element_size()}};
  if (has_mask) moves.push_back({"attn_mask", spec(mask), ring->mask, mask.element_size()});
  check_implicit_moves("aten::scaled_dot_product_attention", moves, *context);
  ring->dropout = dropout_p;
  // Where all is dropped libtorch draws nothing.
  if (dropout_p > 0 && dropout_p < 1) ring->draw = next_draw(*context);
  return RingAttention::apply(
      redistribute(q, ring->query), redistribute(k, ring->key), redistribute(v, ring->value),
      has_mask ? std::optional<at::Tensor>(redistribute(mask, ring->mask)) : std::nullopt, ring);
}

const bool registered = [] {
  register_decomposition("scaled_dot_product_attention", attention);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::ring_attention_rules
