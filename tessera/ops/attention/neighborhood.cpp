#include "tessera/ops/attention/neighborhood.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "tessera/base/host_lock.h"
#include "tessera/ops/attention/detail/neighborhood_local.h"
#include "tessera/ops/halo/detail/field_halo.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera {
namespace {

// Number of elements of a rank's queries from which on `automatic` computes the interior first: on
// two cores of one host over MPI the split costs 7 % at 4096 and nothing from here on
// (bench/neighborhood).
constexpr std::int64_t kSplitFromQueryElements = 65536;

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
           const std::vector<Neighborhood>& dims) {
  const auto n = static_cast<std::int64_t>(dims.size());
  if (n < 1 || n > 3)
    throw InvalidArgument("neighborhood_attention was given ", n,
                          " windows; give one per spatial dim, one to three");
  for (const auto& [name, t] :
       {std::pair<const char*, const at::Tensor&>("q", q), {"k", k}, {"v", v}}) {
    if (!t.defined()) throw InvalidArgument("neighborhood_attention was given an undefined ", name);
    if (t.dim() != n + 3)
      throw InvalidArgument("neighborhood_attention with ", n, " windows: ", name, " has shape ",
                            list(t.sizes().vec()), "; it needs batch x ", n,
                            " spatial dims x heads x channels");
    if (t.scalar_type() != q.scalar_type() || !at::isFloatingType(t.scalar_type()))
      throw InvalidArgument("neighborhood_attention: q is of ", c10::toString(q.scalar_type()),
                            ", ", name, " of ", c10::toString(t.scalar_type()),
                            "; give one floating-point type");
    if (t.device() != q.device())
      throw InvalidArgument("neighborhood_attention: q is on ", q.device().str(), ", ", name,
                            " on ", t.device().str());
  }
  if (k.sizes() != q.sizes() || v.sizes().slice(0, n + 2) != q.sizes().slice(0, n + 2))
    throw InvalidArgument("neighborhood_attention: q has shape ", list(q.sizes().vec()), ", k ",
                          list(k.sizes().vec()), ", v ", list(v.sizes().vec()),
                          "; they differ in v's channels at most");
  if (q.size(-1) < 1) throw InvalidArgument("neighborhood_attention: q has no channels");
  for (std::size_t d = 0; d < dims.size(); ++d) {
    const std::int64_t extent = q.size(static_cast<std::int64_t>(d) + 1);
    if (dims[d].kernel < 1 || dims[d].dilation < 1)
      throw InvalidArgument("neighborhood_attention, spatial dim ", d, ": kernel ", dims[d].kernel,
                            ", dilation ", dims[d].dilation, "; give at least 1");
    // not their product, which may overflow
    if (!dims[d].causal && extent > 0 && dims[d].kernel > extent / dims[d].dilation)
      throw InvalidArgument("neighborhood_attention, spatial dim ", d, ": kernel ", dims[d].kernel,
                            " x dilation ", dims[d].dilation, " is more than its extent of ",
                            extent);
  }
}

/// The exchange of a field of keys or values.
Halo halo_of_keys(const ShardSpec& field, const std::vector<Neighborhood>& dims) {
  detail::Key key;
  // interned; the cached exchange keeps it alive
  key.push_back(reinterpret_cast<std::uintptr_t>(field.data().get()));
  for (const Neighborhood& d : dims) {
    key.push_back(static_cast<std::uint64_t>(d.kernel));
    key.push_back(static_cast<std::uint64_t>(d.dilation));
    key.push_back(d.causal);
  }
  return detail::ThreadCache<Halo, struct OfKeys>::find_or_make(std::move(key), [&] {
    const NeededBox needed = [dims, sharding = field.sharding(),
                              shape = field.shape()](int position) {
      Box box = sharding.box(position);
      for (std::size_t d = 0; d < dims.size(); ++d)
        box[d + 1] = detail::seen_keys(dims[d], box[d + 1], shape[d + 1]);
      return box;
    };
    return Halo(field, std::vector<Edge>(static_cast<std::size_t>(field.dims()), Edge::zero),
                needed);
  });
}

