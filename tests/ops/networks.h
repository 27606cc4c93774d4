#pragma once
// Small networks of the kinds that work on fields: each has what is hard about its kind when the
// field is sharded in space.

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "tessera/ops/attention/neighborhood.h"

namespace tessera::test::networks_test {

namespace nn = torch::nn;

inline nn::Conv2d conv(int in, int out, int kernel, int stride = 1, int padding = 0,
                       int groups = 1) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(padding).groups(groups));
}

struct UNetImpl : nn::Module {
  UNetImpl()
      : first(register_module("first", conv(3, 6, 3, 1, 1))),
        second(register_module("second", conv(6, 8, 3, 1, 1))),
        third(register_module("third", conv(12, 4, 3, 1, 1))),
        last(register_module("last", conv(4, 2, 1))),
        up(register_module("up",
                           nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 6, 2).stride(2)))),
        batch(register_module("batch", nn::BatchNorm2d(6))),
        group(register_module("group", nn::GroupNorm(2, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor a = torch::relu(batch(first(x)));
    const at::Tensor b = torch::relu(group(second(torch::max_pool2d(a, 2))));
    return last(torch::gelu(third(torch::cat({up(b), a}, 1))));
  }
  nn::Conv2d first, second, third, last;
  nn::ConvTranspose2d up;
  nn::BatchNorm2d batch;
  nn::GroupNorm group;
};
TORCH_MODULE(UNet);

// The stem of a residual network, a bottleneck that halves, and one that does not.
struct ResidualImpl : nn::Module {
  struct BlockImpl : nn::Module {
    BlockImpl(int in, int width, int out, int stride)
        : path(register_module(
              "path", nn::Sequential(conv(in, width, 1), nn::BatchNorm2d(width), nn::ReLU(),
                                     conv(width, width, 3, stride, 1), nn::BatchNorm2d(width),
                                     nn::ReLU(), conv(width, out, 1), nn::BatchNorm2d(out)))) {
      if (in != out || stride != 1)
        side =
            register_module("side", nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)));
    }
    at::Tensor forward(const at::Tensor& x) {
      return torch::relu(path->forward(x) + (side ? side->forward(x) : x));
    }
    nn::Sequential path, side{nullptr};
  };
  /// `classifies`: with pooling and a linear head; else the field behind the blocks.
  explicit ResidualImpl(bool classifies = true)
      : stem(register_module(
            "stem", nn::Sequential(conv(3, 6, 7, 2, 3), nn::BatchNorm2d(6), nn::ReLU(),
                                   nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1))))),
        a(register_module("a", std::make_shared<BlockImpl>(6, 4, 8, 1))),
        b(register_module("b", std::make_shared<BlockImpl>(8, 4, 10, 2))) {
    if (classifies) head = register_module("head", nn::Linear(10, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor field = b->forward(a->forward(stem->forward(x)));
    return head ? head(torch::adaptive_avg_pool2d(field, {1, 1}).flatten(1)) : field;
  }
  nn::Sequential stem;
  std::shared_ptr<BlockImpl> a, b;
  nn::Linear head{nullptr};
};
TORCH_MODULE(Residual);

// Patches, a depthwise block with norms over channels, and a halving between stages.
struct ConvNextImpl : nn::Module {
  ConvNextImpl()
      : patches(register_module("patches", conv(3, 6, 4, 4))),
        depthwise(register_module("depthwise", conv(6, 6, 7, 1, 3, 6))),
        down(register_module("down", conv(6, 8, 2, 2))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})))),
        expand(register_module("expand", nn::Linear(6, 24))),
        contract(register_module("contract", nn::Linear(24, 6))) {
    gamma = register_parameter("gamma", torch::ones({6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor p = patches(x);
    const at::Tensor y = contract(torch::gelu(expand(norm(depthwise(p).permute({0, 2, 3, 1})))));
    return down(p + (gamma * y).permute({0, 3, 1, 2}));
  }
  nn::Conv2d patches, depthwise, down;
  nn::LayerNorm norm;
  nn::Linear expand, contract;
  at::Tensor gamma;
};
TORCH_MODULE(ConvNext);

// A block of neighbourhood attention after a tokenizer that halves twice the work: norm, heads over
// each position's surroundings, norm, a small MLP.
struct NeighborhoodImpl : nn::Module {
  NeighborhoodImpl()
      : tokens(register_module("tokens", conv(3, 6, 3, 2, 1))),
        before(register_module("before", nn::LayerNorm(nn::LayerNormOptions({6})))),
        qkv(register_module("qkv", nn::Linear(6, 18))),
        out(register_module("out", nn::Linear(6, 6))),
        after(register_module("after", nn::LayerNorm(nn::LayerNormOptions({6})))),
        up(register_module("up", nn::Linear(6, 12))),
        down(register_module("down", nn::Linear(12, 6))),
        head(register_module("head", conv(6, 2, 1))) {}
  at::Tensor attend(const at::Tensor& x) {
    const at::Tensor all = qkv(before(x)).reshape({x.size(0), x.size(1), x.size(2), 3, 2, 3});
    const at::Tensor y = neighborhood_attention_2d(all.select(3, 0), all.select(3, 1),
                                                   all.select(3, 2), {3, 5}, {2, 1});
    return out(y.reshape({x.size(0), x.size(1), x.size(2), 6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor t = tokens(x).permute({0, 2, 3, 1});
    t = t + attend(t);
    t = t + down(torch::gelu(up(after(t))));
    return head(t.permute({0, 3, 1, 2}));
  }
  nn::Conv2d tokens;
  nn::LayerNorm before;
  nn::Linear qkv, out;
  nn::LayerNorm after;
  nn::Linear up, down;
  nn::Conv2d head;
};
TORCH_MODULE(Neighborhood);

// Down and up again in every way there is: pooling and its inverse, pixels made of channels,
// interpolation by factor and to a size.
struct DecoderImpl : nn::Module {
  DecoderImpl()
      : first(register_module("first", conv(3, 4, 3, 1, 1))),
        deep(register_module("deep", conv(4, 16, 3, 2, 1))),
        side(register_module("side", conv(4, 3, 4, 3, 1))),
        last(register_module("last", conv(15, 2, 3, 1, 1))) {}
  at::Tensor forward(const at::Tensor& x) {
    namespace F = torch::nn::functional;
    const at::Tensor a = torch::relu(first(x));
    const auto [pooled, indices] = at::max_pool2d_with_indices(a, {2, 2});
    const at::Tensor back = at::max_unpool2d(torch::tanh(pooled), indices, {a.size(2), a.size(3)});
    const at::Tensor pixels = at::pixel_shuffle(torch::tanh(deep(a)), 2);
    const auto upsampled = [&](const at::Tensor& t, auto mode) {
      return F::interpolate(t, F::InterpolateFuncOptions()
                                   .size(std::vector<std::int64_t>{a.size(2), a.size(3)})
                                   .mode(mode)
                                   .align_corners(false));
    };
    const at::Tensor double_size = F::interpolate(
        torch::tanh(deep(a)).narrow(1, 0, 4),
        F::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest));
    return last(torch::cat(
        {back, pixels, upsampled(torch::tanh(side(a)), torch::kBicubic), double_size}, 1));
  }
  nn::Conv2d first, deep, side, last;
};
TORCH_MODULE(Decoder);

}  // namespace tessera::test::networks_test
