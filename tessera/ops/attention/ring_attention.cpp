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
// draws by global index, so that it is the same for any number of ranks. Among packed documents
// (packed.cpp) there is no ring: few ranks see another's keys, so those go straight to them.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "tessera/ops/attention/detail/ring.h"
#include "tessera/ops/attention/detail/straight.h"
#include "tessera/ops/random/detail/draws.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::ring_attention_rules {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
        "attention over a sharded sequence has no third derivative. "
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

using Tensors = std::vector<at::Tensor>;

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

void add_to_columns(const at::Tensor& mask, const at::Tensor& scores, const Interval& keys) {
  const at::Tensor part = of_columns(mask, keys);
  part.add_(scores.sum_to_size(part.sizes()));
}

// The queries of a run: rows of any tensor of [..., queries, columns].
at::Tensor of_run(const at::Tensor& t, const Run& run) {
  const at::Tensor rows = t.narrow(-2, run.at, run.count);
  return run.row < 0 ? rows : rows.narrow(0, run.row, 1);
}

// All that is computed with keys that are held: `body` gets what is held of the keys of a block,
// those keys, a run of this rank's queries that sees some of them, and the part of the sums;
// `after` how many of all blocks are done.
template <class Body, class After>
void compute(const Round& round, const Tensors& held, const Tensors& sums, const Interval& keys,
             const Body& body, const After& after) {
  try {
    const auto blocks = round.blocks(keys);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const Block& block = blocks[i];
      const Run rows{block.keys.begin - keys.begin, block.keys.size(), block.keys.begin,
                     block.run.row};
      const auto of_block = [&](const Tensors& all) {
        return mapped(all, [&](const at::Tensor& t) { return of_run(t, rows); });
      };
      body(of_block(held), block.keys, block.run, of_block(sums));
      after(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(blocks.size()));
    }
  } catch (...) {  // while messages wait here, so that the other ranks do not
    rethrow_to_all("attention over ranks", *context_of(round.ring.query));
  }
}

// The same among documents, without a ring.
template <class Body>
void go_straight(const Round& round, const Tensors& own, const Tensors& sums, const Body& body) {
  Courier courier(round, own, sums);
  Tensors part;
  for (const Visit& visit : visits(round, round.me)) {
    courier.until(visit.begin, part);
    const bool mine = visit.owner == round.me;
    part = sums;
    for (at::Tensor& t : part) {
      if (mine) break;
      Shape shape = t.sizes().vec();
      shape[shape.size() - 2] = visit.keys.size();
      t = at::zeros(shape, t.options());
    }
    compute(round, mine ? own : courier.arrived(), part, visit.keys, body,
            [&](std::int64_t done, std::int64_t all) {
              courier.until(visit.begin + (visit.end - visit.begin) * done / all, part);
            });
  }
  courier.finish(part);
}

// One way round the ring: what is `held` of each shard of the keys is computed with while the next
// shard arrives. `sums` (or none) belong to the keys that are held: they are passed to the rank
// before this one, which computes with these keys next, and are back after the last step.
template <class Body>
void go_round(const Round& round, Tensors held, Tensors* sums, const Body& body) {
  if (!round.ring.documents.empty())
    return go_straight(round, held, sums ? *sums : Tensors(), body);
  const int before = round.owner(round.ranks - 1), after = round.owner(1);
  Tensors next, arriving;
  for (int step = 0; step < round.ranks; ++step) {
    const bool last = step + 1 == round.ranks;
    const std::int64_t following = round.columns(round.owner(step + 1)).size();
    Request passing;
    if (!last) passing = round.pass(held, next, following, before, after);
    compute(round, held, sums ? *sums : Tensors(), round.columns(round.owner(step)), body,
            [](std::int64_t, std::int64_t) {});
    passing.wait();
    if (!last) held.swap(next);
    if (!sums || round.ranks == 1) continue;
    round.pass(*sums, arriving, following, before, after).wait();
    sums->swap(arriving);
  }
}

// A run of the queries with one shard of the keys: what both ways round compute of it for the
// derivative of RingGradient.
struct Products {
  // `rows`: the scaled queries, a, g, mean and level; `held`: k, v, b and c; `e` or none.
  Products(const Round& round, const Tensors& rows, const at::Tensor& bias, const at::Tensor& e,
           const Tensors& held, const Interval& keys, const Run& run)
      : q(of_run(rows[0], run)),
        a(of_run(rows[1], run)),
        g(of_run(rows[2], run)),
        mean(of_run(rows[3], run)),
        k(repeated(held[0], round.ring.repeat)),
        v(repeated(held[1], round.ring.repeat)),
        b(repeated(held[2], round.ring.repeat)),
        c(repeated(held[3], round.ring.repeat)),
        p((round.scores(q, held[0], bias, keys, run) - of_run(rows[4], run)).exp()),
        kept(round.kept(p, keys, run)),
        dp(times(at::matmul(g, v.transpose(-2, -1)), kept)),
        x(at::matmul(a, k.transpose(-2, -1)) + at::matmul(q, b.transpose(-2, -1))),
        y(times(at::matmul(g, c.transpose(-2, -1)), kept)) {
    if (e.defined()) x = x + of_columns(e, keys);
  }
  at::Tensor q, a, g, mean, k, v, b, c, p, kept, dp, x, y;
};

