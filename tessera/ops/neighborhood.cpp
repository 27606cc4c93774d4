#include "tessera/ops/neighborhood.h"

#include <torch/library.h>

#include <bit>
#include <cmath>
#include <unordered_map>

#include "tessera/base/text.h"
#include "tessera/ops/halo.h"
#include "tessera/ops/labels.h"
#include "tessera/ops/neighborhood_local.h"
#include "tessera/tensor/detail/plan_cache.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<Neighborhood>& dims) {
  const auto n = static_cast<std::int64_t>(dims.size());
  if (n < 1 || n > 3) throw InvalidArgument(concat("neighborhood_attention was given ", n, " windows; give one a spatial dim, one to three"));
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>("q", q), {"k", k}, {"v", v}}) {
    if (!t.defined()) throw InvalidArgument(concat("neighborhood_attention was given an undefined ", name));
    if (t.dim() != n + 3)
      throw InvalidArgument(concat("neighborhood_attention with ", n, " windows: ", name, " has shape ", list(t.sizes().vec()), "; it needs batch x ",
                                   n, " spatial dims x heads x channels"));
    if (t.scalar_type() != q.scalar_type() || !at::isFloatingType(t.scalar_type()))
      throw InvalidArgument(concat("neighborhood_attention: q is of ", c10::toString(q.scalar_type()), ", ", name, " of ",
                                   c10::toString(t.scalar_type()), "; give one floating-point type"));
    if (t.device() != q.device())
      throw InvalidArgument(concat("neighborhood_attention: q is on ", q.device().str(), ", ", name, " on ", t.device().str()));
  }
  if (k.sizes() != q.sizes() || v.sizes().slice(0, n + 2) != q.sizes().slice(0, n + 2))
    throw InvalidArgument(concat("neighborhood_attention: q has shape ", list(q.sizes().vec()), ", k ", list(k.sizes().vec()), ", v ",
                                 list(v.sizes().vec()), "; they differ in v's channels at most"));
  if (q.size(-1) < 1) throw InvalidArgument("neighborhood_attention: q has no channels");
  for (std::size_t d = 0; d < dims.size(); ++d) {
    const std::int64_t extent = q.size(static_cast<std::int64_t>(d) + 1);
    if (dims[d].kernel < 1 || dims[d].dilation < 1)
      throw InvalidArgument(
          concat("neighborhood_attention, spatial dim ", d, ": kernel ", dims[d].kernel, ", dilation ", dims[d].dilation, "; give at least 1"));
    if (!dims[d].causal && extent > 0 && dims[d].kernel * dims[d].dilation > extent)
      throw InvalidArgument(concat("neighborhood_attention, spatial dim ", d, ": kernel ", dims[d].kernel, " x dilation ", dims[d].dilation,
                                   " is more than its extent of ", extent));
  }
}

/// The exchange of a field of keys or values. Per thread, as the plans of operators are.
Halo halo_of_keys(const ShardSpec& field, const std::vector<Neighborhood>& dims) {
  static thread_local std::unordered_map<detail::Key, Halo, detail::KeyHash, detail::KeyEqual> all;
  detail::Key key;
  key.push_back(reinterpret_cast<std::uintptr_t>(field.data().get()));  // interned; the cached exchange keeps it alive
  for (const Neighborhood& d : dims) {
    key.push_back(static_cast<std::uint64_t>(d.kernel));
    key.push_back(static_cast<std::uint64_t>(d.dilation));
    key.push_back(d.causal);
  }
  if (const auto found = all.find(key); found != all.end()) return found->second;
  const NeededBox needed = [dims, sharding = field.sharding(), shape = field.shape()](int position) {
    Box box = sharding.box(position);
    for (std::size_t d = 0; d < dims.size(); ++d) box[d + 1] = detail::seen_keys(dims[d], box[d + 1], shape[d + 1]);
    return box;
  };
  Halo halo(field, std::vector<Edge>(static_cast<std::size_t>(field.dims()), Edge::zero), needed);
  if (all.size() >= 1024) all.clear();
  all.emplace(std::move(key), halo);
  return halo;
}

