#include "network.h"

#include "field.h"

namespace relief {

namespace {

constexpr std::int64_t reach = factor - 1;  // of the triangle, to each side

// One coarse column more on either side, as the globe goes on.
at::Tensor round_columns(const at::Tensor& field) {
  namespace F = torch::nn::functional;
  return F::pad(field, F::PadFuncOptions({1, 1, 0, 0}).mode(torch::kCircular));
}
// Of a transposed convolution of round_columns(): the columns of the globe.
at::Tensor own_columns(const at::Tensor& field, std::int64_t coarse_columns) {
  return field.narrow(3, factor, factor * coarse_columns);
}

}  // namespace

ReliefNetImpl::ReliefNetImpl(const NetworkOptions& options) {
  const at::Tensor side = 1 - (at::arange(-reach, reach + 1, at::kDouble) / factor).abs();
  triangle_ =
      register_buffer("triangle", at::outer(side, side).view({1, 1, 2 * reach + 1, 2 * reach + 1}));
  first_ =
      register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, options.coarse, 3)));
  second_ = register_module(
      "second", torch::nn::Conv2d(torch::nn::Conv2dOptions(options.coarse, options.coarse, 3)));
  finer_ = register_module(
      "finer", torch::nn::ConvTranspose2d(
                   torch::nn::ConvTranspose2dOptions(options.coarse, options.fine, 2 * reach + 1)
                       .stride(factor)
                       .padding(reach)));
  last_ = register_module("last", torch::nn::Conv2d(torch::nn::Conv2dOptions(options.fine, 1, 3)));
  // Before training the output is the interpolation.
  const torch::NoGradGuard no_grad;
  last_->weight.zero_();
  last_->bias.zero_();
}

at::Tensor ReliefNetImpl::coarsen(const at::Tensor& fine) {
  return at::conv2d(pad_globe(fine, reach), triangle_, {}, factor) / (factor * factor);
}

at::Tensor ReliefNetImpl::interpolate(const at::Tensor& coarse) {
  return own_columns(at::conv_transpose2d(round_columns(coarse), triangle_, {}, factor, reach),
                     coarse.size(3));
}

at::Tensor ReliefNetImpl::forward(const at::Tensor& coarse) {
  // Heights, and how each stands out from its neighbours, in numbers of order one.
  const at::Tensor detail = coarse - torch::avg_pool2d(pad_globe(coarse, 1), 3, 1);
  at::Tensor x = torch::relu(first_(pad_globe(torch::cat({0.3 * coarse, 5 * detail}, 1), 1)));
  x = torch::relu(second_(pad_globe(x, 1)));
  x = torch::relu(own_columns(finer_(round_columns(x)), coarse.size(3)));
  return interpolate(coarse) + 0.1 * last_(pad_globe(x, 1));
}

}  // namespace relief
