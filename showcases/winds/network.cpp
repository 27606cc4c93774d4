#include "network.h"

namespace winds {

at::Tensor pad_sphere(const at::Tensor& field) {
  namespace F = torch::nn::functional;
  const at::Tensor round = F::pad(field, F::PadFuncOptions({1, 1, 0, 0}).mode(torch::kCircular));
  return F::pad(round, F::PadFuncOptions({0, 0, 1, 1}).mode(torch::kReplicate));
}

WindNetImpl::WindNetImpl(const NetworkOptions& options) {
  around_ =
      register_module("around", torch::nn::Conv2d(torch::nn::Conv2dOptions(options.input, 2, 1)));
  convolutions_ = register_module("convolutions", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < options.layers; ++i) {
    const std::int64_t in = i == 0 ? options.input : options.hidden,
                       out = i == options.layers - 1 ? 2 : options.hidden;
    convolutions_->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3)));
  }
  // Before training: the damped anomalies, and nothing from the convolutions.
  const torch::NoGradGuard no_grad;
  around_->weight.zero_();
  around_->bias.zero_();
  for (std::int64_t v = 0; v < 2; ++v) around_->weight[v][v][0][0] = 1;
  if (options.layers > 0) {
    auto& last =
        *convolutions_[static_cast<std::size_t>(options.layers - 1)]->as<torch::nn::Conv2d>();
    last.weight.zero_();
    last.bias.zero_();
  }
}

at::Tensor WindNetImpl::forward(const at::Tensor& input) {
  at::Tensor field = input;
  for (std::size_t i = 0; i < convolutions_->size(); ++i) {
    if (i > 0) field = torch::gelu(field);
    field = convolutions_[i]->as<torch::nn::Conv2d>()->forward(pad_sphere(field));
  }
  return convolutions_->is_empty() ? around_(input) : around_(input) + field;
}

}  // namespace winds
