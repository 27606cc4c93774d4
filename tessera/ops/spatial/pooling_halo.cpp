#include "tessera/ops/spatial/pooling_halo.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/max.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "tessera/ops/rules/windowed.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail {

namespace {

Box spatial(const Box& box, std::size_t lead) {
  return Box(box.begin() + static_cast<std::ptrdiff_t>(lead), box.end());
}

c10::Scalar lowest(at::ScalarType type) {
  if (at::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  switch (type) {
    case at::kByte:
      return 0;
    case at::kChar:
      return std::numeric_limits<std::int8_t>::min();
    case at::kShort:
      return std::numeric_limits<std::int16_t>::min();
    case at::kInt:
      return std::numeric_limits<std::int32_t>::min();
    default:
      return std::numeric_limits<std::int64_t>::min();
  }
}

// Row-major positions in `from`, as positions in `to`; both boxes of global indices. What lies
// outside of `to` goes to its nearest edge.
at::Tensor moved(at::Tensor flat, const Box& from, const Box& to) {
  if (from == to) return flat;
  at::Tensor result;
  std::int64_t stride = 1;
  for (std::size_t d = from.size(); d-- > 0;) {
    const at::Tensor along = d > 0 ? flat.remainder(from[d].size()) : flat;
    if (d > 0) flat = flat.div(from[d].size(), "floor");
    const at::Tensor there = (along + (from[d].begin - to[d].begin))
                                 .clamp(0, std::max<std::int64_t>(to[d].size() - 1, 0)) *
                             stride;
    result = result.defined() ? result + there : there;
    stride *= to[d].size();
  }
  return result;
}

// Applies a matrix [outputs, inputs] along a dim.
at::Tensor along(const at::Tensor& t, const at::Tensor& matrix, std::int64_t dim) {
  return t.movedim(dim, -1).matmul(matrix.t()).movedim(-1, dim);
}

// Windows as libtorch takes them; padding is in the box.
struct Regular {
  explicit Regular(const std::vector<PoolDim>& dims) : none(dims.size(), 0) {
    for (const PoolDim& d : dims) {
      kernel.push_back(d.window.kernel);
      stride.push_back(d.window.stride);
      dilation.push_back(d.window.dilation);
    }
  }
  std::vector<std::int64_t> kernel, stride, dilation, none;
};

}  // namespace

Interval PoolDim::inside(std::int64_t o) const {
  if (adaptive) return {o * extent / outputs, ((o + 1) * extent + outputs - 1) / outputs};
  const std::int64_t begin = o * window.stride - window.padding;
  return {std::max<std::int64_t>(begin, 0), std::min(begin + window.kernel, extent)};
}

std::int64_t PoolDim::padded_count(std::int64_t o) const {
  const std::int64_t begin = o * window.stride - window.padding;
  return std::min(begin + window.kernel, extent + window.padding) - begin;
}

Interval PoolDim::inputs(Interval out) const {
  if (out.empty()) return {0, 0};
  return adaptive ? Interval{inside(out.begin).begin, inside(out.end - 1).end} : window.inputs(out);
}

PoolHalo::PoolHalo(ShardSpec x, ShardSpec y, std::vector<PoolDim> dims)
    : x_(std::move(x)), y_(std::move(y)), dims_(std::move(dims)) {
  out_ = y_.sharding().box(context_of(y_)->position);
  halo_ = Halo(x_, std::vector<Edge>(x_.dims(), Edge::zero),
               [to = y_.sharding(), dims = dims_](int position) {
                 Box box = to.box(position);
                 if (volume(box) == 0) return Box(box.size());
                 for (std::size_t i = 0; i < dims.size(); ++i) {
                   Interval& one = box[box.size() - dims.size() + i];
                   one = dims[i].inputs(one);
                 }
                 return box;
               });
}

std::pair<at::Tensor, at::Tensor> PoolHalo::largest(const at::Tensor& x) const {
  HaloValues values = halo_.start_exchange(x);
  values.arrival().wait();
  const auto shape = shape_of(out_);
  if (volume(out_) == 0)
    return {at::empty(shape, x.options()), at::empty(shape, x.options().dtype(at::kLong))};
  const Box& box = halo_.needed();
  at::Tensor in = values.assemble(box);
  Box array(box.size());
  for (std::size_t d = 0; d < box.size(); ++d) array[d] = {0, x_.shape()[d]};
  // beyond the array: then `in` is our own
  for (const Box& strip : difference(box, array))
    part(in, box, strip).fill_(lowest(x.scalar_type()));
  const Box of_box = spatial(box, lead()), of_array = spatial(array, lead());
  if (!dims_[0].adaptive) {
    const Regular r(dims_);
    auto [y, indices] =
        dims_.size() == 2
            ? at::max_pool2d_with_indices(in, r.kernel, r.stride, r.none, r.dilation, false)
            : at::max_pool3d_with_indices(in, r.kernel, r.stride, r.none, r.dilation, false);
    return {y, moved(indices, of_box, of_array)};
  }
  // Cell by cell: adaptive windows differ in size.
  at::Tensor y = at::empty(shape, x.options()),
             indices = at::empty(shape, x.options().dtype(at::kLong));
  const Box outputs = spatial(out_, lead());
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
    Box array;
    for (const PoolDim& d : dims_) array.push_back({0, d.extent});
    const auto first = static_cast<std::int64_t>(lead());
    const at::Tensor at = moved(indices, array, spatial(box, lead()));
    of_box.flatten(first).scatter_add_(-1, at.flatten(first), gradient.flatten(first));
  }
  return halo_.sum(of_box).to(x.scalar_type());
}

