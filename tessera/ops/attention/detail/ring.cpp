#include "tessera/ops/attention/detail/ring.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#include "tessera/ops/attention/detail/straight.h"

namespace tessera::detail::ring_attention_rules {
namespace {

// From this many queries per rank on halves of them are handed on to balance a causal mask.
constexpr std::int64_t kBalancedFromQueries = 64;

}  // namespace

at::Tensor repeated(const at::Tensor& t, std::int64_t times) {
  return times == 1 ? t : t.repeat_interleave(times, t.dim() - 3);
}

at::Tensor of_columns(const at::Tensor& mask, const Interval& keys) {
  return mask.size(-1) == 1 ? mask : mask.narrow(-1, keys.begin, keys.size());
}

Round::Round(const Ring& r, at::ScalarType t)
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
  if (r.causal && !r.mask && r.documents.empty() && ranks > 1 && rows.axes == r.axes &&
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

Interval Round::columns(int rank) const {
  return parts ? parts->interval(rank) : Interval{0, ring.key.shape()[ring.sequence()]};
}

std::vector<Block> Round::blocks(const Interval& keys) const {
  if (!ring.documents.empty()) return blocks_of_documents(*this, keys);
  std::vector<Block> all;
  for (const Run& run : runs)
    if (!keys.empty() && run.count > 0 && !(ring.causal && keys.begin >= run.begin + run.count))
      all.push_back({run, keys});
  return all;
}

Request Round::pass(const std::vector<at::Tensor>& mine, std::vector<at::Tensor>& next,
                    std::int64_t rows, int to, int from, std::string_view name) const {
  std::vector<Message> messages;
  next.clear();
  for (const at::Tensor& t : mine) {
    if (to >= 0) messages.push_back({Message::Kind::send, t.contiguous(), to});
    if (from < 0) continue;
    Shape shape = t.sizes().vec();
    shape[shape.size() - 2] = rows;
    next.push_back(at::empty(shape, t.options().memory_format(c10::nullopt)));
    messages.push_back({Message::Kind::receive, next.back(), from});
  }
  return group.started().exchange(messages, {.name = name});
}

std::vector<at::Tensor> Round::exchanged(const std::vector<at::Tensor>& mine,
                                         std::int64_t rows) const {
  if (mirror == me) return mine;
  std::vector<at::Tensor> halves, theirs, all;
  for (const at::Tensor& t : mine) halves.push_back(t.narrow(-2, first, t.size(-2) - first));
  pass(halves, theirs, rows, mirror, mirror, "ring attention, halves").wait();
  for (std::size_t i = 0; i < mine.size(); ++i)
    all.push_back(at::cat({mine[i].narrow(-2, 0, first), theirs[i]}, -2));
  return all;
}

at::Tensor Round::scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                         const Interval& keys, const Run& run) const {
  at::Tensor s = at::matmul(q, repeated(k.to(type), ring.repeat).transpose(-2, -1));
  if (mask.defined()) {
    const at::Tensor part = of_columns(mask, keys);
    s = part.scalar_type() == at::kBool ? s.masked_fill(part.logical_not(), -kInfinity)
                                        : s + part.to(type);
  }
  if (ring.causal && keys.end - 1 > run.begin) {
    const at::Tensor row =
                         at::arange(run.begin, run.begin + run.count, s.options().dtype(at::kLong))
                             .unsqueeze(-1),
                     column = at::arange(keys.begin, keys.end, s.options().dtype(at::kLong));
    s = s.masked_fill(column.gt(row), -kInfinity);
  }
  return s;
}

at::Tensor Round::kept(const at::Tensor& p, const Interval& keys, const Run& run) const {
  if (ring.dropout == 0) return {};
  if (ring.dropout == 1) return at::zeros_like(p);
  Shape global = ring.query.shape(), offset = ring.query.local_offset();
  global.back() = ring.key.shape()[ring.sequence()];
  offset[ring.sequence()] = run.begin;
  offset.back() = keys.begin;
  offset[0] += std::max<std::int64_t>(run.row, 0);
  return dropout_mask(ring.draw, global, offset, p.sizes().vec(), ring.dropout)
      .to(p.options())
      .div(1 - ring.dropout);
}

namespace {

/// How the first of the specs that shards dim d over the axes of the placements shards it.
const DimSharding* first_that_fits(int d, const std::vector<const ShardSpec*>& all,
                                   const std::vector<Placement>& placements) {
  const auto wanted = axes_where(placements, [&](const Placement& p) { return p.is_shard(d); });
  for (const ShardSpec* s : all)
    if (s->dim(d).axes == wanted) return &s->dim(d);
  return nullptr;
}

/// Places the mask as the queries and its gradient. False if its shape does not fit them.
bool place_mask(Ring& ring, const ShardSpec& mask, const std::vector<Placement>& of_query) {
  const int m = mask.dims(), n = ring.query.dims(), axes = ring.query.mesh_dims();
  const std::int64_t keys = ring.key.shape()[n - 2];
  if (m > n || m < 2 || (mask.shape()[m - 1] != 1 && mask.shape()[m - 1] != keys)) return false;
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
    if (extent != 1 && extent != ring.query.shape()[d + n - m]) return false;
    mask_parts[d] = &ring.query.dim(d + n - m);
    // The axes are the same in both, but the dims are not.
  }
  ring.mask = make_spec(ring.context, mask.shape(), of_mask, mask_parts);
  ring.mask_gradient = make_spec(ring.context, mask.shape(), of_gradient, mask_parts);
  return true;
}

/// Where each rank has whole groups of the heads of queries that share a head of keys: how the
/// latter are then sharded.
std::optional<DimSharding> groups_of(const ShardSpec& q, const ShardSpec& k, const ShardSpec& v,
                                     std::int64_t repeat) {
  const int sequence = q.dims() - 2;
  if (repeat == 1 || !q.is_sharded(sequence - 1)) return std::nullopt;
  const DimSharding& heads = q.dim(sequence - 1);
  for (const int a : heads.axes)
    if (k.placements()[a].is_shard(sequence) || v.placements()[a].is_shard(sequence))
      return std::nullopt;
  auto sizes = heads.partition.sizes();
  for (std::int64_t& n : sizes) {
    if (n % repeat != 0) return std::nullopt;
    n /= repeat;
  }
  return DimSharding{heads.axes, Partition(sizes)};
}

bool shapes_fit(const Shape& q, const Shape& k, const Shape& v, bool grouped) {
  const std::size_t n = q.size();
  if (k.size() != n || v.size() != n) return false;
  for (std::size_t d = 0; d + 2 < n; ++d) {
    const bool heads = grouped && d + 3 == n && k[d] > 0 && q[d] > 0 && q[d] % k[d] == 0;
    if (k[d] != v[d] || (k[d] != q[d] && !heads)) return false;
  }
  return k[n - 2] == v[n - 2] && q[n - 1] == k[n - 1];
}

/// The first of the specs whose sequence is sharded, or the first.
const ShardSpec& sequence_of(const std::vector<const ShardSpec*>& all) {
  for (const ShardSpec* s : all)
    if (s->is_sharded(s->dims() - 2)) return *s;
  return *all[0];
}

/// `spec` with its sequence cut as that of `like`.
ShardSpec cut_as(const ShardSpec& spec, const ShardSpec& like) {
  const int n = spec.dims(), sequence = n - 2;
  auto placements = spec.placements();
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (like.placements()[a].is_shard(sequence))
      placements[a] = Shard(sequence);
    else if (placements[a].is_shard(sequence))
      placements[a] = Replicate();
  std::vector<const DimSharding*> parts(n);
  for (int d = 0; d < n; ++d) parts[d] = &(d == sequence ? like : spec).dim(d);
  return make_spec(context_of(spec), spec.shape(), placements, parts);
}

/// By axis. The sequence is sharded where that of queries, keys or values is, other dims where all
/// have them, or whole groups of heads.
struct Placed {
  std::vector<Placement> query, key, key_gradient;
};
Placed place_all(const ShardSpec& q, const ShardSpec& k, const ShardSpec& v, bool groups) {
  const int sequence = q.dims() - 2, axes = q.mesh_dims();
  Placed to{std::vector<Placement>(axes), std::vector<Placement>(axes), {}};
  to.key_gradient.resize(axes);
  for (int a = 0; a < axes; ++a) {
    if (k.placements()[a].is_shard(sequence) || v.placements()[a].is_shard(sequence)) {
      to.query[a] = to.key[a] = Shard(sequence);
    } else if (q.placements()[a].is_shard(sequence)) {
      to.query[a] = Shard(sequence);
    } else {
      for (const ShardSpec* s : {&q, &k, &v}) {
        const Placement p = s->placements()[a];
        if (!p.is_shard() || p.dim >= sequence) continue;
        const bool in_groups = groups && s == &q && p.dim == sequence - 1;
        if (q.shape()[p.dim] != k.shape()[p.dim] && !in_groups) continue;
        to.query[a] = to.key[a] = p;
        break;
      }
    }
    // Queries are sharded, but not keys: each rank has a summand.
    const bool whole_keys = to.query[a].is_shard(sequence) && !to.key[a].is_shard();
    to.key_gradient[a] = whole_keys ? Partial() : to.key[a];
  }
  return to;
}

}  // namespace