Box spatial(const Box& box) { return {box.begin() + 1, box.end() - 2}; }

at::Tensor on_shards(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<Neighborhood>& dims,
                     detail::LocalNeighborhood where) {
  if (!is_sharded(q) || !is_sharded(k) || !is_sharded(v))
    throw ShardingError(
        "neighborhood_attention of plain and sharded tensors together: distribute_tensor the plain ones, or take full_tensor of the others");
  const ShardSpec wanted = detail::without_partial(spec(q));
  if (wanted.is_sharded(wanted.dims() - 1))
    throw ShardingError(concat("neighborhood_attention: q is sharded over its channels, ", wanted, "; redistribute it over batch, space or heads"));
  const auto laid_out = [&](const at::Tensor& t) {
    return redistribute(t, ShardSpec(wanted.mesh(), t.sizes().vec(), wanted.placements(), wanted.sizes()));
  };
  const at::Tensor queries = laid_out(q), keys = laid_out(k), values = laid_out(v);
  const Halo of_keys = halo_of_keys(spec(keys), dims), of_values = halo_of_keys(spec(values), dims);
  const at::Tensor near_keys = halo_exchange(keys, of_keys), near_values = halo_exchange(values, of_values);
  where.queries = spatial(of_keys.owned());
  where.keys = spatial(of_keys.needed());
  return from_local(detail::attend(to_local(queries), near_keys, near_values, where), spec(values));
}

at::Tensor by_lists(std::size_t n, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<std::int64_t>& kernel,
                    const std::vector<std::int64_t>& dilation, const std::vector<bool>& causal, std::optional<double> scale) {
  if (kernel.size() != n || (!dilation.empty() && dilation.size() != n) || (!causal.empty() && causal.size() != n))
    throw InvalidArgument(concat("neighborhood_attention over ", n, " spatial dims was given ", kernel.size(), " kernels, ", dilation.size(),
                                 " dilations and ", causal.size(), " causal; give one a dim"));
  std::vector<Neighborhood> dims;
  for (std::size_t d = 0; d < n; ++d) dims.push_back({kernel[d], dilation.empty() ? 1 : dilation[d], !causal.empty() && causal[d]});
  return neighborhood_attention(q, k, v, dims, scale);
}

at::Tensor registered(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::vector<std::int64_t> kernel,
                      std::vector<std::int64_t> dilation, c10::List<bool> causal, std::optional<double> scale) {
  return by_lists(kernel.size(), q, k, v, kernel, dilation, std::vector<bool>(causal.begin(), causal.end()), scale);
}

}  // namespace

at::Tensor neighborhood_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<Neighborhood>& dims,
                                  std::optional<double> scale) {
  check(q, k, v, dims);
  detail::LocalNeighborhood where{dims, {}, {}, {}, scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))};
  for (std::size_t d = 0; d < dims.size(); ++d) where.extents.push_back(q.size(static_cast<std::int64_t>(d) + 1));
  if (is_sharded(q) || is_sharded(k) || is_sharded(v)) return on_shards(q, k, v, dims, std::move(where));
  for (const std::int64_t extent : where.extents) where.queries.push_back({0, extent});
  where.keys = where.queries;
  return detail::attend(q, k, v, where);
}

at::Tensor neighborhood_attention_1d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation, const std::vector<bool>& causal, std::optional<double> scale) {
  return by_lists(1, q, k, v, kernel, dilation, causal, scale);
}

at::Tensor neighborhood_attention_2d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation, const std::vector<bool>& causal, std::optional<double> scale) {
  return by_lists(2, q, k, v, kernel, dilation, causal, scale);
}

at::Tensor neighborhood_attention_3d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation, const std::vector<bool>& causal, std::optional<double> scale) {
  return by_lists(3, q, k, v, kernel, dilation, causal, scale);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("neighborhood_attention(Tensor q, Tensor k, Tensor v, int[] kernel, int[] dilation, bool[] causal, float? scale=None) -> Tensor", registered);
}

}  // namespace tessera