// The gradients of query, key, value and mask, as a function of these and of the result's gradient.
// With P the softmax, M what dropout keeps (over the probability that it does), g the result's
// gradient:  dP = M (g v^T),  dS = P (dP - mean),  mean = the sum of P dP over the keys.
struct RingGradient : torch::autograd::Function<RingGradient> {
  // `mean`, `level`: plain, of this rank's queries; not differentiated through, for they follow
  // from the others.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& gradient,
                               const std::optional<at::Tensor>& mask, const at::Tensor& mean,
                               const at::Tensor& level, bool wants_mask, const RingPtr& ring) {
    ctx->set_materialize_grads(false);
    carry(ctx, ring, "ring");
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
    std::vector<at::Tensor> sums = {at::zeros(k.sizes(), k.options().dtype(type)),
                                    at::zeros(v.sizes(), v.options().dtype(type))};
    at::Tensor dq = at::zeros_like(scaled), db;
    if (wants_mask) db = at::zeros(bias.sizes(), scaled.options());
    go_round(
        round, {k, v}, &sums,
        [&](const Tensors& held, const Interval& keys, const Run& run, const Tensors& into) {
          const at::Tensor q_run = of_run(scaled, run), g_run = of_run(g, run);
          const at::Tensor p =
              (round.scores(q_run, held[0], bias, keys, run) - of_run(rows[3], run)).exp();
          const at::Tensor kept = round.kept(p, keys, run);
          into[1].add_(summed(at::matmul(times(p, kept).transpose(-2, -1), g_run), ring->repeat));
          const at::Tensor dp = times(
              at::matmul(g_run, repeated(held[1].to(type), ring->repeat).transpose(-2, -1)), kept);
          const at::Tensor ds = p * (dp - of_run(rows[2], run));
          of_run(dq, run).add_(at::matmul(ds, repeated(held[0].to(type), ring->repeat)),
                               ring->scale);
          into[0].add_(summed(at::matmul(ds.transpose(-2, -1), q_run), ring->repeat));
          if (wants_mask) add_to_columns(db, ds, keys);
        });
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
  static variable_list derivatives(const Ring& ring, const variable_list& saved,
                                   const Tensors& gradients, bool masked) {
    const at::NoGradGuard no_grad;
    const LocalCallGuard guard;
    const at::Tensor q = local_of(saved[0]),
                     bias = saved[4].defined() ? local_of(saved[4]) : at::Tensor();
    const Round round(ring, at::toOpMathType(q.scalar_type()));
    const auto type = round.type;
    const at::Tensor k = local_of(saved[1]).to(type), v = local_of(saved[2]).to(type);
    const auto or_zeros = [&](const at::Tensor& t, const at::Tensor& like) {
      return t.defined() ? local_of(t).to(type) : at::zeros(like.sizes(), like.options());
    };
    const at::Tensor own = q.to(type).mul(ring.scale),
                     e = gradients[3].defined() ? local_of(gradients[3]).to(type) : at::Tensor();
    const auto rows = round.dealt({own, or_zeros(gradients[0], own).mul(ring.scale),
                                   local_of(saved[3]).to(type), saved[5], saved[6]});
    const Tensors own_keys = {k, v, or_zeros(gradients[1], k), or_zeros(gradients[2], v)};
    const at::Tensor& mean = rows[3];
    // Sums over all keys of P x, P x dP and P y.
    at::Tensor px = at::zeros_like(mean), pxd = at::zeros_like(mean), py = at::zeros_like(mean);
    go_round(round, own_keys, nullptr,
             [&](const Tensors& held, const Interval& keys, const Run& run, const Tensors&) {
               const Products s(round, rows, bias, e, held, keys, run);
               of_run(px, run).add_((s.p * s.x).sum({-1}, true));
               of_run(pxd, run).add_((s.p * s.x * s.dp).sum({-1}, true));
               of_run(py, run).add_((s.p * s.y).sum({-1}, true));
             });
    const at::Tensor pw = pxd - px * mean * 2 + py;
    Tensors sums = {at::zeros_like(k), at::zeros_like(v)};
    at::Tensor gq = at::zeros_like(rows[0]), gg = at::zeros_like(rows[2]), gb;
    if (masked) gb = at::zeros(bias.sizes(), gq.options());
    go_round(round, own_keys, &sums,
             [&](const Tensors& held, const Interval& keys, const Run& run, const Tensors& into) {
               const Products s(round, rows, bias, e, held, keys, run);
               const at::Tensor px_run = of_run(px, run);
               const at::Tensor z =
                   s.p * (s.x * s.dp - s.x * s.mean - s.dp * px_run + s.y - of_run(pw, run));
               const at::Tensor ds = s.p * (s.dp - s.mean), u = times(s.p * (s.x - px_run), s.kept);
               of_run(gq, run).add_((at::matmul(z, s.k) + at::matmul(ds, s.b)) * ring.scale);
               of_run(gg, run).add_(at::matmul(u, s.v) + at::matmul(times(s.p, s.kept), s.c));
               into[0].add_(summed(
                   at::matmul(z.transpose(-2, -1), s.q) + at::matmul(ds.transpose(-2, -1), s.a),
                   ring.repeat));
               into[1].add_(summed(at::matmul(u.transpose(-2, -1), s.g), ring.repeat));
               if (masked) add_to_columns(gb, z, keys);
             });
    const auto own_rows = round.returned({gq, gg});
    variable_list result(9);
    result[0] = given(own_rows[0], ring.query, q.scalar_type());
    result[1] = given(sums[0], ring.key_gradient, saved[1].scalar_type());
    result[2] = given(sums[1], ring.value_gradient, saved[2].scalar_type());
    result[3] = given(own_rows[1], ring.out, saved[3].scalar_type());
    if (masked) result[4] = given(gb, ring.mask_gradient, bias.scalar_type());
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto ring = carried<RingPtr>(ctx, "ring");
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
    const bool masked = saved[4].defined() && ctx->needs_input_grad(4);
    variable_list result = derivatives(*ring, saved, {of_dq, of_dk, of_dv, of_db}, masked);
    if (!at::GradMode::is_enabled()) return result;
    for (at::Tensor& t : result)
      if (t.defined())
        t = NoThirdDerivative::apply(t, saved[0], saved[1], saved[2], saved[3],
                                     if_defined(saved[4]), if_defined(of_dq), if_defined(of_dk),
                                     if_defined(of_dv), if_defined(of_db));
    return result;
  }
};

