// Interpolation, unfolding, unpooling, shuffles and sampling by a grid of fields sharded in any
// dims give the values and derivatives of plain libtorch.

#include "fields.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test::spatial_resampling_test {

namespace {

// By name: libtorch 2.11 has none.
constexpr const char* kLanczos = "aten::_upsample_lanczos2d_aa";

bool has_lanczos() { return c10::Dispatcher::singleton().findSchema({kLanczos, ""}).has_value(); }

at::Tensor lanczos(const at::Tensor& x, const Shape& sizes, const std::optional<double>& height,
                   const std::optional<double>& width) {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow(kLanczos, "")
                      .typed<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, bool,
                                        std::optional<double>, std::optional<double>)>();
  return op.call(x, c10::fromIntArrayRefSlow(sizes), false, height, width);
}

Case interpolation(Draw& draw) {
  static const std::vector<std::pair<int, std::string>> modes = {
      {1, "nearest"},       {1, "nearest-exact"}, {1, "linear"},    {2, "nearest"},
      {2, "nearest-exact"}, {2, "bilinear"},      {2, "bicubic"},   {2, "aa"},
      {2, "aa bicubic"},    {3, "nearest"},       {3, "trilinear"}, {2, "bilinear"},
      {3, "nearest-exact"}, {2, "aa lanczos"},
  };
  const auto& [inner, drawn] = draw.of(modes);
  const std::string mode = drawn == "aa lanczos" && !has_lanczos() ? "aa bicubic" : drawn;
  Shape shape{draw.between(1, 2), draw.between(1, 3)};
  // Three in ten in a simple ratio, where libtorch's own operator can be called on a box.
  const int ratio = draw.below(10), by_scale = draw.below(10) < 4;
  Shape sizes;
  std::vector<std::optional<double>> scales;
  for (int d = 0; d < inner; ++d) {
    std::int64_t n = draw.between(1, inner == 3 ? 7 : 13);
    if (ratio == 1) n += n % 2;
    shape.push_back(n);
    const double scale = ratio == 0   ? 2
                         : ratio == 1 ? 0.5
                         : ratio == 2 ? 1.5
                                      : 0.3 + 0.1 * draw.below(30);
    const auto m = std::max<std::int64_t>(
        1, by_scale || ratio < 3 ? static_cast<std::int64_t>(static_cast<double>(n) * scale)
                                 : draw.between(1, 19));
    // libtorch's antialiased kernels disagree with themselves, row-major and channels_last, about
    // results of width 1.
    sizes.push_back(mode.starts_with("aa") ? std::max<std::int64_t>(m, 2) : m);
    // Where a size stays, whatever the scale, either libtorch's forward or its backward takes it
    // for a copy: its gradient is not that of its forward.
    const bool copied = sizes.back() == n && mode != "nearest" && mode != "nearest-exact";
    // More outputs than the scale gives lie behind the input, where libtorch's antialiased kernels
    // read whatever stands behind their buffer.
    const bool behind = sizes.back() > m;
    scales.push_back(by_scale && !copied && !behind ? std::optional(scale) : std::nullopt);
  }
  // which libtorch's own front end refuses with corners
  const bool align = draw.chance(40) && mode != "aa lanczos";
  std::string text = concat(list(shape), " to ", list(sizes), align ? " corners" : "");
  for (const auto& s : scales) text += s ? concat(" scale ", *s) : "";
  const std::string name = mode == "aa"              ? "bilinear, antialiased"
                           : mode.starts_with("aa ") ? mode.substr(3) + ", antialiased"
                                                     : mode;
  Case c{concat("interpolation ", inner, "d, ", name),
         inner,
         text,
         {shape},
         [=, inner = inner](const Values& in) {
           const at::Tensor& x = in[0];
           const auto s = [&](int d) { return scales[d]; };
           if (mode == "nearest")
             return Values{inner == 1   ? at::upsample_nearest1d(x, sizes, s(0))
                           : inner == 2 ? at::upsample_nearest2d(x, sizes, s(0), s(1))
                                        : at::upsample_nearest3d(x, sizes, s(0), s(1), s(2))};
           if (mode == "nearest-exact")
             return Values{inner == 1 ? at::_upsample_nearest_exact1d(x, sizes, s(0))
                           : inner == 2
                               ? at::_upsample_nearest_exact2d(x, sizes, s(0), s(1))
                               : at::_upsample_nearest_exact3d(x, sizes, s(0), s(1), s(2))};
           if (mode == "linear") return Values{at::upsample_linear1d(x, sizes, align, s(0))};
           if (mode == "bilinear")
             return Values{at::upsample_bilinear2d(x, sizes, align, s(0), s(1))};
           if (mode == "bicubic")
             return Values{at::upsample_bicubic2d(x, sizes, align, s(0), s(1))};
           if (mode == "aa")
             return Values{at::_upsample_bilinear2d_aa(x, sizes, align, s(0), s(1))};
           if (mode == "aa bicubic")
             return Values{at::_upsample_bicubic2d_aa(x, sizes, align, s(0), s(1))};
           if (mode == "aa lanczos") return Values{lanczos(x, sizes, s(0), s(1))};
           return Values{at::upsample_trilinear3d(x, sizes, align, s(0), s(1), s(2))};
         }};
  // libtorch's backward knows no scale where the size stays or doubles
  c.linear = mode != "nearest" || !by_scale;
  c.twice = draw.chance(25);
  return c;
}

