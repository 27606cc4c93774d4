// Pooling and padding of fields cut in any dims give the values, indices and gradients of plain libtorch.

#include <functional>

#include "support.h"
#include "tessera/tensor/halo_policy.h"

namespace tessera::test {

namespace {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<at::Tensor>;
using Function = std::function<Values(const at::Tensor&)>;

struct Case {
  std::string text;
  Shape shape;
  Function function;
};

// As field_spec of the convolutions' test, over all dims.
ShardSpec field_spec(Draw& draw, const DeviceMesh& mesh, const Shape& shape, int spatial) {
  std::vector<Placement> placements;
  std::map<int, int> parts;
  const int n = static_cast<int>(shape.size());
  for (const Axis& axis : mesh.layout().axes()) {
    const int d = draw.chance(85) ? n - 1 - draw.below(spatial) : draw.below(n);
    if (draw.chance(8)) {
      placements.push_back(Partial());
      continue;
    }
    placements.push_back(Shard(d));
    parts[d] = (parts.contains(d) ? parts[d] : 1) * axis.size;
  }
  ShardSizes all;
  for (const auto& [d, n_parts] : parts) all[d] = draw.sizes(shape[d], n_parts);
  return ShardSpec(mesh, shape, placements, all);
}

Case pooling(Draw& draw) {
  const int inner = draw.between(1, 3);
  Shape shape;
  if (draw.chance(70)) shape.push_back(draw.between(1, 2));
  shape.push_back(draw.between(1, 3));
  Shape kernel, stride, padding, dilation, sizes;
  const bool ceil = draw.chance(50), count = draw.chance(50);
  for (int i = 0; i < inner; ++i) {
    const std::int64_t k = draw.between(1, inner == 3 ? 3 : 5), l = draw.chance(70) ? 1 : 2, p = draw.below(static_cast<int>(k / 2) + 1);
    kernel.push_back(k);
    stride.push_back(draw.between(1, 4));
    padding.push_back(p);
    dilation.push_back(l);
    shape.push_back(std::max<std::int64_t>(draw.between(1, inner == 3 ? 6 : 11), l * (k - 1) + 1));
    sizes.push_back(draw.between(1, 5));
  }
  const std::string text = concat(inner, "d ", list(shape), " kernel ", list(kernel), " stride ", list(stride), " padding ", list(padding),
                                  " dilation ", list(dilation), ceil ? " ceil" : "", count ? " count" : "", " sizes ", list(sizes));
  const auto two = [](const std::tuple<at::Tensor, at::Tensor>& both) { return Values{std::get<0>(both), std::get<1>(both)}; };
  const std::optional<std::int64_t> divisor = draw.chance(20) ? std::optional<std::int64_t>(3) : std::nullopt;
  switch (draw.below(5)) {
    case 0:
      return {"max " + text, shape, [=](const at::Tensor& x) {
                return two(inner == 1   ? at::max_pool1d_with_indices(x, kernel, stride, padding, dilation, ceil)
                           : inner == 2 ? at::max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
                                        : at::max_pool3d_with_indices(x, kernel, stride, padding, dilation, ceil));
              }};
    case 1:
      return {"average " + text, shape, [=](const at::Tensor& x) {
                return Values{inner == 1   ? at::avg_pool1d(x, kernel, stride, padding, ceil, count)
                              : inner == 2 ? at::avg_pool2d(x, kernel, stride, padding, ceil, count, divisor)
                                           : at::avg_pool3d(x, kernel, stride, padding, ceil, count, divisor)};
              }};
    case 2:
      return {"adaptive average " + text, shape, [=](const at::Tensor& x) {
                return Values{inner == 1   ? at::adaptive_avg_pool1d(x, sizes)
                              : inner == 2 ? at::adaptive_avg_pool2d(x, sizes)
                                           : at::adaptive_avg_pool3d(x, sizes)};
              }};
    case 3:
      return {"adaptive max " + text, shape, [=](const at::Tensor& x) {
                return two(inner == 1   ? at::adaptive_max_pool1d(x, sizes)
                           : inner == 2 ? at::adaptive_max_pool2d(x, sizes)
                                        : at::adaptive_max_pool3d(x, sizes));
              }};
    default: {
      if (inner == 3) return pooling(draw);
      return {"lp " + text, shape, [=](const at::Tensor& x) {
                namespace F = torch::nn::functional;
                return Values{inner == 1 ? F::lp_pool1d(x.abs() + 0.1, F::LPPool1dFuncOptions(2, kernel[0]).stride(stride[0]).ceil_mode(ceil))
                                         : F::lp_pool2d(x.abs() + 0.1, F::LPPool2dFuncOptions(2, {kernel[0], kernel[1]})
                                                                           .stride(torch::ExpandingArray<2>({stride[0], stride[1]}))
                                                                           .ceil_mode(ceil))};
              }};
    }
  }
}

Case padding(Draw& draw) {
  const int inner = draw.between(1, 3);
  Shape shape{draw.between(1, 2), draw.between(1, 3)}, pads;
  for (int i = 0; i < inner; ++i) shape.push_back(draw.between(3, inner == 3 ? 5 : 9));
  const char* modes[] = {"constant", "reflect", "replicate", "circular"};
  const std::string mode = modes[draw.below(4)];
  for (int i = 0; i < 2 * inner; ++i) pads.push_back(draw.between(mode == "constant" ? -1 : 0, mode == "constant" || mode == "replicate" ? 4 : 2));
  const std::optional<double> value = mode == "constant" && draw.chance(60) ? std::optional<double>(1.5) : std::nullopt;
  return {concat(mode, " ", list(shape), " by ", list(pads)), shape, [=](const at::Tensor& x) { return Values{at::pad(x, pads, mode, value)}; }};
}

// The way of torch::nn: padding modes of a convolution are a pad and a convolution without.
Case padded_convolution(Draw& draw) {
  const Shape shape{draw.between(1, 2), 2, draw.between(4, 9), draw.between(4, 9)};
  const int mode = draw.below(3), k = draw.between(1, 4), p = draw.below(4), s = draw.between(1, 2);
  return {concat("convolution mode ", mode, " ", list(shape), " kernel ", k, " padding ", p, " stride ", s), shape, [=](const at::Tensor& x) {
            auto options = torch::nn::Conv2dOptions(2, 3, k).padding(p).stride(s);
            if (mode == 0) options.padding_mode(torch::kCircular);
            if (mode == 1) options.padding_mode(torch::kReflect);
            if (mode == 2) options.padding_mode(torch::kReplicate);
            torch::nn::Conv2d conv(options);
            conv->to(at::kDouble);
            fill(*conv, 3);
            return Values{conv(x)};
          }};
}

Values differentiate(const Case& c, const at::Tensor& x, std::uint64_t number) {
  Values all = c.function(x);
  seed(number);
  const at::Tensor weight = randn(all[0].sizes(), at::kDouble);
  (all[0] * weight).sum().backward();
  all.push_back(x.grad());
  return all;
}

void compare(const Case& c, const DeviceMesh& mesh, Draw& draw, std::uint64_t number, int spatial) {
  seed(number);
  const at::Tensor value = randn(c.shape, at::kDouble);
  const ShardSpec spec = field_spec(draw, mesh, c.shape, spatial);
  const Values expected = differentiate(c, value.clone().requires_grad_(true), number);
  try {
    const Values got = differentiate(c, leaf(value, spec), number);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(is_sharded(got[i]));
      EXPECT_LT(difference(got[i], expected[i]), 1e-10) << (i + 1 == got.size() ? "gradient" : "value ") << i << " of " << c.text << " on " << spec;
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    ADD_FAILURE() << std::string(e.what()).substr(0, 500) << ": " << c.text << " on " << spec;
  }
}

class Fields : public ::testing::TestWithParam<std::vector<Axis>> {
 protected:
  void run(const std::function<Case(Draw&)>& make, int cases, Policy policy = Policy::error) {
    int ranks = 1;
    for (const Axis& a : GetParam()) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = policy});  // halos are all that moves
      const auto mesh = manager.mesh(GetParam());
      for (int n = 0; n < cases; ++n) {
        const std::uint64_t number = 6007ull * static_cast<std::uint64_t>(n) + static_cast<std::uint64_t>(ranks);
        Draw draw(number);
        const Case c = make(draw);
        compare(c, mesh, draw, number, std::min<int>(3, static_cast<int>(c.shape.size()) - 1));
        if (::testing::Test::HasFailure()) return;
      }
    });
  }
};

TEST_P(Fields, PoolingIsThatOfOneProcess) { run(pooling, 300, Policy::allow); }
TEST_P(Fields, PaddingIsThatOfOneProcess) { run(padding, 200); }
TEST_P(Fields, PaddingModesOfConvolutionsAreThoseOfOneProcess) { run(padded_convolution, 60, Policy::allow); }

INSTANTIATE_TEST_SUITE_P(Meshes, Fields,
                         ::testing::Values(std::vector<Axis>{{"a", 1}}, std::vector<Axis>{{"a", 2}}, std::vector<Axis>{{"a", 3}},
                                           std::vector<Axis>{{"a", 2}, {"b", 2}}));

}  // namespace

}  // namespace tessera::test
