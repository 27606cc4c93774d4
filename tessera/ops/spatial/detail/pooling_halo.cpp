#include "tessera/ops/spatial/detail/pooling_halo.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "tessera/ops/rules/detail/windowed.h"

namespace tessera::detail {
namespace {

Box spatial(const Box& box, std::size_t lead) {
  return Box(box.begin() + static_cast<std::ptrdiff_t>(lead), box.end());
}

// Whether the boxes differ in their first dim at most: then positions differ by a number.
bool alike_but_for_rows(const Box& a, const Box& b) {
  return std::equal(a.begin() + 1, a.end(), b.begin() + 1);
}

at::Tensor shifted(const at::Tensor& flat, const Box& from, const Box& to) {
  std::int64_t row = 1;
  for (std::size_t d = 1; d < to.size(); ++d) row *= to[d].size();
  const std::int64_t by = (from[0].begin - to[0].begin) * row;
  return by == 0 ? flat : flat + by;
}

// Row-major positions in `from`, as positions in `to`; both boxes of global indices. What is
// outside of `to` is moved to its nearest edge.
at::Tensor moved(const at::Tensor& flat, const Box& from, const Box& to) {
  if (from == to) return flat;
  // A window that is greater than what is behind the array has its first element in it.
  if (from[0].begin >= to[0].begin && alike_but_for_rows(from, to)) return shifted(flat, from, to);
  const auto along = coordinates(flat, shape_of(from));
  at::Tensor result;
  for (std::size_t d = 0; d < from.size(); ++d) {
    const at::Tensor there = (along[d] + (from[d].begin - to[d].begin))
                                 .clamp(0, std::max<std::int64_t>(to[d].size() - 1, 0));
    result = result.defined() ? result * to[d].size() + there : there;
  }
  return result;
}

// Element k of the result's `dim` is the sum of t's elements in windows[k] there. What lies outside
// a window does not touch it, NaN and infinities neither.
at::Tensor windowed_sum(const at::Tensor& t, const std::vector<Interval>& windows,
                        std::int64_t dim) {
  const auto count = static_cast<std::int64_t>(windows.size());
  std::int64_t most = 1;
  for (const Interval& w : windows) most = std::max(most, w.size());
  std::vector<std::int64_t> from;
  std::vector<std::uint8_t> outside;
  for (const Interval& w : windows) {
    for (std::int64_t k = 0; k < most; ++k) {
      from.push_back(k < w.size() ? w.begin + k : 0);
      outside.push_back(k >= w.size());
    }
  }
  const at::Tensor picked =
      t.index_select(dim, at::tensor(from).to(t.device(), /*non_blocking=*/true));
  std::vector<std::int64_t> shape(t.dim() - dim, 1);
  shape[0] = count * most;
  const at::Tensor mask =
      at::tensor(outside).to(at::kBool).view(shape).to(t.device(), /*non_blocking=*/true);
  return picked.masked_fill(mask, 0).unflatten(dim, {count, most}).sum(dim + 1);
}

// Windows as libtorch computes them: with its own padding where that makes as many outputs, else on
// a box that reaches beyond the inputs.
struct Regular {
  Regular(const std::vector<PoolDim>& dims, const Box& outputs, const Box& inputs) : box(inputs) {
    const std::size_t lead = inputs.size() - dims.size();
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const Window& w = dims[i].window;
      const Interval &out = outputs[lead + i], &in = inputs[lead + i], all = w.inputs(out);
      const std::int64_t room = in.size() + 2 * w.padding - w.dilation * (w.kernel - 1) - 1;
      // libtorch's average of volumes wants as many inputs as the kernel has.
      const bool pads = in.size() >= w.kernel && room >= 0 && room / w.stride + 1 == out.size() &&
                        in.begin - all.begin == w.padding;
      if (!pads) box[lead + i] = all;
      kernel.push_back(w.kernel);
      stride.push_back(w.stride);
      padding.push_back(pads ? w.padding : 0);
      dilation.push_back(w.dilation);
    }
  }
  /// The inputs, with `fill` where the box is beyond them.
  at::Tensor filled(const at::Tensor& t, const Box& inputs, const at::Scalar& fill) const {
    if (box == inputs) return t;
    std::vector<std::int64_t> around;  // from the last dim on, as libtorch wants it
    for (std::size_t d = box.size(); d-- > 0;) {
      around.push_back(inputs[d].begin - box[d].begin);
      around.push_back(box[d].end - inputs[d].end);
    }
    return at::constant_pad_nd(t, around, fill);
  }
  std::vector<std::int64_t> kernel, stride, padding, dilation;
  Box box;
};

}  // namespace