// The softmax of each query over the keys that it has met, and the values weighted by it: both
// before they are divided by `sum`, and above the highest score so far.
struct RunningSoftmax {
  RunningSoftmax(const at::Tensor& queries, std::int64_t width)
      : options(queries.options()), rows(queries.sizes().vec()), results(rows) {
    rows.back() = 1;
    results.back() = width;
  }

  void begin() {
    if (top.defined()) return;
    top = at::full(rows, least(), options);
    sum = at::zeros(rows, options);
    out = at::zeros(results, options);
  }

  // `scores`, which are lost, of the queries of `run` to keys that they have not met;
  // `values_of(weights)` are those keys' values times `weights`.
  template <class ValuesOf>
  void add(at::Tensor scores, const Run& run, const ValuesOf& values_of) {
    at::Tensor highest = scores.amax({-1}, true);
    const bool first = !top.defined() && run.row < 0 && run.count == rows[rows.size() - 2];
    if (!first) begin();
    highest = first ? highest.clamp_min_(least()) : at::maximum(of_run(top, run), highest);
    const at::Tensor e = scores.sub_(highest).exp_(), here = e.sum({-1}, true),
                     values = values_of(e);
    if (first) {
      top = highest;
      sum = here;
      out = values;
      return;
    }
    at::Tensor top_run = of_run(top, run), sum_run = of_run(sum, run), out_run = of_run(out, run);
    const at::Tensor before = (top_run - highest).exp_();
    at::addcmul_out(sum_run, here, sum_run, before);
    at::addcmul_out(out_run, values, out_run, before);
    top_run.copy_(highest);
  }

  // The highest score of queries that have met no key: of infinities the difference is no number.
  double least() const {
    return options.dtype() == at::kDouble ? std::numeric_limits<double>::lowest()
                                          : std::numeric_limits<float>::lowest();
  }