struct Windowed {
  Shape kernel, dilation, padding, stride, image, grid;
  Windowed(Draw& draw) {
    for (int d = 0; d < 2; ++d) {
      const std::int64_t k = draw.between(1, 7), l = draw.between(1, 3), s = draw.between(1, 4),
                         p = draw.below(4);
      const std::int64_t n = std::max<std::int64_t>(draw.between(1, 10), (k - 1) * l + 1 - 2 * p);
      kernel.push_back(k);
      dilation.push_back(l);
      padding.push_back(p);
      stride.push_back(s);
      image.push_back(n);
      grid.push_back((n + 2 * p - (k - 1) * l - 1) / s + 1);
    }
  }
  std::string text() const {
    return concat(list(image), " kernel ", list(kernel), " dilation ", list(dilation), " padding ",
                  list(padding), " stride ", list(stride));
  }
};

Case unfolding(Draw& draw) {
  const Windowed w(draw);
  Shape shape;
  if (draw.chance(70)) shape.push_back(draw.between(1, 3));
  shape.push_back(draw.between(1, 3));
  shape.insert(shape.end(), w.image.begin(), w.image.end());
  Case c{"unfold (im2col)", 2, concat(list(shape), " ", w.text()), {shape}, [w](const Values& in) {
           return Values{at::im2col(in[0], w.kernel, w.dilation, w.padding, w.stride)};
         }};
  c.linear = true;
  c.moves = true;  // from shards of columns to shards of rows
  c.twice = draw.chance(25);
  return c;
}

Case folding(Draw& draw) {
  const Windowed w(draw);
  Shape shape;
  if (draw.chance(70)) shape.push_back(draw.between(1, 3));
  shape.push_back(draw.between(1, 3) * w.kernel[0] * w.kernel[1]);
  shape.push_back(w.grid[0] * w.grid[1]);
  Case c{"fold (col2im)", 1, concat(list(shape), " ", w.text()), {shape}, [w](const Values& in) {
           return Values{at::col2im(in[0], w.image, w.kernel, w.dilation, w.padding, w.stride)};
         }};
  c.linear = true;
  c.moves = true;  // to complete windows of a row
  c.twice = draw.chance(25);
  return c;
}