Interval PoolDim::inside(std::int64_t o) const {
  if (adaptive) return {o * extent / outputs, ((o + 1) * extent + outputs - 1) / outputs};
  const std::int64_t begin = o * window.stride - window.padding;
  return {std::max<std::int64_t>(begin, 0), std::min(begin + window.kernel, extent)};
}

std::int64_t PoolDim::count(std::int64_t o, bool padded) const {
  if (adaptive || !padded) return inside(o).size();
  const std::int64_t begin = o * window.stride - window.padding;
  return std::min(begin + window.kernel, extent + window.padding) - begin;
}

Interval PoolDim::inputs(Interval out) const {
  if (out.size() == outputs) return {0, extent};
  return {inside(out.begin).begin,
          adaptive ? inside(out.end - 1).end : std::min(window.inputs(out).end, extent)};
}

PoolHalo::PoolHalo(ShardSpec x, const ShardSpec& y, const std::vector<PoolDim>& dims)
    : FieldHalo(std::move(x), y, dims.size(),
                [dims](std::size_t i, const Interval& out) { return dims[i].inputs(out); }),
      dims_(dims) {}

std::pair<at::Tensor, at::Tensor> PoolHalo::largest(const at::Tensor& x) const {
  HaloValues values = arrived(x);
  const auto shape = shape_of(out_);
  if (volume(out_) == 0)
    return {at::empty(shape, x.options()), at::empty(shape, x.options().dtype(at::kLong))};
  const at::Tensor in = values.assemble(halo_.needed());
  const Box of_array = mapped(dims_, [](const PoolDim& d) { return Interval{0, d.extent}; });
  if (!dims_[0].adaptive) {
    const Regular r(dims_, out_, halo_.needed());
    const at::Tensor all = r.filled(in, halo_.needed(), neutral(x.scalar_type(), false));
    auto [y, indices] =
        dims_.size() == 2
            ? at::max_pool2d_with_indices(all, r.kernel, r.stride, r.padding, r.dilation, false)
            : at::max_pool3d_with_indices(all, r.kernel, r.stride, r.padding, r.dilation, false);
    return {y, moved(indices, spatial(r.box, lead()), of_array)};
  }
  // Cell by cell: adaptive windows differ in size.
  at::Tensor y = at::empty(shape, x.options()),
             indices = at::empty(shape, x.options().dtype(at::kLong));
  const Box outputs = spatial(out_, lead()), of_box = spatial(halo_.needed(), lead());
  Box cell(outputs.size());
  const auto visit = [&](auto&& self, std::size_t d, at::Tensor from, at::Tensor to,
                         at::Tensor where) -> void {
    if (d == outputs.size()) {
      const auto [value, at] = from.flatten(static_cast<std::int64_t>(lead())).max(-1);
      to.copy_(value);
      where.copy_(moved(at, cell, of_array));
      return;
    }
    for (std::int64_t o = outputs[d].begin; o < outputs[d].end; ++o) {
      cell[d] = dims_[d].inside(o);
      const auto dim = static_cast<std::int64_t>(lead());
      self(self, d + 1,
           from.narrow(dim + static_cast<std::int64_t>(d), cell[d].begin - of_box[d].begin,
                       cell[d].size()),
           to.select(dim, o - outputs[d].begin), where.select(dim, o - outputs[d].begin));
    }
  };
  visit(visit, 0, in, y, indices);
  return {y, indices};
}

at::Tensor PoolHalo::largest_backward(const at::Tensor& gradient, const at::Tensor& indices,
                                      const at::Tensor& x) const {
  const Box& box = halo_.needed();
  at::Tensor of_box = at::zeros(shape_of(box), gradient.options());
  if (volume(out_) > 0) {
    const Box array = mapped(dims_, [](const PoolDim& d) { return Interval{0, d.extent}; });
    const auto first = static_cast<std::int64_t>(lead());
    const Box to = spatial(box, lead());
    // Those that the forward gave are in the box; others, which a caller has made up, are moved
    // into it, so that no rank fails alone.
    const at::Tensor at = alike_but_for_rows(array, to)
                              ? shifted(indices, array, to).clamp(0, volume(to) - 1)
                              : moved(indices, array, to);
    of_box.flatten(first).scatter_add_(-1, at.flatten(first), gradient.flatten(first));
  }
  return halo_.sum(of_box).to(x.scalar_type());
}

