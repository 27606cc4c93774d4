// halo_exchange as a differentiable function, and the cache of its plans.

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/ops/halo/detail/field_halo.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// From local tensors to local tensors: the exchange, and the sum that is its adjoint; each is the
// other's derivative.
template <bool sums>
struct HaloMap : torch::autograd::Function<HaloMap<sums>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& local, const Halo& halo) {
    detail::carry(ctx, halo, "halo");
    return sums ? halo.sum(local) : halo.exchange(local);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    // Every rank takes part in the sum, also if its own result was not used.
    return {HaloMap<!sums>::apply(g[0], detail::carried<Halo>(ctx, "halo")), at::Tensor()};
  }
};

// Keyed by field and widths.
using HaloCache = detail::ThreadCache<Halo, struct ByWidths>;

}  // namespace

at::Tensor detail::gathered_halo(const at::Tensor& local, const Halo& halo) {
  return HaloMap<false>::apply(local, halo);
}
at::Tensor detail::summed_halo(const at::Tensor& gradient, const Halo& halo) {
  return HaloMap<true>::apply(gradient, halo);
}

Halo halo_of(const ShardSpec& field, const HaloWidths& widths, const HaloOptions& options) {
  detail::Key key;
  // interned; the cached exchange keeps it alive
  key.push_back(reinterpret_cast<std::uintptr_t>(field.data().get()));
  key.push_back(static_cast<std::uint64_t>(options.method));
  std::vector<HaloWidth> of_dim(field.dims());
  std::set<int> named;
  for (const auto& [dim, width] : widths) {
    if (width.before < 0 || width.after < 0)
      throw InvalidArgument("a halo of ", width.before, " and ", width.after, " in dim ", dim,
                            "; give at least 0");
    if (dim < -field.dims() || dim >= field.dims())
      throw InvalidArgument("a halo in dim ", dim, " of a field of ", field.dims(), " dims");
    const int d = dim < 0 ? dim + field.dims() : dim;
    if (!named.insert(d).second)
      throw InvalidArgument("a halo of dim ", d, " is given twice, from the end as well");
    std::int64_t last = 0;
    if (__builtin_add_overflow(field.shape()[d], width.after, &last))
      throw InvalidArgument("a halo of ", width.after, " after dim ", d, " of ", field.shape()[d],
                            " is longer than can be counted");
    of_dim[d] = width;
  }
  for (const HaloWidth& w : of_dim) {
    key.push_back(static_cast<std::uint64_t>(w.before));
    key.push_back(static_cast<std::uint64_t>(w.after));
    key.push_back(static_cast<std::uint64_t>(w.edge));
  }
  return HaloCache::find_or_make(std::move(key), [&] {
    const NeededBox needed = [of_dim, sharding = field.sharding()](int position) {
      Box box = sharding.box(position);
      for (std::size_t d = 0; d < box.size(); ++d)
        box[d] = {box[d].begin - of_dim[d].before, box[d].end + of_dim[d].after};
      return box;
    };
    return Halo(field, mapped(of_dim, &HaloWidth::edge), needed, options);
  });
}

at::Tensor halo_exchange(const at::Tensor& tensor, const Halo& halo,
                         const std::optional<std::vector<Placement>>& gradient) {
  const at::Tensor field =
      spec(tensor) == halo.field() ? tensor : redistribute(tensor, halo.field());
  return detail::gathered_halo(to_local(field, gradient), halo);
}

at::Tensor halo_exchange(const at::Tensor& tensor, const HaloWidths& widths,
                         const HaloOptions& options) {
  return halo_exchange(tensor, halo_of(detail::without_partial(spec(tensor)), widths, options));
}

}  // namespace tessera
