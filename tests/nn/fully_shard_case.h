#pragma once
// What the tests of fully_shard() share: a model with what is awkward in it, and its comparison
// with one process.

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "size_counter.h"
#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::test {

using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;

// Residual blocks between two layers of the root's own; the first and the last may be tied, one
// block may be left out or called twice.
struct NetImpl : torch::nn::Module {
  struct Shape {
    std::int64_t in = 5, width = 7, hidden = 3;
    int blocks = 3;
    bool tied = false;
  };
  explicit NetImpl(Shape s) : shape(s) {
    first = register_module("first", Linear(s.in, s.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < s.blocks; ++i) {
      blocks->push_back(Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({s.width})),
                                   Linear(s.width, s.hidden + i), torch::nn::GELU(),
                                   Linear(s.hidden + i, s.width)));
    }
    scale = register_parameter("scale", torch::ones({}));
    bias = register_parameter("bias", torch::zeros({s.in}));
    if (s.tied) {
      last = register_parameter("last", first->weight);
    } else {
      last = register_parameter("last", torch::zeros({s.width, s.in}));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first->forward(x);
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      if (static_cast<int>(i) == skip) continue;
      if (static_cast<int>(i) == throws) throw std::runtime_error("in the middle");
      auto block = blocks->ptr<torch::nn::SequentialImpl>(i);
      h = h + block->forward(h);
      if (static_cast<int>(i) == twice) h = h - block->forward(h) * scale;
    }
    return h.matmul(last) * scale + bias;
  }
  Shape shape;
  Linear first = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  at::Tensor scale, bias, last;
  int skip = -1, twice = -1, throws = -1;
};
TORCH_MODULE(Net);

inline Net net_of(NetImpl::Shape shape, std::uint64_t seed = 11) {
  Net net(shape);
  net->to(at::kDouble);
  if (shape.tied) {
    // to() exchanges the data of each name
    net->last = net->first->weight;
  }
  fill(*net, seed);
  return net;
}

inline void expect_same(torch::nn::Module& got, torch::nn::Module& expected,
                        const std::string& where, bool gradients = true) {
  const auto a = got.named_parameters();
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor p = a[item.key()];
    EXPECT_LT(difference(p, item.value(), 1e-3), 1e-10) << where << " " << item.key();
    if (!gradients) continue;
    ASSERT_EQ(p.grad().defined(), item.value().grad().defined()) << where << " " << item.key();
    if (!p.grad().defined()) continue;
    EXPECT_LT(difference(p.grad(), item.value().grad(), 1e-3), 1e-10)
        << where << " gradient of " << item.key();
    EXPECT_TRUE(spec(p.grad()) == spec(p)) << where << " " << item.key();
  }
}

// A tied parameter has two names.
inline std::vector<at::Tensor> once(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters()) {
    if (std::ranges::none_of(all, [&](const at::Tensor& q) { return q.is_same(p); }))
      all.push_back(p);
  }
  return all;
}

// As clip_gradients(): torch's own adds 1e-6 to the norm.
inline double clip_plainly(const std::vector<at::Tensor>& parameters, double most) {
  double sum = 0;
  for (const at::Tensor& p : parameters) {
    if (p.grad().defined()) sum += p.grad().square().sum().item<double>();
  }
  const double norm = std::sqrt(sum);
  for (const at::Tensor& p : parameters) {
    if (p.grad().defined() && norm > most) p.grad().mul_(most / norm);
  }
  return norm;
}

inline at::Tensor loss_of(const at::Tensor& y) { return y.square().mean() + y.sin().mean(); }

inline std::map<std::string, std::pair<int, std::int64_t>> calls_of(const CommTrace& trace) {
  std::map<std::string, std::pair<int, std::int64_t>> all;
  for (const CommSummary& s : trace.summary()) {
    all[s.operation].first += static_cast<int>(s.count);
    all[s.operation].second += s.bytes;
  }
  return all;
}

// Samples sharded over all axes, in sizes drawn.
inline at::Tensor sharded(Draw& draw, const at::Tensor& x, const DeviceMesh& mesh) {
  const int axes = mesh.mesh().dims();
  return leaf(x,
              ShardSpec(mesh, x.sizes().vec(), std::vector<Placement>(axes, Shard(0)),
                        {{0, draw.sizes(x.size(0), mesh.mesh().size())}}),
              false);
}

// Saves its input alone, and runs the body again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const Body& body) {
    ctx->save_for_backward({x});
    bodies().push_back(body);
    ctx->saved_data["body"] = static_cast<std::int64_t>(bodies().size() - 1);
    return body(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    const at::AutoGradMode grad(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    bodies()[ctx->saved_data["body"].toInt()](x).backward(g[0]);
    return {x.grad(), at::Tensor()};
  }
  static std::vector<Body>& bodies() {
    static thread_local std::vector<Body> all;
    return all;
  }
};

inline const std::vector<std::vector<Axis>>& meshes() {
  static const std::vector<std::vector<Axis>> all{
      {{"x", 1}},           {{"x", 2}},           {{"x", 3}},           {{"x", 4}},
      {{"r", 2}, {"x", 2}}, {{"x", 2}, {"r", 2}}, {{"r", 3}, {"x", 1}}, {{"x", 3}, {"r", 1}}};
  return all;
}

}  // namespace tessera::test
