// unfold and fold (im2col, col2im) of fields sharded in samples, channels and rows. Windows are in
// one flat dim, row by row of the windows' grid, which can be divided between rows alone: a field
// sharded in columns is first redistributed to rows over the same axes.

#include <ATen/ops/col2im.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/im2col.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "tessera/ops/halo/halo.h"
#include "tessera/ops/rules/detail/field_map.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/partition/internal/window_call.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::unfolding_rules {
namespace {

struct Windows {
  Windows(const char* name, at::IntArrayRef kernel, at::IntArrayRef dilation,
          at::IntArrayRef padding, at::IntArrayRef stride, std::int64_t height, std::int64_t width)
      : image{height, width} {
    if (kernel.size() != 2 || dilation.size() != 2 || padding.size() != 2 || stride.size() != 2)
      throw InvalidArgument(name,
                            ": give kernel, dilation, padding and stride as two numbers each");
    for (int i = 0; i < 2; ++i) {
      if (image[i] > std::numeric_limits<std::int32_t>::max())
        throw InvalidArgument(name, " of a field of ", height, " x ", width, ": too large");
      dims[i] = {kernel[i], stride[i], padding[i], dilation[i]};
      dims[i].check();
      grid[i] = padding[i] < 0 || image[i] < 0 ? 0 : dims[i].outputs(image[i], padding[i]);
      if (grid[i] < 1 || image[i] < 1)
        throw InvalidArgument(name, " of a field of ", height, " x ", width, ": no window of ",
                              list(kernel.vec()), " with dilation ", list(dilation.vec()),
                              ", padding ", list(padding.vec()), " and stride ", list(stride.vec()),
                              " fits");
    }
  }
  std::int64_t each() const { return dims[0].kernel * dims[1].kernel; }

  Window dims[2];
  std::int64_t image[2], grid[2];
};

/// From an image to its columns and back, on this rank.
struct Unfolding {
  Unfolding(const Windows& w, const ShardSpec& image, const ShardSpec& c)
      : windows(w),
        columns(c),
        // The rows of the image that each rank's windows read.
        halo(image, std::vector<Edge>(image.dims(), Edge::zero),
             [from = image.sharding(), to = c.sharding(), w, h = image.dims() - 2](int position) {
               Box box = from.box(position);
               const Interval flat = to.box(position).back(),
                              rows{flat.begin / w.grid[1], flat.end / w.grid[1]};
               box[h] = w.dims[0].inputs(rows);
               return box;
             }) {}
  at::Tensor unfold(const at::Tensor& x) const {
    const at::Tensor box = halo.exchange(x);
    if (columns.local_numel() == 0) return at::empty(columns.local_shape(), x.options());
    const auto& [a, b] = windows.dims;
    return at::im2col(box, {a.kernel, b.kernel}, {a.dilation, b.dilation}, {0, b.padding},
                      {a.stride, b.stride});
  }
  at::Tensor fold(const at::Tensor& gradient) const {
    const Shape shape = shape_of(halo.needed());
    if (columns.local_numel() == 0) return halo.sum(at::zeros(shape, gradient.options()));
    const auto& [a, b] = windows.dims;
    return halo.sum(at::col2im(gradient.contiguous(), {shape[shape.size() - 2], shape.back()},
                               {a.kernel, b.kernel}, {a.dilation, b.dilation}, {0, b.padding},
                               {a.stride, b.stride}));
  }