std::int64_t PoolHalo::divisor(bool count_padding, std::int64_t given) const {
  std::int64_t all = given;
  for (std::size_t i = 0; i < dims_.size() && given == 0; ++i) {
    const PoolDim& d = dims_[i];
    const Interval& outputs = out_[lead() + i];
    const std::int64_t first = d.count(outputs.begin, count_padding);
    for (std::int64_t o = outputs.begin; o < outputs.end; ++o)
      if (d.count(o, count_padding) != first) return 0;
    all = std::max<std::int64_t>(all, 1) * first;
  }
  return all;
}

at::Tensor PoolHalo::divided(const at::Tensor& t, bool count_padding) const {
  at::Tensor result = t;
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    const Interval& outputs = out_[lead() + i];
    std::vector<double> counts;
    for (std::int64_t o = outputs.begin; o < outputs.end; ++o)
      counts.push_back(static_cast<double>(dims_[i].count(o, count_padding)));
    const at::Tensor by = at::tensor(counts, at::kDouble).to(t.options(), /*non_blocking=*/true);
    result = result.div(as_dim(by, static_cast<std::int64_t>(lead() + i), t.dim()));
  }
  return result;
}

namespace {

// The inputs of the box that each output of a dim pools.
std::vector<Interval> pooled_inputs(const PoolDim& d, const Interval& outputs,
                                    const Interval& inputs) {
  std::vector<Interval> windows;
  for (std::int64_t o = outputs.begin; o < outputs.end; ++o) {
    const Interval in = intersect(d.inside(o), inputs);
    windows.push_back({in.begin - inputs.begin, in.end - inputs.begin});
  }
  return windows;
}

// The outputs that pool each input of the box, which are neighbours of each other.
std::vector<Interval> pooling_outputs(const PoolDim& d, const Interval& outputs,
                                      const Interval& inputs) {
  std::vector<Interval> windows(static_cast<std::size_t>(inputs.size()), {0, 0});
  const auto pooled = pooled_inputs(d, outputs, inputs);
  for (std::int64_t o = 0; o < outputs.size(); ++o) {
    for (std::int64_t i = pooled[o].begin; i < pooled[o].end; ++i) {
      Interval& w = windows[i];
      if (w.size() == 0) w.begin = o;
      w.end = o + 1;
    }
  }
  return windows;
}

}  // namespace

// Sums over regular windows are libtorch's; adaptive ones, which differ in size, are summed
// dim by dim.
at::Tensor PoolHalo::average(const at::Tensor& x, bool count_padding, std::int64_t given) const {
  HaloValues values = arrived(x);
  if (volume(out_) == 0) return at::empty(shape_of(out_), x.options());
  const Box& box = halo_.needed();
  // Windows are summed in float32 if the values are of half precision.
  at::Tensor t = values.assemble(box).to(at::toOpMathType(x.scalar_type()));
  if (!dims_[0].adaptive) {
    const Regular r(dims_, out_, box);
    t = r.filled(t, box, 0);
    const std::int64_t all = divisor(count_padding, given), by = all == 0 ? 1 : all;
    t = dims_.size() == 2 ? at::avg_pool2d(t, r.kernel, r.stride, r.padding, false, true, by)
                          : at::avg_pool3d(t, r.kernel, r.stride, r.padding, false, true, by);
    return (all == 0 ? divided(t, count_padding) : t).to(x.scalar_type());
  }
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    const std::size_t d = lead() + i;
    t = windowed_sum(t, pooled_inputs(dims_[i], out_[d], box[d]), static_cast<std::int64_t>(d));
  }
  return divided(t, false).contiguous().to(x.scalar_type());
}

at::Tensor PoolHalo::average_backward(const at::Tensor& gradient, const at::Tensor& x,
                                      bool count_padding, std::int64_t given) const {
  const Box& box = halo_.needed();
  at::Tensor t;
  if (volume(out_) == 0) {
    t = at::zeros(shape_of(box), x.options());
  } else if (!dims_[0].adaptive) {
    const Regular r(dims_, out_, box);
    const std::int64_t all = divisor(count_padding, given), by = all == 0 ? 1 : all;
    t = all == 0 ? divided(gradient, count_padding) : gradient;
    const at::Tensor like = at::empty(shape_of(r.box), x.options());
    t = dims_.size() == 2
            ? at::avg_pool2d_backward(t, like, r.kernel, r.stride, r.padding, false, true, by)
            : at::avg_pool3d_backward(t, like, r.kernel, r.stride, r.padding, false, true, by);
    t = slice(t, r.box, box);
  } else {
    t = divided(gradient, false);
    for (std::size_t i = 0; i < dims_.size(); ++i) {
      const std::size_t d = lead() + i;
      t = windowed_sum(t, pooling_outputs(dims_[i], out_[d], box[d]), static_cast<std::int64_t>(d));
    }
  }
  return halo_.sum(t);
}

}  // namespace tessera::detail