Case shuffling(Draw& draw) {
  const std::int64_t r = draw.between(1, 3), h = draw.between(1, 5), w = draw.between(1, 5);
  Shape shape;
  if (draw.chance(70)) shape.push_back(draw.between(1, 2));
  const int kind = shape.empty() ? draw.below(2) : draw.below(3);
  Case c;
  if (kind == 0) {
    shape.insert(shape.end(), {draw.between(1, 3) * r * r, h, w});
    c = {"pixel_shuffle", 2, concat(list(shape), " by ", r), {shape}, [r](const Values& in) {
           return Values{at::pixel_shuffle(in[0], r)};
         }};
  } else if (kind == 1) {
    shape.insert(shape.end(), {draw.between(1, 3), h * r, w * r});
    c = {"pixel_unshuffle", 2, concat(list(shape), " by ", r), {shape}, [r](const Values& in) {
           return Values{at::pixel_unshuffle(in[0], r)};
         }};
  } else {
    shape.insert(shape.end(), {draw.between(1, 3) * r, h, w});
    c = {"channel_shuffle", 2, concat(list(shape), " by ", r), {shape}, [r](const Values& in) {
           return Values{at::channel_shuffle(in[0], r)};
         }};
  }
  c.moves = true;  // boundaries inside of a joined block
  c.linear = true;
  return c;
}

// Indices of a pooling, whose windows may overlap, or any at all.
Case unpooling(Draw& draw) {
  const int inner = draw.between(1, 3);
  Shape lead;
  if (draw.chance(70)) lead.push_back(draw.between(1, 2));
  lead.push_back(draw.between(1, 3));
  Shape kernel, stride, whole_shape = lead, pooled = lead, output;
  for (int d = 0; d < inner; ++d) {
    kernel.push_back(draw.between(1, 3));
    stride.push_back(draw.between(1, 3));
    const std::int64_t n = draw.between(static_cast<int>(kernel[d]), inner == 3 ? 6 : 11);
    whole_shape.push_back(n);
    output.push_back(n);
    pooled.push_back((n - kernel[d]) / stride[d] + 1);
  }
  at::Tensor indices;
  if (draw.chance(70)) {
    const at::Tensor x = randn(whole_shape, at::kDouble);
    indices = std::get<1>(inner == 1   ? at::max_pool1d_with_indices(x, kernel, stride)
                          : inner == 2 ? at::max_pool2d_with_indices(x, kernel, stride)
                                       : at::max_pool3d_with_indices(x, kernel, stride));
  } else {
    std::int64_t places = 1;
    for (const auto n : output) places *= n;
    indices = randint(places, pooled);
  }
  Case c{
      concat("max unpooling ", inner, "d"),
      inner,
      concat(list(pooled), " to ", list(output)),
      {pooled},
      [=](const Values& in) {
        // as torch::nn
        if (inner == 1)
          return Values{at::max_unpool2d(in[0].unsqueeze(-2), in[1].unsqueeze(-2), {1, output[0]})
                            .squeeze(-2)};
        return Values{inner == 2 ? at::max_unpool2d(in[0], in[1], output)
                                 : at::max_unpool3d(in[0], in[1], output, stride, Shape(3, 0))};
      }};
  c.constants = {indices};
  c.others = [](Draw&, const ShardSpec& field, std::size_t) {
    auto placements = field.placements();
    for (Placement& p : placements) {
      if (p.is_partial()) p = Replicate();
    }
    return field.with_placements(placements);
  };
  c.twice = draw.chance(25);
  return c;
}

// Whether libtorch has the second derivative of sampling in this mode: 2.11 has none, later ones
// do.
bool samples_twice(int inner, int mode) {
  static const auto all = [] {
    std::map<std::pair<int, int>, bool> can;
    for (const auto& [n, m] : {std::pair(2, 0), {2, 1}, {2, 2}, {3, 0}, {3, 1}}) {
      Shape of_grid(n + 2, 1);
      of_grid.back() = n;
      const at::Tensor x = at::ones(Shape(n + 2, 1), at::kDouble).requires_grad_(true),
                       grid = at::zeros(of_grid, at::kDouble).requires_grad_(true);
      try {
        const auto first = torch::autograd::grad(
            {at::grid_sampler(x, grid, m, 0, false).square().sum()}, {x, grid}, {}, true, true);
        (void)torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {x, grid});
        can[{n, m}] = true;
      } catch (const std::exception&) {  // "derivative ... is not implemented"
        can[{n, m}] = false;
      }
    }
    return can;
  }();
  return all.at({inner, mode});
}