at::Tensor PoolHalo::divided(const at::Tensor& t, bool count_padding, std::int64_t divisor) const {
  if (divisor != 0) return t.div(static_cast<double>(divisor));
  at::Tensor result = t;
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    const Interval& outputs = out_[lead() + i];
    std::vector<double> counts;
    for (std::int64_t o = outputs.begin; o < outputs.end; ++o)
      counts.push_back(static_cast<double>(count_padding && !dims_[i].adaptive
                                               ? dims_[i].padded_count(o)
                                               : dims_[i].inside(o).size()));
    std::vector<std::int64_t> shape(out_.size(), 1);
    shape[lead() + i] = outputs.size();
    result = result.div(at::tensor(counts, at::kDouble).view(shape).to(t.options()));
  }
  return result;
}

namespace {

// 1 where output o of a dim pools input i of the box.
at::Tensor membership(const PoolDim& d, const Interval& outputs, const Interval& inputs,
                      const at::TensorOptions& options) {
  std::vector<double> rows(static_cast<std::size_t>(outputs.size() * inputs.size()), 0);
  for (std::int64_t o = outputs.begin; o < outputs.end; ++o) {
    const Interval in = intersect(d.inside(o), inputs);
    for (std::int64_t i = in.begin; i < in.end; ++i)
      rows[static_cast<std::size_t>((o - outputs.begin) * inputs.size() + i - inputs.begin)] = 1;
  }
  return at::tensor(rows, at::kDouble).view({outputs.size(), inputs.size()}).to(options);
}

}  // namespace

// Sums over regular windows are libtorch's; over adaptive ones, which differ in size, one small
// matrix a dim.
at::Tensor PoolHalo::average(const at::Tensor& x, bool count_padding, std::int64_t divisor) const {
  HaloValues values = halo_.start_exchange(x);
  values.arrival().wait();
  if (volume(out_) == 0) return at::empty(shape_of(out_), x.options());
  const Box& box = halo_.needed();
  // Windows are summed in float32 where the values are of half precision.
  at::Tensor t = values.assemble(box).to(at::toOpMathType(x.scalar_type()));
  if (!dims_[0].adaptive) {
    const Regular r(dims_);
    t = dims_.size() == 2 ? at::avg_pool2d(t, r.kernel, r.stride, r.none, false, true, 1)
                          : at::avg_pool3d(t, r.kernel, r.stride, r.none, false, true, 1);
    return divided(t, count_padding, divisor).to(x.scalar_type());
  }
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    const std::size_t d = lead() + i;
    t = along(t, membership(dims_[i], out_[d], box[d], t.options()), static_cast<std::int64_t>(d));
  }
  return divided(t, count_padding, divisor).contiguous().to(x.scalar_type());
}

at::Tensor PoolHalo::average_backward(const at::Tensor& gradient, const at::Tensor& x,
                                      bool count_padding, std::int64_t divisor) const {
  const Box& box = halo_.needed();
  at::Tensor t;
  if (volume(out_) == 0) {
    t = at::zeros(shape_of(box), x.options());
  } else {
    t = divided(gradient, count_padding, divisor);
    if (!dims_[0].adaptive) {
      const Regular r(dims_);
      const at::Tensor like = at::empty(shape_of(box), x.options());
      return halo_.sum(
          dims_.size() == 2
              ? at::avg_pool2d_backward(t, like, r.kernel, r.stride, r.none, false, true, 1)
              : at::avg_pool3d_backward(t, like, r.kernel, r.stride, r.none, false, true, 1));
    }
    for (std::size_t i = 0; i < dims_.size(); ++i) {
      const std::size_t d = lead() + i;
      t = along(t, membership(dims_[i], out_[d], box[d], x.options()).t(),
                static_cast<std::int64_t>(d));
    }
  }
  return halo_.sum(t);
}

}  // namespace tessera::detail