  const Windows windows;
  const ShardSpec columns;
  const Halo halo;
};

void check_dims(const char* name, const at::Tensor& t, int least) {
  if (t.dim() != least && t.dim() != least + 1)
    throw InvalidArgument(name, " of a tensor of shape ", t.sizes(), ": it has ", least,
                          " dims, or ", least + 1, " with samples");
}

// The kernels accept some dtypes only: a call on one pixel checks that on every rank, also if a
// rank has no shard.
void check_dtype_of_image(const at::Tensor& t) {
  if (t.is_cpu()) at::im2col(at::zeros({1, 1, 1}, t.scalar_type()), {1, 1}, {1, 1}, {0, 0}, {1, 1});
}
void check_dtype_of_columns(const at::Tensor& t) {
  if (t.is_cpu())
    at::col2im(at::zeros({1, 1}, t.scalar_type()), {1, 1}, {1, 1}, {1, 1}, {0, 0}, {1, 1});
}

at::Tensor im2col(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef dilation,
                  at::IntArrayRef padding, at::IntArrayRef stride) {
  check_dims("im2col", self, 3);
  check_dtype_of_image(self);
  const Windows w("im2col", kernel, dilation, padding, stride, self.size(-2), self.size(-1));
  ShardSpec image = without_partial(spec(self));
  const int n = image.dims(), c = n - 3, h = n - 2;
  if (is_distributed(image, n - 1)) {
    auto placements = image.placements();
    for (Placement& p : placements)
      if (p.is_shard(n - 1)) p = Shard(h);
    image = image.with_placements(placements);
  }
  Shape shape(image.shape().begin(), image.shape().end() - 1);
  shape[c] *= w.each();
  shape[h] = w.grid[0] * w.grid[1];
  std::vector<std::pair<int, Partition>> parts;
  if (image.is_sharded(c)) parts.emplace_back(c, scaled(image.dim(c).partition, w.each()));
  if (image.is_sharded(h))
    parts.emplace_back(
        h, scaled(output_partition(image.dim(h).partition, w.dims[0], w.grid[0]), w.grid[1]));
  const ShardSpec columns = mapped_spec(image, shape, all_labels(n - 1), false, parts);
  const auto unfolding = std::make_shared<Unfolding>(w, image, columns);
  return apply("im2col", self,
               std::make_shared<FieldMap>(FieldMap{
                   image, columns, contiguous_strides(image.shape()), contiguous_strides(shape),
                   [unfolding](const at::Tensor& x) { return unfolding->unfold(x); },
                   [unfolding](const at::Tensor& g) { return unfolding->fold(g); }}));
}

at::Tensor col2im(const at::Tensor& self, c10::SymIntArrayRef output_size, at::IntArrayRef kernel,
                  at::IntArrayRef dilation, at::IntArrayRef padding, at::IntArrayRef stride) {
  check_dims("col2im", self, 2);
  check_dtype_of_columns(self);
  if (output_size.size() != 2)
    throw InvalidArgument("col2im to ", output_size.size(), " sizes: give two");
  const std::int64_t height = output_size[0].expect_int(), width = output_size[1].expect_int();
  const Windows w("col2im", kernel, dilation, padding, stride, height, width);
  const ShardSpec given = without_partial(spec(self));
  const int m = given.dims(), c = m - 2, l = m - 1;
  if (given.shape()[c] % w.each() != 0 || given.shape()[l] != w.grid[0] * w.grid[1])
    throw InvalidArgument("col2im of a tensor of shape ", list(given.shape()), " to ", height,
                          " x ", width, ": there are ", w.each(), " values in a window and ",
                          w.grid[0], " x ", w.grid[1], " windows");
  Shape shape = given.shape();
  shape[c] /= w.each();
  shape[l] = height;
  shape.push_back(width);
  std::vector<std::pair<int, Partition>> of_columns, of_image;
  if (given.is_sharded(c)) {
    of_image.emplace_back(c, in_units(given.dim(c).partition, w.each()));
    of_columns.emplace_back(c, scaled(of_image.back().second, w.each()));
  }
  if (given.is_sharded(l)) {
    const Partition rows = in_units(given.dim(l).partition, w.grid[1]);
    of_columns.emplace_back(l, scaled(rows, w.grid[1]));
    of_image.emplace_back(l, transposed_output_partition(rows, w.dims[0], height));
  }
  const ShardSpec columns = with_parts(given, of_columns);
  auto from = all_labels(m);
  from.push_back(-1);
  const ShardSpec image = mapped_spec(columns, shape, from, false, of_image);
  const auto unfolding = std::make_shared<Unfolding>(w, image, columns);
  return apply("col2im", self,
               std::make_shared<FieldMap>(FieldMap{
                   columns, image, contiguous_strides(columns.shape()), contiguous_strides(shape),
                   [unfolding](const at::Tensor& x) { return unfolding->fold(x); },
                   [unfolding](const at::Tensor& g) { return unfolding->unfold(g); }}));
}

const AtStart registered([] {
  register_decomposition("im2col", im2col);
  register_decomposition("col2im", col2im);
});

}  // namespace
}  // namespace tessera::detail::unfolding_rules