Box spatial(const Box& box) { return {box.begin() + 1, box.end() - 2}; }

/// The queries all of whose keys this rank owns: the longest run of them in each dim.
Box interior_of(const std::vector<Neighborhood>& dims, const Box& owned,
                const std::vector<std::int64_t>& shape) {
  Box inner = owned;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    const Interval mine = owned[d + 1];
    Interval best{mine.begin, mine.begin};
    for (std::int64_t q = mine.begin; q < mine.end;) {
      std::int64_t end = q;
      while (end < mine.end &&
             mine.contains(detail::seen_keys(dims[d], {end, end + 1}, shape[d + 1])))
        ++end;
      if (end - q > best.size()) best = {q, end};
      q = end + 1;
    }
    inner[d + 1] = best;
  }
  return inner;
}

/// The queries of one call with the exchange of their keys and values: kept by a node of the graph.
struct Field {
  Halo keys, values;
  Box interior;  // queries that need no halo; without elements: there are none
  bool wait_first = false;
  detail::LocalNeighborhood where;  // of all queries and keys of this rank

  /// Queries that are computed together, and the box of keys that they see.
  struct Piece {
    Box queries, keys;
    detail::Attention attention;
  };
  std::vector<Piece> pieces;  // the interior first, if there is one

  void make_pieces() {
    std::vector<Box> boxes = difference(keys.owned(), interior);
    if (volume(interior) > 0) boxes.insert(boxes.begin(), interior);
    for (const Box& queries : boxes) {
      Box seen = queries;
      for (std::size_t d = 0; d < where.dims.size(); ++d)
        seen[d + 1] = detail::seen_keys(where.dims[d], queries[d + 1], where.extents[d]);
      detail::LocalNeighborhood part = where;
      part.queries = spatial(queries);
      part.keys = spatial(seen);
      pieces.push_back({queries, seen, detail::Attention(std::move(part))});
    }
  }
  /// The box for the values, which may have another number of channels.
  Box of_values(Box box) const {
    box.back() = values.owned().back();
    return box;
  }
};

using FieldPtr = std::shared_ptr<Field>;

struct OnField : torch::autograd::Function<OnField> {
  using Context = torch::autograd::AutogradContext;
  static at::Tensor forward(Context* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const FieldPtr& field) {
    HaloValues of_keys = field->keys.start_exchange(k), of_values = field->values.start_exchange(v);
    if (field->wait_first || volume(field->interior) == 0) {
      of_keys.arrival().wait();
      of_values.arrival().wait();
    }
    auto shape = q.sizes().vec();
    shape.back() = v.size(-1);
    at::Tensor out = at::empty(shape, q.options());
    // For the interior, keys and values are views of the arguments, which are saved as they are, on
    // every rank: a write to them in the meantime is then noticed, and on all ranks.
    const bool split = volume(field->interior) > 0;
    torch::autograd::variable_list saved{q, k, v};
    for (const auto& piece : field->pieces) {
      const at::Tensor near_keys = of_keys.assemble(piece.keys),
                       near_values = of_values.assemble(field->of_values(piece.keys));
      const auto result = piece.attention.forward(
          detail::slice(q, field->keys.owned(), piece.queries), near_keys, near_values);
      detail::slice(out, field->keys.owned(), piece.queries).copy_(result.value);
      // An assembled tensor may be a view of a buffer that is reused.
      const bool own = split && &piece == field->pieces.data();
      for (const at::Tensor& t : {near_keys, near_values})
        saved.push_back(own ? at::Tensor() : t.clone());
      saved.push_back(result.value);
      saved.push_back(result.logs);
    }
    ctx->save_for_backward(saved);
    detail::carry(ctx, field, "field");
    return out;
  }