Case sampling(Draw& draw) {
  const int inner = draw.between(2, 3), mode = draw.below(inner == 2 ? 3 : 2),
            padding = draw.below(3);
  const bool align = draw.chance(50);
  Shape field{draw.between(1, 2), draw.between(1, 3)}, grid{field[0]};
  for (int d = 0; d < inner; ++d) {
    field.push_back(draw.between(1, inner == 2 ? 9 : 5));
    grid.push_back(draw.between(1, inner == 2 ? 7 : 4));
  }
  grid.push_back(inner);
  Case c{concat("grid_sample ", inner, "d, ",
                std::vector<std::string>{"bilinear", "nearest", "bicubic"}[mode]),
         inner,
         concat(list(field), " by ", list(grid), " padding ", padding, align ? " corners" : ""),
         {field, grid},
         [=](const Values& in) {
           return Values{at::grid_sampler(in[0], in[1], mode, padding, align)};
         }};
  const bool alike = draw.chance(70);
  c.moves = !alike;
  c.twice = draw.chance(25) && samples_twice(inner, mode);
  if (alike) {
    c.others = [grid, inner](Draw& d, const ShardSpec& of_field, std::size_t) {
      std::vector<Placement> placements;
      std::map<int, int> parts;
      const auto& axes = of_field.mesh().mesh().axes();
      for (std::size_t a = 0; a < axes.size(); ++a) {
        const Placement p = of_field.placements()[a];
        placements.push_back(p.is_shard(0)               ? Shard(0)
                             : p.is_shard() && p.dim > 1 ? Shard(p.dim - 1)
                                                         : Replicate());
        if (placements.back().is_shard()) {
          const int dim = placements.back().dim;
          parts[dim] = (parts.contains(dim) ? parts[dim] : 1) * axes[a].size;
        }
      }
      ShardSizes sizes;
      for (const auto& [dim, n] : parts)
        sizes[dim] = dim == 0 ? of_field.dim(0).partition.sizes() : d.sizes(grid[dim], n);
      return ShardSpec(of_field.mesh(), grid, placements, sizes);
    };
  }
  return c;
}

class Resampling : public Fields {};

TEST_P(Resampling, InterpolationIsThatOfOneProcess) { run(interpolation, 500); }
TEST_P(Resampling, UnfoldingIsThatOfOneProcess) { run(unfolding, 150); }
TEST_P(Resampling, FoldingIsThatOfOneProcess) { run(folding, 150); }
TEST_P(Resampling, ShufflesAreThoseOfOneProcess) { run(shuffling, 120); }
TEST_P(Resampling, UnpoolingIsThatOfOneProcess) { run(unpooling, 200); }
TEST_P(Resampling, SamplingByAGridIsThatOfOneProcess) { run(sampling, 300); }

INSTANTIATE_TEST_SUITE_P(Meshes, Resampling, kFieldMeshes);

// Points of a grid that fall on the middle between two pixels, or on one: the side that libtorch
// takes.
TEST(Sampling, TiesGoWhereLibtorchPutsThem) {
  on_ranks(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"domain", 2}});
    for (const std::int64_t n : {4, 5, 7}) {
      const at::Tensor theta =
          torch::tensor({1.0, 0.0, 0.0, 0.0, 1.0, 0.0}, at::kDouble).view({1, 2, 3});
      const at::Tensor value = randn({1, 2, n, 6}, at::kDouble);
      for (const bool align : {false, true}) {
        for (const std::int64_t m : {n, 2 * n}) {
          const at::Tensor points = at::affine_grid_generator(theta, {1, 2, m, 6}, align);
          for (int mode = 0; mode < 3; ++mode) {
            for (int padding = 0; padding < 3; ++padding) {
              const auto sample = [&](const at::Tensor& x, const at::Tensor& g) {
                const at::Tensor y = at::grid_sampler(x, g, mode, padding, align);
                return std::pair(y, torch::autograd::grad({y.square().sum()}, {x, g}));
              };
              const auto [expected, of_expected] =
                  sample(value.clone().requires_grad_(true), points.clone().requires_grad_(true));
              const auto [got, of_got] = sample(
                  leaf(value, ShardSpec(mesh, value.sizes().vec(), {Shard(2)}, {{2, {n - 1, 1}}})),
                  leaf(points,
                       ShardSpec(mesh, points.sizes().vec(), {Shard(1)}, {{1, {1, m - 1}}})));
              const std::string where = concat(n, " to ", m, " mode ", mode, " padding ", padding,
                                               align ? " corners" : "");
              EXPECT_LT(difference(got, expected), 1e-12) << where;
              for (int i = 0; i < 2; ++i)
                EXPECT_LT(difference(of_got[i], of_expected[i]), 1e-10)
                    << "gradient " << i << " of " << where;
            }
          }
        }
      }
    }
  });
}

