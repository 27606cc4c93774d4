// grid_sample of fields and grids that are sharded in any dims: every rank computes the outputs of
// its shard of the grid. The inputs that they need depend on the grid's values: each rank publishes
// its box, and the boxes are exchanged as halos.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Version.h>
#include <ATen/native/GridSamplerUtils.h>

#include <array>
#include <cmath>

#include "tessera/comm/agree/agree.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::grid_sampling_rules {
namespace {

struct Sampling {
  at::native::GridSamplerInterpolation mode;
  at::native::GridSamplerPadding padding;
  bool align;
  // True: (x + 1) * (size / 2) - 1 / 2, as in libtorch's kernel for two dims; false: ((x + 1) *
  // size - 1) / 2, as in that for three
  bool by_halves;
};

// One input that a sample reads along one dim: its index, its weight, and whether it is inside the
// array.
struct Tap {
  at::Tensor index, weight, inside;  // weight: differentiable in the grid; undefined: 1
};

// A value whose derivative by `variable` is `slope`.
at::Tensor with_slope(const at::Tensor& value, const at::Tensor& slope,
                      const at::Tensor& variable) {
  const at::Tensor change =
      (variable - variable.detach()).masked_fill(variable.detach().isfinite().logical_not(), 0);
  return value + change * slope;
}

// Multiplication and addition with one rounding, as libtorch's vectorised kernels are compiled: on
// which side of a pixel a point is depends on the last bit, and identity grids have all their
// points there.
at::Tensor fused(const at::Tensor& a, double factor, double term) {
  const at::Tensor from = a.contiguous();
  at::Tensor to = at::empty_like(from);
  AT_DISPATCH_FLOATING_TYPES(from.scalar_type(), "grid_sampler", [&] {
    const auto* in = from.const_data_ptr<scalar_t>();
    auto* out = to.mutable_data_ptr<scalar_t>();
    for (std::int64_t i = 0; i < from.numel(); ++i)
      out[i] = std::fma(in[i], static_cast<scalar_t>(factor), static_cast<scalar_t>(term));
  });
  return to;
}

at::Tensor unnormalized(const at::Tensor& x, std::int64_t size, const Sampling& s) {
  const auto n = static_cast<double>(size);
  if (!s.by_halves) return s.align ? (x + 1) / 2 * (n - 1) : ((x + 1) * n - 1) / 2;
  if (s.align) return (x + 1) * ((n - 1) / 2);
  const std::string kernels = at::get_cpu_capability();
  const bool plain_type = x.scalar_type() == at::kDouble || x.scalar_type() == at::kFloat;
  if (!x.is_cpu() || !plain_type || (kernels != "AVX2" && kernels != "AVX512"))
    return (x + 1) * (n / 2) - 0.5;
  return with_slope(fused(x.detach() + 1, n / 2, -0.5), at::full({}, n / 2, x.options()), x);
}

struct Moved {
  at::Tensor at, slope;  // slope: derivative of `at` by what it was made from
};

Moved clipped(const at::Tensor& at, std::int64_t size) {
  const auto last = static_cast<double>(size - 1);
  // NaN becomes 0, as in libtorch.
  const at::Tensor known = at.nan_to_num(0, last + 1, -1);
  return {known.clamp(0, last), known.gt(0).logical_and(known.lt(last)).to(at.scalar_type())};
}

Moved reflected(const at::Tensor& at, std::int64_t size, bool align) {
  const double low = align ? 0 : -0.5,
               span = align ? static_cast<double>(size - 1) : static_cast<double>(size);
  if (span <= 0) return {at::zeros_like(at), at::zeros_like(at)};
  const at::Tensor from = at - low, distance = from.abs(), flips = (distance / span).floor(),
                   rest = distance.fmod(span);
  const at::Tensor even = flips.remainder(2).eq(0);
  const at::Tensor back = at::where(even, rest + low, span - rest + low);
  const at::Tensor sign = at::where(from.lt(0), -1.0, 1.0).to(at.scalar_type());
  const Moved kept = clipped(back, size);
  return {kept.at, at::where(even, sign, -sign) * kept.slope};
}

Moved padded(const at::Tensor& at, std::int64_t size, const Sampling& s) {
  switch (s.padding) {
    case at::native::GridSamplerPadding::Border:
      return clipped(at, size);
    case at::native::GridSamplerPadding::Reflection:
      return reflected(at, size, s.align);
    default: {
      // Far outside is outside: indices must fit into integers.
      const at::Tensor known = at.nan_to_num(-9, static_cast<double>(size + 9), -9)
                                   .clamp(-9, static_cast<double>(size + 9));
      return {known, known.eq(at).to(at.scalar_type())};
    }
  }
}

Tap tap(const at::Tensor& index, std::int64_t size, at::Tensor weight) {
  const at::Tensor i = index.to(at::kLong);
  return {i, std::move(weight), i.ge(0).logical_and(i.lt(size))};
}

std::vector<Tap> taps_of(const at::Tensor& x, std::int64_t size, const Sampling& s) {
  const at::Tensor at = unnormalized(x, size, s), fixed = at.detach();
  if (s.mode == at::native::GridSamplerInterpolation::Bicubic) {
    const Moved known =
        padded(fixed, size, {s.mode, at::native::GridSamplerPadding::Zeros, s.align, s.by_halves});
    // Padding is applied to each tap separately.
    const at::Tensor whole = s.padding == at::native::GridSamplerPadding::Zeros
                                 ? known.at.floor()
                                 : fixed.nan_to_num(0).floor();
    const at::Tensor t =
        with_slope((s.padding == at::native::GridSamplerPadding::Zeros ? known.at : fixed) - whole,
                   at::ones_like(fixed), at);
    constexpr double kA = -0.75;
    const auto near = [&](const at::Tensor& d) { return ((kA + 2) * d - (kA + 3)) * d * d + 1; };
    const auto far = [&](const at::Tensor& d) {
      return ((kA * d - 5 * kA) * d + 8 * kA) * d - 4 * kA;
    };
    const std::array<at::Tensor, 4> weights{far(t + 1), near(t), near(1 - t), far(2 - t)};
    std::vector<Tap> taps;
    for (int k = 0; k < 4; ++k)
      taps.push_back(tap(padded(whole + (k - 1), size, s).at.floor(), size, weights[k]));
    return taps;
  }
  const Moved known = padded(fixed, size, s);
  if (s.mode == at::native::GridSamplerInterpolation::Nearest)
    return {tap(known.at.round(), size, {})};
  const at::Tensor low = known.at.floor(), part = with_slope(known.at - low, known.slope, at);
  return {tap(low, size, 1 - part), tap(low + 1, size, part)};
}

// Samples of a box of inputs, N x C x box, at the taps of each dim, N x outputs.
at::Tensor sampled(const at::Tensor& box, const Box& of, const std::vector<std::vector<Tap>>& taps,
                   const at::Tensor& grid) {
  const std::int64_t samples = box.size(0), channels = box.size(1);
  const std::size_t inner = taps.size();
  Shape shape{samples, channels};
  for (std::size_t d = 1; d <= inner; ++d) shape.push_back(grid.size(static_cast<std::int64_t>(d)));
  const at::Tensor flat = box.reshape({samples, channels, -1});
  at::Tensor sum = at::zeros(shape, box.options());
  std::vector<std::size_t> chosen(inner, 0);
  for (;;) {
    at::Tensor index, weight, inside;
    for (std::size_t d = 0; d < inner; ++d) {
      const Tap& t = taps[d][chosen[d]];
      const at::Tensor here = (t.index - of[2 + d].begin).clamp(0, of[2 + d].size() - 1);
      index = index.defined() ? index * of[2 + d].size() + here : here;
      inside = inside.defined() ? inside.logical_and(t.inside) : t.inside;
      if (t.weight.defined()) weight = weight.defined() ? weight * t.weight : t.weight;
    }
    const at::Tensor values =
        flat.gather(2, index.reshape({samples, 1, -1}).expand({samples, channels, -1})).view(shape);
    const at::Tensor read = values.masked_fill(inside.logical_not().unsqueeze(1), 0);
    sum = sum + (weight.defined() ? read * weight.unsqueeze(1) : read);
    std::size_t d = inner;
    while (d-- > 0) {
      if (++chosen[d] < taps[d].size()) break;
      chosen[d] = 0;
    }
    if (d == static_cast<std::size_t>(-1)) break;
  }
  return sum;
}

// 0 that depends on `t`, whatever its values.
at::Tensor zeroed(const at::Tensor& t) {
  return t.masked_fill(at::ones_like(t, at::kBool), 0).sum();
}

// The placements of field and grid on each axis: samples are sharded alike; if the field is sharded
// in channels or space, the grid is sharded in its own space, or replicated; the grid's last dim is
// not sharded.
struct Placed {
  ShardSpec field, grid, out;
};
Placed place(const ShardSpec& field, const ShardSpec& grid) {
  const int inner = field.dims() - 2, axes = field.mesh_dims();
  std::vector<Placement> of_field(axes), of_grid(axes), of_out(axes);
  for (int a = 0; a < axes; ++a) {
    Placement f = field.placements()[a], g = grid.placements()[a];
    if (g.is_shard(inner + 1)) g = Replicate();
    if (f.is_shard(0)) {
      g = Shard(0);
    } else if (f.is_shard(1)) {
      g = Replicate();
    } else if (f.is_shard()) {
      if (!g.is_shard() || g.dim == 0) g = Shard(1);
    } else if (g.is_shard(0)) {
      f = Shard(0);
    }
    of_field[a] = f;
    of_grid[a] = g;
    of_out[a] = f.is_shard() && f.dim < 2 ? f : g.is_shard() ? Shard(g.dim + 1) : Replicate();
  }
  Placed placed{field.with_placements(of_field), grid.with_placements(of_grid), {}};
  if (!placed.field.dim(0).axes.empty()) {
    // The partition of the one that was sharded in samples.
    const bool of_given_grid = grid.dim(0).axes == placed.field.dim(0).axes &&
                               !(field.dim(0).axes == placed.field.dim(0).axes);
    const Partition parts = of_given_grid ? grid.dim(0).partition : placed.field.dim(0).partition;
    placed.field = with_parts(placed.field, {{0, parts}});
    placed.grid = with_parts(placed.grid, {{0, parts}});
  }
  Shape shape{field.shape()[0], field.shape()[1]};
  shape.insert(shape.end(), grid.shape().begin() + 1, grid.shape().end() - 1);
  ShardSizes sizes;
  for (int d = 0; d < field.dims(); ++d) {
    const DimSharding& like = d < 2 ? placed.field.dim(d) : placed.grid.dim(d - 1);
    if (!like.axes.empty()) sizes[d] = like.partition.sizes();
  }
  placed.out = ShardSpec(field.mesh(), shape, of_out, sizes);
  return placed;
}

// If ranks of an axis hold the same values and make different outputs from them, their gradients
// are Partial.
std::vector<Placement> gradient_of(const ShardSpec& spec, const ShardSpec& out) {
  auto placements = spec.placements();
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (placements[a].is_replicate() && out.placements()[a].is_shard()) placements[a] = Partial();
  return placements;
}

void check_call(const at::Tensor& input, const at::Tensor& given, std::int64_t mode,
                std::int64_t padding) {
  const std::int64_t n = input.dim();
  at::native::check_grid_sampler_common(input, given);
  if ((n != 4 && n != 5) || given.dim() != n || mode < 0 || mode > 2 || padding < 0 || padding > 2)
    throw InvalidArgument("grid_sampler of ", n, " dims by a grid of ", given.dim(), " with mode ",
                          mode, " and padding ", padding,
                          ": four or five dims both, modes and paddings 0 to 2");
  if (input.scalar_type() != given.scalar_type())
    throw InvalidArgument("grid_sampler of ", c10::toString(input.scalar_type()),
                          " values by a grid of ", c10::toString(given.scalar_type()),
                          ": convert one");
}

/// The rows of `extent` that the taps read.
Interval read_by(const std::vector<Tap>& taps, std::int64_t extent) {
  Interval need{extent, 0};
  for (const Tap& t : taps) {
    const at::Tensor read = t.index.masked_select(t.inside);
    if (read.numel() == 0) continue;
    need = {std::min(need.begin, read.min().item<std::int64_t>()),
            std::max(need.end, read.max().item<std::int64_t>() + 1)};
  }
  return need;
}

/// What the taps of each rank read, by spatial dim. Collective.
Halo read_halo(const Placed& to, const std::vector<std::vector<Tap>>& taps, bool samples) {
  Box box(taps.size());
  for (std::size_t d = 0; d < taps.size(); ++d) {
    const Interval need = read_by(taps[d], to.field.shape()[2 + d]);
    // Nothing inside: any box, of which nothing is used.
    box[d] = need.empty() && samples ? Interval{0, 1} : need;
  }
  const auto boxes =
      agree::all<std::vector<Interval>>(context_of(to.field)->mesh.all(), "grid_sample",
                                        [&] { return box; }, {.name = "needed_boxes"});
  return Halo(to.field, std::vector<Edge>(to.field.dims(), Edge::zero), [&](int position) {
    Box needed = to.out.sharding().box(position);
    std::ranges::copy(boxes[position], needed.begin() + 2);
    return needed;
  });
}

at::Tensor grid_sampler(const at::Tensor& input, const at::Tensor& given, std::int64_t mode,
                        std::int64_t padding, bool align) {
  const int n = static_cast<int>(input.dim()), inner = n - 2;
  check_call(input, given, mode, padding);
  const auto context = context_of((meta_of(input) ? meta_of(input) : meta_of(given))->spec());
  const at::Tensor x = meta_of(input) ? input : promote(input, context),
                   g = meta_of(given) ? given : promote(given, context);
  const Placed to = place(without_partial(spec(x)), without_partial(spec(g)));
  check_implicit_moves("grid_sampler",
                       {{"input", spec(x), to.field, static_cast<std::int64_t>(x.element_size())},
                        {"grid", spec(g), to.grid, static_cast<std::int64_t>(g.element_size())}},
                       *context);
  const at::Tensor field = redistribute(x, to.field);
  const at::Tensor grid = to_local(redistribute(g, to.grid), gradient_of(to.grid, to.out));
  const auto of_field = gradient_of(to.field, to.out);
  // What every rank takes part in, although it computes nothing, also in the second derivative: the
  // same operators on one zero.
  const auto one_zero = [&](const at::Tensor& t, std::int64_t last) {
    Shape shape(n, 1);
    shape.back() = last;
    return at::zeros(shape, t.options()) + zeroed(t);
  };
  const auto nothing = [&](const at::Tensor& made) {
    return from_local(at::empty(to.out.local_shape(), made.options()) + made.sum(), to.out);
  };
  if (!any_distributed(to.field, 2)) {
    const at::Tensor local = to_local(field, of_field);
    if (to.out.local_numel() == 0)
      return nothing(
          at::grid_sampler(one_zero(local, 1), one_zero(grid, inner), mode, padding, align));
    return from_local(at::grid_sampler(local, grid, mode, padding, align), to.out);
  }
  const Sampling sampling{static_cast<at::native::GridSamplerInterpolation>(mode),
                          static_cast<at::native::GridSamplerPadding>(padding), align, inner == 2};
  std::vector<std::vector<Tap>> taps;
  // The last number of a grid's row is the first spatial dim.
  for (int d = 0; d < inner; ++d)
    taps.push_back(taps_of(grid.select(-1, inner - 1 - d), x.size(2 + d), sampling));
  const Halo halo = read_halo(to, taps, grid.numel() > 0);
  const at::Tensor near = halo_exchange(field, halo, of_field);
  // Nearest neighbours do not change with the grid: its gradient is zero, and so are the second
  // derivatives, but they exist.
  const at::Tensor still =
      mode == 1 ? zeroed(grid) + zeroed(near) * zeroed(grid).square() : at::Tensor();
  at::Tensor y;
  if (to.out.local_numel() > 0) {
    y = sampled(near, halo.needed(), taps, grid);
  } else {
    const at::Tensor zero = one_zero(grid, inner);
    for (int d = 0; d < inner; ++d) taps[d] = taps_of(zero.select(-1, d), 1, sampling);
    y = sampled(one_zero(near, 1), Box(n, Interval{0, 1}), taps, zero);
  }
  if (still.defined()) y = y + still;
  return to.out.local_numel() > 0 ? from_local(y, to.out) : nothing(y);
}

// Coordinates of n pixels from -1 to 1: of the outermost ones, or of their outer edges.
at::Tensor coordinates(std::int64_t n, bool align, const at::TensorOptions& options) {
  if (n <= 1) return at::zeros({n}, options);
  const at::Tensor outermost = at::linspace(-1, 1, n, options);
  return align ? outermost : outermost * (n - 1) / n;
}

// The grid of an affine map: a product of each sample's matrix with the coordinates of all pixels.
at::Tensor affine_grid_generator(const at::Tensor& theta, c10::SymIntArrayRef given, bool align) {
  const Shape size = C10_AS_INTARRAYREF_SLOW(given).vec();
  const auto inner = static_cast<std::int64_t>(size.size()) - 2;
  if ((inner != 2 && inner != 3) ||
      theta.sizes() != at::IntArrayRef{size.empty() ? 0 : size[0], inner, inner + 1})
    throw InvalidArgument("affine_grid_generator of matrices of shape ", theta.sizes(), " to size ",
                          list(size),
                          ": samples, channels and 2 or 3 spatial dims, and as many "
                          "matrices of 2 x 3 or 3 x 4 as samples");
  Shape to(size.begin() + 2, size.end());
  std::vector<at::Tensor> columns;
  for (std::int64_t d = inner; d-- > 0;) {
    const auto along = coordinates(to[d], align, meta_or_throw(theta).local.options());
    columns.push_back(as_dim(along, d, inner).expand(to));
  }
  columns.push_back(at::ones_like(columns[0]));
  const at::Tensor pixels = at::stack(columns, -1).view({-1, inner + 1});
  const at::Tensor grid =
      at::matmul(promote(pixels, context_of(meta_or_throw(theta).spec())), theta.transpose(1, 2));
  to.insert(to.begin(), size[0]);
  to.push_back(inner);
  return grid.view(to);
}

const AtStart registered([] {
  register_rules({"aten::grid_sampler_2d", "aten::grid_sampler_3d",
                  "aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"},
                 guarded(per_sample));
  register_decomposition("grid_sampler", grid_sampler);
  register_decomposition("affine_grid_generator", affine_grid_generator);
});

}  // namespace
}  // namespace tessera::detail::grid_sampling_rules
