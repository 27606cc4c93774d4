// Whole networks on fields cut in space: losses, every parameter's gradient and running statistics are those of one process.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "support.h"
#include "tessera/tensor/distribute_module.h"
#include "tessera/tensor/halo_policy.h"

namespace tessera::test {

namespace {

using Shape = std::vector<std::int64_t>;
namespace nn = torch::nn;

nn::Conv2d conv(int in, int out, int kernel, int stride = 1, int padding = 0, int groups = 1) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(padding).groups(groups));
}

struct UNetImpl : nn::Module {
  UNetImpl()
      : first(register_module("first", conv(3, 6, 3, 1, 1))),
        second(register_module("second", conv(6, 8, 3, 1, 1))),
        third(register_module("third", conv(12, 4, 3, 1, 1))),
        last(register_module("last", conv(4, 2, 1))),
        up(register_module("up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 6, 2).stride(2)))),
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
        : path(register_module("path", nn::Sequential(conv(in, width, 1), nn::BatchNorm2d(width), nn::ReLU(), conv(width, width, 3, stride, 1),
                                                      nn::BatchNorm2d(width), nn::ReLU(), conv(width, out, 1), nn::BatchNorm2d(out)))) {
      if (in != out || stride != 1) side = register_module("side", nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)));
    }
    at::Tensor forward(const at::Tensor& x) { return torch::relu(path->forward(x) + (side ? side->forward(x) : x)); }
    nn::Sequential path, side{nullptr};
  };
  ResidualImpl()
      : stem(register_module("stem", nn::Sequential(conv(3, 6, 7, 2, 3), nn::BatchNorm2d(6), nn::ReLU(),
                                                    nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1))))),
        a(register_module("a", std::make_shared<BlockImpl>(6, 4, 8, 1))),
        b(register_module("b", std::make_shared<BlockImpl>(8, 4, 10, 2))),
        head(register_module("head", nn::Linear(10, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return head(torch::adaptive_avg_pool2d(b->forward(a->forward(stem->forward(x))), {1, 1}).flatten(1)); }
  nn::Sequential stem;
  std::shared_ptr<BlockImpl> a, b;
  nn::Linear head;
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

// Recomputes a module's forward in backward instead of keeping what it saved.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Context = torch::autograd::AutogradContext;
  using Call = std::function<at::Tensor(const at::Tensor&)>;
  struct Held : torch::CustomClassHolder {
    explicit Held(Call c) : call(std::move(c)) {}
    Call call;
  };
  static at::Tensor forward(Context* ctx, const at::Tensor& x, const Call& call) {
    ctx->save_for_backward({x});
    ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(call));
    const at::NoGradGuard no_grad;
    return call(x);
  }
  static torch::autograd::variable_list backward(Context* ctx, const torch::autograd::variable_list& g) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["call"].toCapsule());
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    const at::AutoGradMode enabled(true);
    held->call(x).backward(g[0]);
    return {x.grad(), at::Tensor()};
  }
};

struct How {
  bool checkpointed = false, accumulated = false, autocast = false;
};

struct Outcome {
  at::Tensor loss, output, input_gradient;
  std::vector<at::Tensor> gradients;
};

template <class Net>
Outcome run(Net& net, const at::Tensor& x, const How& how) {
  Outcome o;
  if (how.autocast) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  for (int step = 0; step < (how.accumulated ? 2 : 1); ++step) {
    const at::Tensor in = step ? x * 0.5 : x;
    o.output = how.checkpointed ? Checkpoint::apply(in, [&](const at::Tensor& t) { return net->forward(t); }) : net->forward(in);
    o.loss = o.output.to(at::kDouble).square().mean();
    o.loss.backward();
  }
  if (how.autocast) {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  o.input_gradient = x.grad();
  for (const auto& p : net->parameters()) o.gradients.push_back(p.grad());
  return o;
}

struct Layout {
  std::vector<Axis> axes;
  std::vector<Placement> placements;
  ShardSizes sizes;
};

const Shape kShape = {4, 3, 16, 24};
const std::vector<Layout> kLayouts = {
    {{{"domain", 3}}, {Shard(2)}, {{2, {5, 0, 11}}}},
    {{{"domain", 3}}, {Shard(3)}, {{3, {1, 20, 3}}}},
    {{{"y", 2}, {"x", 2}}, {Shard(2), Shard(3)}, {{2, {7, 9}}, {3, {13, 11}}}},
    {{{"data", 2}, {"domain", 2}}, {Shard(0), Shard(2)}, {{0, {1, 3}}, {2, {6, 10}}}},
};

template <class Make>
void compare(const char* name, Make make, const Layout& layout, const How& how = {}) {
  int ranks = 1;
  for (const Axis& a : layout.axes) ranks *= a.size;
  on_threads(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh(layout.axes);
    auto expected_net = make(), net = make();
    const at::ScalarType type = how.autocast ? at::kFloat : at::kDouble;
    // Two orders of the same bfloat16 sums differ by their rounding.
    const double tolerance = how.autocast ? 0.05 : 1e-10;
    for (auto* one : {&expected_net, &net}) {
      (*one)->to(type);
      fill(**one, 7);
    }
    const at::Tensor value = randn(kShape, type);
    const Outcome expected = run(expected_net, value.clone().requires_grad_(true), how);
    distribute_module(*net, mesh);
    const Outcome got = run(net, leaf(value, ShardSpec(mesh, kShape, layout.placements, layout.sizes)), how);
    EXPECT_LT(difference(got.loss, expected.loss), tolerance) << name;
    EXPECT_LT(difference(got.output, expected.output), tolerance) << name;
    EXPECT_LT(difference(got.input_gradient, expected.input_gradient), tolerance) << name;
    // Of a convolution before a norm the bias has no gradient but round-off: compared with the largest of all.
    double largest = 0;
    for (const auto& g : expected.gradients) largest = std::max(largest, g.abs().max().template item<double>());
    const auto names = net->named_parameters();
    for (std::size_t i = 0; i < got.gradients.size(); ++i) {
      const double off = (whole(got.gradients[i]) - expected.gradients[i]).abs().max().template item<double>();
      EXPECT_LT(off, tolerance * largest) << name << " " << names[i].key();
    }
    const auto buffers = net->buffers(), expected_buffers = expected_net->buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i) EXPECT_LT(difference(buffers[i], expected_buffers[i]), tolerance) << name << " buffer " << i;
  });
}

class Networks : public ::testing::TestWithParam<int> {};

TEST_P(Networks, UNet) {
  compare("unet", [] { return UNet(); }, kLayouts[GetParam()]);
}
TEST_P(Networks, ResidualStemAndBlocks) {
  compare("residual", [] { return Residual(); }, kLayouts[GetParam()]);
}
TEST_P(Networks, ConvNextBlock) {
  compare("convnext", [] { return ConvNext(); }, kLayouts[GetParam()]);
}
TEST_P(Networks, UNetCheckpointed) {
  compare("unet", [] { return UNet(); }, kLayouts[GetParam()], {.checkpointed = true});
}
TEST_P(Networks, UNetWithAccumulatedGradients) {
  compare("unet", [] { return UNet(); }, kLayouts[GetParam()], {.accumulated = true});
}
TEST_P(Networks, UNetUnderAutocast) {
  compare("unet", [] { return UNet(); }, kLayouts[GetParam()], {.autocast = true});
}

INSTANTIATE_TEST_SUITE_P(Layouts, Networks, ::testing::Range(0, 4));

}  // namespace

}  // namespace tessera::test