TEST(Sampling, WhatIsSampledOfAFieldInSpaceLiesInRows) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const at::Tensor field = randn({1, 2, 6, 5}, at::kDouble),
                     grid = at::rand({1, 4, 3, 2}, at::kDouble) * 2 - 1;
    for (const int cut : {2, 3}) {
      const at::Tensor x = distribute_tensor(field, mesh, {Shard(cut)});
      const at::Tensor y =
          at::grid_sampler(x, distribute_tensor(grid, mesh, {Replicate()}), 0, 0, false);
      EXPECT_TRUE(spec(y).is_sharded(2)) << spec(y);
    }
  });
}

// Only the halo is sent: one row per rank for a doubling, and no more for any other factor than the
// rows that its outputs read.
TEST(Interpolation, NoRankReceivesMoreThanItsOutputsRead) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const at::Tensor x =
        leaf(randn({1, 1, 40, 8}, at::kDouble), ShardSpec(mesh, {1, 1, 40, 8}, {Shard(2)}), false);
    const auto bytes = [&](const std::function<at::Tensor()>& f) {
      CommTraceScope trace(mesh.group(0));
      (void)f();
      std::int64_t sum = 0;
      for (const CommSummary& call : trace->summary()) sum += call.bytes;
      return sum;
    };
    const std::int64_t row = 8 * 8;  // what an exchange counts is sent and received
    EXPECT_EQ(bytes([&] { return at::upsample_bilinear2d(x, {80, 16}, false); }), 2 * row);
    EXPECT_EQ(bytes([&] { return at::upsample_bicubic2d(x, {80, 16}, false); }), 4 * row);
    EXPECT_EQ(bytes([&] { return at::upsample_nearest2d(x, {80, 16}); }), 0);
    EXPECT_EQ(bytes([&] { return at::upsample_nearest2d(x, {20, 16}); }), 0);
    EXPECT_LE(bytes([&] { return at::upsample_bilinear2d(x, {57, 16}, true); }), 2 * row);
  });
}

TEST(Interpolation, LiesInMemoryAsThatOfOneProcess) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const at::Tensor value =
        randn({2, 3, 6, 5}, at::kDouble).contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor x = leaf(value, ShardSpec(mesh, {2, 3, 6, 5}, {Shard(2)}, {{2, {1, 5}}}));
    const at::Tensor got = at::upsample_bilinear2d(x, {9, 7}, false),
                     expected = at::upsample_bilinear2d(value, {9, 7}, false);
    EXPECT_EQ(got.strides(), expected.strides());
    EXPECT_LT(difference(got, expected), 1e-12);
  });
}