  // The gradients as a function of all four that has derivatives: keys and values travel again.
  static torch::autograd::variable_list with_graph(const at::Tensor& g, const at::Tensor& q,
                                                   const at::Tensor& k, const at::Tensor& v,
                                                   const FieldPtr& field) {
    const auto all =
        detail::differentiable_gradients(g, q, detail::gathered_halo(k, field->keys),
                                         detail::gathered_halo(v, field->values), field->where);
    return {all[0], detail::summed_halo(all[1], field->keys),
            detail::summed_halo(all[2], field->values), at::Tensor()};
  }

  // The gradients of q, keys and values that piece `i` makes.
  static std::array<at::Tensor, 3> of_piece(const Field& field, std::size_t i, const at::Tensor& g,
                                            const torch::autograd::variable_list& saved) {
    const Field::Piece& piece = field.pieces[i];
    const Box& all = field.keys.owned();
    const bool own = i == 0 && volume(field.interior) > 0;
    const at::Tensor near_keys = own ? detail::slice(saved[1], all, piece.keys) : saved[3 + 4 * i];
    const at::Tensor near_values =
        own ? detail::slice(saved[2], field.values.owned(), field.of_values(piece.keys))
            : saved[4 + 4 * i];
    return piece.attention.backward(detail::slice(g, all, piece.queries),
                                    detail::slice(saved[0], all, piece.queries), near_keys,
                                    near_values, {saved[5 + 4 * i], saved[6 + 4 * i]});
  }

  static torch::autograd::variable_list backward(Context* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto field = detail::carried<FieldPtr>(ctx, "field");
    const at::Tensor &q = saved[0], &g = gradients[0];
    if (at::GradMode::is_enabled()) return with_graph(g, q, saved[1], saved[2], field);
    const Halo &of_keys = field->keys, &of_values = field->values;
    const bool split = volume(field->interior) > 0;
    if (!split && field->pieces.size() == 1 && field->pieces[0].keys == of_keys.needed()) {
      const auto [dq, dk, dv] = of_piece(*field, 0, g, saved);
      Pending<at::Tensor> keys = of_keys.start_sum(dk), values = of_values.start_sum(dv);
      const at::Tensor first = keys.wait();
      return {dq, first, values.wait(), at::Tensor()};
    }
    at::Tensor dq = at::empty_like(q);
    at::Tensor dk = at::zeros(detail::shape_of(of_keys.needed()), q.options()),
               dv = at::zeros(detail::shape_of(of_values.needed()), q.options());
    const auto compute = [&](std::size_t i) {
      const auto parts = of_piece(*field, i, g, saved);
      detail::slice(dq, of_keys.owned(), field->pieces[i].queries).copy_(parts[0]);
      return parts;
    };
    // Gradients for other ranks first; while they are sent, this rank's own.
    for (std::size_t i = split ? 1 : 0; i < field->pieces.size(); ++i) {
      const auto parts = compute(i);
      const Box& seen = field->pieces[i].keys;
      if (volume(seen) == 0) continue;
      detail::slice(dk, of_keys.needed(), seen).add_(parts[1]);
      detail::slice(dv, of_values.needed(), field->of_values(seen)).add_(parts[2]);
    }
    Pending<at::Tensor> sum_of_keys = of_keys.start_sum(dk),
                        sum_of_values = of_values.start_sum(dv);
    at::Tensor keys, values;
    const auto wait = [&] {
      keys = sum_of_keys.wait();
      values = sum_of_values.wait();
    };
    if (field->wait_first || !split) wait();
    if (split) {
      const auto parts = compute(0);
      if (!keys.defined()) wait();
      const Box& seen = field->pieces[0].keys;
      detail::slice(keys, of_keys.owned(), seen).add_(parts[1]);
      detail::slice(values, of_values.owned(), field->of_values(seen)).add_(parts[2]);
    }
    return {dq, keys, values, at::Tensor()};
  }
};

