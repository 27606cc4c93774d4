// max_unpool: every value goes to its index in the global result, row-major over the spatial dims.
// The owner of a shard of the result needs the values whose indices are in it: each rank finds out
// which boxes of its values go to which rank, all ranks are told, and the boxes are exchanged as
// halos.

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/agree/agree.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/ops/rules/detail/field_map.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::unpooling_rules {
namespace {

// True where the coordinates are within the last dims of `box`.
at::Tensor inside(const std::vector<at::Tensor>& at, const Box& box) {
  at::Tensor all;
  for (std::size_t d = 0; d < at.size(); ++d) {
    const Interval& i = box[box.size() - at.size() + d];
    const at::Tensor in = at[d].ge(i.begin).logical_and_(at[d].lt(i.end));
    all = all.defined() ? all.logical_and_(in) : in;
  }
  return all;
}

struct Unpooling {
  Unpooling(const char* name, ShardSpec x_spec, ShardSpec y_spec, int inner,
            const at::Tensor& indices)
      : x(std::move(x_spec)),
        y(std::move(y_spec)),
        lead(static_cast<std::size_t>(y.dims() - inner)) {
    const LocalCallGuard guard;
    const Shape sizes(y.shape().begin() + static_cast<std::ptrdiff_t>(lead), y.shape().end());
    const Sharding& of_x = x.sharding();
    const Sharding& of_y = y.sharding();
    const auto boxes = agree::all<std::vector<Interval>>(
        context_of(x)->mesh.all(), name, [&] { return read_here(name, indices, sizes); },
        {.name = "needed_boxes"});
    halo = Halo(x, std::vector<Edge>(x.dims(), Edge::zero), [&](int p) {
      const Box own = of_x.box(p);
      Box box = own;
      bool any = false;
      for (int r = 0; r < of_x.positions(); ++r) {
        const Interval* read = &boxes[r][p * inner];
        if (!same_lead(of_x.box(r), own, lead) || volume(Box(read, read + inner)) == 0) continue;
        for (int d = 0; d < inner; ++d) {
          const Interval& i = read[d];
          Interval& into = box[lead + d];
          into = any ? Interval{std::min(into.begin, i.begin), std::max(into.end, i.end)} : i;
        }
        any = true;
      }
      return any && volume(box) > 0 ? box : Box(box.size());
    });
    // Where the values of the needed box go in this rank's shard; the last of two for one position
    // stays.
    const Box part = of_y.box(context_of(x)->position);
    for (std::size_t d = lead; d < part.size(); ++d) places *= part[d].size();
    const auto at = coordinates(halo.exchange(indices), sizes);
    valid = inside(at, part);
    at::Tensor flat;
    for (int d = 0; d < inner; ++d)
      flat = flat.defined() ? flat * part[lead + d].size() + (at[d] - part[lead + d].begin)
                            : at[d] - part[lead + d].begin;
    target = rows(at::where(valid, flat, at::full({}, places, flat.options())));
    valid = rows(valid);
    const std::int64_t n = target.size(1);
    const at::Tensor order = at::arange(n, target.options()).unsqueeze(0).expand_as(target);
    const at::Tensor last = at::full({target.size(0), places + 1}, -1, target.options())
                                .scatter_reduce(1, target, order, "amax");
    wins = valid.logical_and(last.gather(1, target).eq(order));
  }

  // For each rank's shard of the result the box of this rank's rows that it reads, one after the
  // other.
  std::vector<Interval> read_here(const char* name, const at::Tensor& indices,
                                  const Shape& sizes) const {
    std::int64_t all = 1;
    for (const auto n : sizes) all *= n;
    if (indices.numel() > 0 &&
        (indices.min().item<std::int64_t>() < 0 || indices.max().item<std::int64_t>() >= all))
      throw InvalidArgument(name, ": indices reach from ", indices.min().item<std::int64_t>(),
                            " to ", indices.max().item<std::int64_t>(), " where the result of ",
                            list(sizes), " has ", all, " positions");
    const Sharding &of_x = x.sharding(), &of_y = y.sharding();
    const std::size_t inner = sizes.size();
    std::vector<Interval> read(of_x.positions() * inner);
    if (indices.numel() == 0) return read;
    const auto at = coordinates(indices, sizes);
    const Box own = of_x.box(context_of(x)->position);
    for (int p = 0; p < of_x.positions(); ++p) {
      if (!same_lead(of_x.box(p), own, lead) || volume(of_y.box(p)) == 0) continue;
      // over space
      const at::Tensor hit =
          inside(at, of_y.box(p)).flatten(0, static_cast<std::int64_t>(lead) - 1).any(0);
      const at::Tensor where = hit.nonzero();
      if (where.numel() == 0) continue;
      const at::Tensor first = std::get<0>(where.min(0)), last = std::get<0>(where.max(0));
      for (std::size_t d = 0; d < inner; ++d) {
        const auto i = static_cast<std::int64_t>(d);
        read[static_cast<std::size_t>(p) * inner + d] = {
            own[lead + d].begin + first[i].item<std::int64_t>(),
            own[lead + d].begin + last[i].item<std::int64_t>() + 1};
      }
    }
    return read;
  }
  static bool same_lead(const Box& a, const Box& b, std::size_t lead) {
    return std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(lead), b.begin());
  }
  // A tensor as [samples and channels, positions].
  at::Tensor rows(const at::Tensor& t) const {
    std::int64_t n = 1;
    for (std::size_t d = 0; d < lead; ++d) n *= t.size(static_cast<std::int64_t>(d));
    return t.reshape({n, n == 0 ? 0 : t.numel() / n});
  }
  // Values that are not for this rank go to one extra position; unless `adds`, those that are
  // replaced too.
  at::Tensor put(const at::Tensor& local, bool adds) const {
    const at::Tensor values = rows(halo.exchange(local));
    const Shape& shape = y.local_shape();
    if (values.numel() == 0) return at::zeros(shape, local.options());
    const at::Tensor to =
        adds ? target : at::where(wins, target, at::full({}, places, target.options()));
    at::Tensor all = at::zeros({values.size(0), places + 1}, local.options());
    all = adds ? all.scatter_add_(1, to, values) : all.scatter_(1, to, values);
    return all.narrow(1, 0, places).reshape(shape);
  }
  at::Tensor fetch(const at::Tensor& gradient) const {
    const Shape shape = shape_of(halo.needed());
    if (volume(halo.needed()) == 0 || places == 0)
      return halo.sum(at::zeros(shape, gradient.options()));
    const at::Tensor values =
        rows(gradient).gather(1, at::where(valid, target, at::zeros({}, target.options())));
    return halo.sum(values.masked_fill(valid.logical_not(), 0).view(shape));
  }

  const ShardSpec x, y;
  const std::size_t lead;
  std::int64_t places = 1;  // positions in this rank's shard, per sample and channel
  Halo halo;
  // for each position of the needed box: its row of positions, whether it is for this rank, and
  // whether it stays
  at::Tensor target, valid, wins;
};

at::Tensor unpool(const char* name, const at::Tensor& self, const at::Tensor& indices,
                  c10::SymIntArrayRef output_size, int inner) {
  const ShardMeta* meta = meta_of(self) ? meta_of(self) : meta_of(indices);
  const auto context = context_of(meta->spec());
  const at::Tensor field = meta_of(self) ? self : promote(self, context),
                   given = meta_of(indices) ? indices : promote(indices, context);
  const int n = static_cast<int>(field.dim()), lead = n - inner;
  if ((lead != 1 && lead != 2) || static_cast<int>(output_size.size()) != inner)
    throw InvalidArgument(name, " of a tensor of shape ", field.sizes(), " to ", output_size.size(),
                          " sizes: give channels and ", inner,
                          " spatial dims, samples before them or not, and ", inner, " sizes");
  if (given.scalar_type() != at::kLong || given.sizes() != field.sizes())
    throw InvalidArgument(name, " with indices of ", c10::toString(given.scalar_type()),
                          " and shape ", given.sizes(), " for values of shape ", field.sizes(),
                          ": they are int64, one per value");
  ShardSpec x = without_partial(spec(field));
  Shape sizes;
  for (int d = lead; d < n; ++d) {
    sizes.push_back(output_size[d - lead].expect_int());
    if (sizes.back() < 1 || x.shape()[d] < 1)
      throw InvalidArgument(name, " of a tensor of shape ", field.sizes(), " to ", sizes.back(),
                            " in dim ", d, ": sizes are at least 1");
  }
  const ShardSpec y = resampled_spec(x, sizes);
  const at::Tensor places = laid_out(name, "indices", given.detach(), x);
  const auto unpooling = std::make_shared<Unpooling>(name, x, y, inner, fresh_meta(places).local);
  // libtorch's gradient reaches every value, also one that another has replaced; its own derivative
  // is the sum over all.
  return apply(name, field,
               std::make_shared<FieldMap>(FieldMap{
                   x, y, suggested_strides(field, x.shape()), suggested_strides(field, y.shape()),
                   [unpooling](const at::Tensor& local) { return unpooling->put(local, false); },
                   [unpooling](const at::Tensor& gradient) { return unpooling->fetch(gradient); },
                   [unpooling](const at::Tensor& local) { return unpooling->put(local, true); }}));
}

at::Tensor max_unpool2d(const at::Tensor& self, const at::Tensor& indices,
                        c10::SymIntArrayRef output_size) {
  return unpool("max_unpool2d", self, indices, output_size, 2);
}

at::Tensor max_unpool3d(const at::Tensor& self, const at::Tensor& indices,
                        c10::SymIntArrayRef output_size, at::IntArrayRef stride,
                        at::IntArrayRef padding) {
  if (stride.size() != 3 || padding.size() != 3 ||
      std::ranges::any_of(stride, [](std::int64_t s) { return s < 1; }))
    throw InvalidArgument("max_unpool3d with stride ", list(stride.vec()), " and padding ",
                          list(padding.vec()), ": three numbers each, strides at least 1");
  return unpool("max_unpool3d", self, indices, output_size, 3);
}

const AtStart registered([] {
  register_decomposition("max_unpool2d", max_unpool2d);
  register_decomposition("max_unpool3d", max_unpool3d);
});

}  // namespace
}  // namespace tessera::detail::unpooling_rules