  at::TensorOptions options;
  Shape rows, results;
  at::Tensor top, sum, out;
};

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const std::optional<at::Tensor>& given_mask,
                            const RingPtr& ring) {
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    const LocalCallGuard guard;
    const at::Tensor q = meta_of(query)->local,
                     bias = mask.defined() ? meta_of(mask)->local : at::Tensor();
    const Round round(*ring, at::toOpMathType(q.scalar_type()));
    const at::Tensor scaled = round.dealt({q.to(round.type).mul(ring->scale)})[0];
    RunningSoftmax softmax(scaled, ring->value.shape().back());
    const std::vector<at::Tensor> own_keys = {meta_of(key)->local, meta_of(value)->local};
    go_round(round, own_keys, nullptr,
             [&](const Tensors& held, const Interval& keys, const Run& run, const Tensors&) {
               softmax.add(round.scores(of_run(scaled, run), held[0], bias, keys, run), run,
                           [&](const at::Tensor& weights) {
                             return at::matmul(times(weights, round.kept(weights, keys, run)),
                                               repeated(held[1].to(round.type), ring->repeat));
                           });
             });
    softmax.begin();
    at::Tensor &top = softmax.top, &sum = softmax.sum, &out = softmax.out;
    // A query whose keys are all masked gives zeros.
    const at::Tensor none = sum.eq(0);
    sum.masked_fill_(none, 1);
    const auto own = round.returned(
        {(out / sum).to(q.scalar_type()), top.add_(sum.log()).masked_fill_(none, kInfinity)});
    out = own[0];
    const at::Tensor level = own[1];
    const at::Tensor wrapped =
        wrap_fresh(out, make_layout(ring->out, out.scalar_type(), out.device()));
    carry(ctx, ring, "ring");
    ctx->saved_data["mask gradient"] = mask.defined() && mask.requires_grad();
    ctx->save_for_backward({query, key, value, mask, wrapped, level});
    return wrapped;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list result(5);
    if (!gradients[0].defined()) return result;
    const auto ring = carried<RingPtr>(ctx, "ring");
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
    std::ranges::copy(all, result.begin());
    return result;
  }
};

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  const bool has_mask = attn_mask.has_value() && attn_mask->defined();
  const bool spread = shards_sequence(query) || shards_sequence(key) || shards_sequence(value);
  at::Tensor made;
  // Plain libtorch says what is wrong with a probability, and with dtypes that differ.
  if (spread && query.scalar_type() == key.scalar_type() &&
      query.scalar_type() == value.scalar_type() && dropout_p >= 0 && dropout_p <= 1 &&
      !(has_mask && is_causal) && at::isFloatingType(query.scalar_type()))
    made = on_ring(query, key, value, has_mask ? attn_mask : std::nullopt,
                   {"aten::scaled_dot_product_attention", dropout_p, is_causal, scale, enable_gqa});
  return made.defined()
             ? made
             : at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p,
                                                        is_causal, scale, enable_gqa);
}

const AtStart registered([] { register_decomposition("scaled_dot_product_attention", attention); });

}  // namespace

bool shards_sequence(const at::Tensor& t) {
  const ShardMeta* meta = meta_of(t);
  if (!meta || t.dim() < 3) return false;
  for (const int a : meta->spec().dim(static_cast<int>(t.dim()) - 2).axes)
    if (context_of(meta->spec())->sizes[a] > 1) return true;
  return false;
}

at::Tensor on_ring(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& attn_mask, const AttentionCall& call) {
  std::shared_ptr<MeshContext> context;
  for (const at::Tensor* t : {&query, &key, &value})
    if (const ShardMeta* meta = meta_of(*t)) context = context_of(meta->spec());
  const auto sharded = [&](const at::Tensor& t) { return meta_of(t) ? t : promote(t, context); };
  const at::Tensor q = sharded(query), k = sharded(key), v = sharded(value),
                   mask = attn_mask ? sharded(*attn_mask) : at::Tensor();
  const auto ring =
      plan_ring(spec(q), spec(k), spec(v), attn_mask ? spec(mask) : ShardSpec(), call);
  if (!ring) return {};
  std::vector<ImplicitMove> moves = {{"query", spec(q), ring->query, q.element_size()},
                                     {"key", spec(k), ring->key, k.element_size()},
                                     {"value", spec(v), ring->value, v.element_size()}};
  if (attn_mask) moves.push_back({"attn_mask", spec(mask), ring->mask, mask.element_size()});
  check_implicit_moves(call.name, moves, *context);
  // Where all is dropped libtorch draws nothing.
  if (call.dropout > 0 && call.dropout < 1) ring->draw = next_draw(*context);
  return RingAttention::apply(
      redistribute(q, ring->query), redistribute(k, ring->key), redistribute(v, ring->value),
      attn_mask ? std::optional<at::Tensor>(redistribute(mask, ring->mask)) : std::nullopt, ring);
}

}  // namespace tessera::detail::ring_attention_rules