TEST(Interpolation, OtherTypes) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    const ShardSpec cut(mesh, {1, 2, 64, 5}, {Shard(2)}, {{2, {40, 0, 24}}});
    for (const auto& [type, tolerance] :
         {std::pair(at::kFloat, 1e-5), {at::kHalf, 2e-3}, {at::kBFloat16, 1e-2}}) {
      const at::Tensor value = randn({1, 2, 64, 5}).to(type);
      for (const std::int64_t m : {128, 97, 31}) {
        EXPECT_LT(difference(at::upsample_bilinear2d(leaf(value, cut), {m, 7}, false),
                             at::upsample_bilinear2d(value, {m, 7}, false)),
                  tolerance)
            << type;
        EXPECT_LT(difference(at::upsample_bicubic2d(leaf(value, cut), {m, 7}, true),
                             at::upsample_bicubic2d(value, {m, 7}, true)),
                  tolerance)
            << type;
        EXPECT_LT(difference(at::upsample_nearest2d(leaf(value, cut), {m, 7}),
                             at::upsample_nearest2d(value, {m, 7})),
                  1e-300)
            << type;
      }
    }
    const at::Tensor bytes = randint(256, {1, 2, 64, 5}).to(at::kByte);
    EXPECT_TRUE(whole(at::upsample_nearest2d(leaf(bytes, cut, false), {90, 3}))
                    .equal(at::upsample_nearest2d(bytes, {90, 3})));
    set_policies(manager, {.redistribution = Policy::error});
    EXPECT_THROW(at::upsample_bilinear2d(leaf(bytes, cut, false), {90, 3}, false),
                 ImplicitRedistributionError);
    set_policies(manager, {});
  });
}

// What libtorch rounds differs from kernel to kernel: complete fields are computed, bit for bit.
TEST(Interpolation, RoundedBytesAreThoseOfOneProcess) {
  on_ranks(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"domain", 3}});
    Draw draw(7);
    for (int i = 0; i < 16; ++i) {
      const std::int64_t channels = draw.between(2, 5), rows = draw.between(2, 20);
      const at::Tensor values = randint(256, {2, channels, rows, 6}).to(at::kByte);
      const at::Tensor bytes =
          draw.chance(50) ? values.contiguous(at::MemoryFormat::ChannelsLast) : values;
      const ShardSpec lies(mesh, {2, channels, rows, 6}, {Shard(2)}, {{2, draw.sizes(rows, 3)}});
      const std::vector<std::int64_t> to = {draw.between(1, 30), draw.between(1, 9)};
      for (const auto& f : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
               [&](const at::Tensor& t) { return at::upsample_bilinear2d(t, to, false); },
               [&](const at::Tensor& t) { return at::upsample_bicubic2d(t, to, true); },
               [&](const at::Tensor& t) { return at::_upsample_bilinear2d_aa(t, to, false); }}) {
        const at::Tensor got = f(leaf(bytes, lies, false));
        ASSERT_EQ(spec(got).placements(), lies.placements()) << spec(got);
        ASSERT_TRUE(whole(got).equal(f(bytes))) << spec(got) << " from " << lies;
      }
    }
    set_policies(manager, {});
  });
}

TEST(Resampled, WhatDoesNotFitIsRefusedOnEveryRank) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const at::Tensor x =
        leaf(randn({1, 1, 4, 3}, at::kDouble), ShardSpec(mesh, {1, 1, 4, 3}, {Shard(2)}), false);
    EXPECT_THROW(at::upsample_bilinear2d(x, {0, 3}, false), InvalidArgument);
    EXPECT_THROW(at::upsample_linear1d(x, {3}, false), InvalidArgument);
    EXPECT_THROW(at::im2col(x, {9, 1}, {1, 1}, {0, 0}, {1, 1}), InvalidArgument);
    EXPECT_THROW(at::col2im(x.select(0, 0), {4, 4}, {2, 2}, {1, 1}, {0, 0}, {1, 1}),
                 InvalidArgument);
    // One rank alone has an index that is out of range.
    const at::Tensor indices = at::zeros({1, 1, 4, 3}, at::kLong);
    indices[0][0][3][2] = 30;
    EXPECT_THROW(at::max_unpool2d(x, leaf(indices, spec(x)), {5, 6}), InvalidArgument);
    EXPECT_THROW(at::grid_sampler(x,
                                  leaf(randn({1, 2, 2, 3}, at::kDouble),
                                       ShardSpec(mesh, {1, 2, 2, 3}, {Shard(1)}), false),
                                  0, 0, false),
                 std::exception);
  });
}

}  // namespace

}  // namespace tessera::test::spatial_resampling_test
