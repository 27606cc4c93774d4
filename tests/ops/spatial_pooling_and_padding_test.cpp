// Pooling and padding of fields sharded in any dims give the values, indices and gradients of plain
// libtorch.

#include "fields.h"

namespace tessera::test::spatial_pooling_and_padding_test {

namespace {

Case pooling(Draw& draw) {
  const int inner = draw.between(1, 3);
  Shape shape;
  if (draw.chance(70)) shape.push_back(draw.between(1, 2));
  shape.push_back(draw.between(1, 3));
  Shape kernel, stride, padding, dilation, sizes;
  const bool ceil = draw.chance(50), count = draw.chance(50);
  for (int i = 0; i < inner; ++i) {
    const std::int64_t k = draw.between(1, inner == 3 ? 4 : 7),
                       l = draw.chance(60) ? 1 : draw.between(2, 3),
                       p = draw.below(static_cast<int>(k / 2) + 1);
    kernel.push_back(k);
    stride.push_back(draw.between(1, 4));
    padding.push_back(p);
    dilation.push_back(l);
    shape.push_back(std::max<std::int64_t>(draw.between(1, inner == 3 ? 6 : 11), l * (k - 1) + 1));
    sizes.push_back(draw.between(1, 5));
  }
  const std::string text =
      concat(inner, "d ", list(shape), " kernel ", list(kernel), " stride ", list(stride),
             " padding ", list(padding), " dilation ", list(dilation), ceil ? " ceil" : "",
             count ? " count" : "", " sizes ", list(sizes));
  const auto two = [](const std::tuple<at::Tensor, at::Tensor>& both) {
    return Values{std::get<0>(both), std::get<1>(both)};
  };
  const std::optional<std::int64_t> divisor =
      draw.chance(20) ? std::optional<std::int64_t>(3) : std::nullopt;
  const auto pool = [&](const char* name) { return concat(name, " ", inner, "d"); };
  switch (draw.below(5)) {
    case 0:
      return {pool("max pooling"), inner, text, {shape}, [=](const Values& in) {
                const at::Tensor& x = in[0];
                return two(
                    inner == 1
                        ? at::max_pool1d_with_indices(x, kernel, stride, padding, dilation, ceil)
                    : inner == 2
                        ? at::max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
                        : at::max_pool3d_with_indices(x, kernel, stride, padding, dilation, ceil));
              }};
    case 1:
      return {
          pool("average pooling"), inner, text, {shape}, [=](const Values& in) {
            const at::Tensor& x = in[0];
            return Values{inner == 1 ? at::avg_pool1d(x, kernel, stride, padding, ceil, count)
                          : inner == 2
                              ? at::avg_pool2d(x, kernel, stride, padding, ceil, count, divisor)
                              : at::avg_pool3d(x, kernel, stride, padding, ceil, count, divisor)};
          }};
    case 2:
      return {pool("adaptive average pooling"), inner, text, {shape}, [=](const Values& in) {
                const at::Tensor& x = in[0];
                return Values{inner == 1   ? at::adaptive_avg_pool1d(x, sizes)
                              : inner == 2 ? at::adaptive_avg_pool2d(x, sizes)
                                           : at::adaptive_avg_pool3d(x, sizes)};
              }};
    case 3:
      return {pool("adaptive max pooling"), inner, text, {shape}, [=](const Values& in) {
                const at::Tensor& x = in[0];
                return two(inner == 1   ? at::adaptive_max_pool1d(x, sizes)
                           : inner == 2 ? at::adaptive_max_pool2d(x, sizes)
                                        : at::adaptive_max_pool3d(x, sizes));
              }};
    default: {
      if (inner == 3) return pooling(draw);
      return {
          pool("Lp pooling"), inner, text, {shape}, [=](const Values& in) {
            const at::Tensor& x = in[0];
            namespace F = torch::nn::functional;
            return Values{
                inner == 1
                    ? F::lp_pool1d(
                          x.abs() + 0.1,
                          F::LPPool1dFuncOptions(2, kernel[0]).stride(stride[0]).ceil_mode(ceil))
                    : F::lp_pool2d(x.abs() + 0.1,
                                   F::LPPool2dFuncOptions(2, {kernel[0], kernel[1]})
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
  for (int i = 0; i < 2 * inner; ++i)
    pads.push_back(draw.between(mode == "constant" ? -1 : 0,
                                mode == "constant" || mode == "replicate" ? 4 : 2));
  const std::optional<double> value =
      mode == "constant" && draw.chance(60) ? std::optional<double>(1.5) : std::nullopt;
  return {concat("pad, ", mode),
          inner,
          concat(list(shape), " by ", list(pads)),
          {shape},
          [=](const Values& in) {
            const at::Tensor& x = in[0];
            return Values{at::pad(x, pads, mode, value)};
          }};
}

// The way of torch::nn: padding modes of a convolution are a pad and a convolution without.
Case padded_convolution(Draw& draw) {
  const Shape shape{draw.between(1, 2), 2, draw.between(4, 9), draw.between(4, 9)};
  const int mode = draw.below(3), k = draw.between(1, 4), p = draw.below(4), s = draw.between(1, 2);
  return {"convolution of torch::nn with padding modes",
          2,
          concat("mode ", mode, " ", list(shape), " kernel ", k, " padding ", p, " stride ", s),
          {shape},
          [=](const Values& in) {
            const at::Tensor& x = in[0];
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

// One in four differentiates twice, where libtorch's formulas make whole tensors of zeros that what
// is cut is added to.
template <Case (*make)(Draw&)>
Case some_twice(Draw& draw) {
  Case c = make(draw);
  c.twice = draw.chance(25);
  c.moves = c.twice;
  return c;
}

TEST_P(Fields, PoolingIsThatOfOneProcess) { run(some_twice<pooling>, 400, true); }
TEST_P(Fields, PaddingIsThatOfOneProcess) { run(some_twice<padding>, 200); }
TEST_P(Fields, PaddingModesOfConvolutionsAreThoseOfOneProcess) {
  run(padded_convolution, 60, true);
}

INSTANTIATE_TEST_SUITE_P(Meshes, Fields, kFieldMeshes);

}  // namespace

}  // namespace tessera::test::spatial_pooling_and_padding_test