std::shared_ptr<Ring> plan_ring(const ShardSpec& of_q, const ShardSpec& of_k, const ShardSpec& of_v,
                                const ShardSpec& mask, const AttentionCall& call) {
  ShardSpec q = of_q, k = of_k, v = of_v;
  if (!call.documents.empty()) {
    const ShardSpec& cut = sequence_of({&of_q, &of_k, &of_v});
    for (ShardSpec* s : {&q, &k, &v}) *s = cut_as(*s, cut);
  }
  if (!shapes_fit(q.shape(), k.shape(), v.shape(), call.grouped)) return {};
  const int n = q.dims(), sequence = n - 2;
  auto ring = std::make_shared<Ring>();
  ring->context = context_of(q);
  ring->causal = call.causal;
  ring->scale = call.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.shape()[n - 1])));
  ring->dropout = call.dropout;
  ring->documents = call.documents;
  if (call.grouped && n >= 3 && k.shape()[n - 3] > 0)
    ring->repeat = q.shape()[n - 3] / k.shape()[n - 3];
  const auto groups = groups_of(q, k, v, ring->repeat);
  const auto [of_query, of_key, key_gradient] = place_all(q, k, v, groups.has_value());
  ring->axes = axes_where(of_key, [&](const Placement& p) { return p.is_shard(sequence); });
  const auto& context = ring->context;
  std::vector<const DimSharding*> query_parts(n), key_parts(n);
  for (int d = 0; d < n; ++d) {
    query_parts[d] = first_that_fits(d,
                                     d < sequence ? std::vector<const ShardSpec*>{&q, &k, &v}
                                                  : std::vector<const ShardSpec*>{&q},
                                     of_query);
    key_parts[d] = d < sequence ? query_parts[d] : first_that_fits(d, {&k, &v}, of_key);
  }
  if (groups) key_parts[sequence - 1] = &*groups;
  ring->query = make_spec(context, q.shape(), of_query, query_parts);
  ring->key = make_spec(context, k.shape(), of_key, key_parts);
  ring->value = make_spec(context, v.shape(), of_key, key_parts);
  Shape out = q.shape();
  out.back() = v.shape().back();
  std::vector<const DimSharding*> out_parts;
  for (int d = 0; d < n; ++d) out_parts.push_back(&ring->query.dim(d));
  ring->out = make_spec(context, out, of_query, out_parts);
  ring->key_gradient = ring->key.with_placements(key_gradient);
  ring->value_gradient = ring->value.with_placements(key_gradient);
  if (mask && !place_mask(*ring, mask, of_query)) return {};
  return ring;
}

}  // namespace tessera::detail::ring_attention_rules