at::Tensor on_shards(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     detail::LocalNeighborhood where) {
  if (!is_sharded(q) || !is_sharded(k) || !is_sharded(v))
    throw ShardingError(
        "neighborhood_attention of plain and sharded tensors together: distribute_tensor the plain "
        "ones, or take full_tensor of the others");
  const ShardSpec wanted = detail::without_partial(spec(q));
  if (wanted.is_sharded(wanted.dims() - 1))
    throw ShardingError("neighborhood_attention: q is sharded over its channels, ", wanted,
                        "; redistribute it over batch, space or heads");
  const auto laid_out = [&](const at::Tensor& t) {
    return redistribute(
        t, ShardSpec(wanted.mesh(), t.sizes().vec(), wanted.placements(), wanted.sizes()));
  };
  const at::Tensor queries = laid_out(q), keys = laid_out(k), values = laid_out(v);
  auto field = std::make_shared<Field>();
  field->keys = halo_of_keys(spec(keys), where.dims);
  field->values = halo_of_keys(spec(values), where.dims);
  where.queries = spatial(field->keys.owned());
  where.keys = spatial(field->keys.needed());
  field->where = std::move(where);
  const HaloPolicy::Order order = detail::context_of(wanted)->state->halo_policy.load().order;
  const bool split =
      detail::interior_first(order, volume(field->keys.owned()), kSplitFromQueryElements);
  field->wait_first = order == HaloPolicy::Order::wait_first;
  field->interior = split && field->keys.travels()
                        ? interior_of(field->where.dims, field->keys.owned(), wanted.shape())
                        : Box(wanted.dims());
  field->make_pieces();
  return from_local(OnField::apply(to_local(queries), to_local(keys), to_local(values), field),
                    spec(values));
}

at::Tensor by_lists(std::size_t n, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const std::vector<std::int64_t>& kernel,
                    const std::vector<std::int64_t>& dilation, const std::vector<bool>& causal,
                    std::optional<double> scale) {
  if (kernel.size() != n || (!dilation.empty() && dilation.size() != n) ||
      (!causal.empty() && causal.size() != n))
    throw InvalidArgument("neighborhood_attention over ", n, " spatial dims was given ",
                          kernel.size(), " kernels, ", dilation.size(), " dilations and ",
                          causal.size(), " causal; give one per dim");
  std::vector<Neighborhood> dims;
  for (std::size_t d = 0; d < n; ++d)
    dims.push_back({kernel[d], dilation.empty() ? 1 : dilation[d], !causal.empty() && causal[d]});
  return neighborhood_attention(q, k, v, dims, scale);
}

at::Tensor registered(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      std::vector<std::int64_t> kernel, std::vector<std::int64_t> dilation,
                      c10::List<bool> causal, std::optional<double> scale) {
  at::Tensor made;
  detail::raising([&] {
    made = by_lists(kernel.size(), q, k, v, kernel, dilation,
                    std::vector<bool>(causal.begin(), causal.end()), scale);
  });
  return made;
}

}  // namespace

at::Tensor neighborhood_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::vector<Neighborhood>& dims,
                                  std::optional<double> scale) {
  check(q, k, v, dims);
  detail::LocalNeighborhood where{
      dims, {}, {}, {}, scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))};
  where.extents = q.sizes().slice(1, dims.size()).vec();
  if (is_sharded(q) || is_sharded(k) || is_sharded(v)) return on_shards(q, k, v, std::move(where));
  for (const std::int64_t extent : where.extents) where.queries.push_back({0, extent});
  where.keys = where.queries;
  return detail::attend(q, k, v, where);
}

at::Tensor neighborhood_attention_1d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation,
                                     const std::vector<bool>& causal, std::optional<double> scale) {
  return by_lists(1, q, k, v, kernel, dilation, causal, scale);
}

at::Tensor neighborhood_attention_2d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation,
                                     const std::vector<bool>& causal, std::optional<double> scale) {
  return by_lists(2, q, k, v, kernel, dilation, causal, scale);
}

at::Tensor neighborhood_attention_3d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation,
                                     const std::vector<bool>& causal, std::optional<double> scale) {
  return by_lists(3, q, k, v, kernel, dilation, causal, scale);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "neighborhood_attention(Tensor q, Tensor k, Tensor v, int[] kernel, int[] dilation, bool[] "
      "causal, float? scale=None) -> Tensor",
      registered);
}

}  // namespace tessera
