// What the programs in C and Fortran train: a small network registered by name, and a TorchScript
// file of one.

#include "models.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/conv.h>

#include "tessera/base/error.h"
#include "tessera/c/models.h"

namespace {

// [1, 3, x, y] -> the same; no two directions alike.
struct Net : torch::nn::Module {
  Net() {
    first = register_module(
        "first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, {3, 5}).padding({1, 2})));
    last = register_module("last", torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 3, 3).padding(1)));
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(first(x))); }
  torch::nn::Conv2d first{nullptr}, last{nullptr};
};

}  // namespace

extern "C" void test_models(void) {
  tessera::register_model("net", [](const std::string& options) {
    if (!options.empty()) throw tessera::InvalidArgument("net has no options: '" + options + "'");
    auto net = std::make_shared<Net>();
    return tessera::CModel{net, [net](const std::vector<at::Tensor>& x) {
                             return std::vector{net->forward(x.at(0))};
                           }};
  });
  tessera::register_model("two", [](const std::string&) {
    auto net = std::make_shared<Net>();
    return tessera::CModel{net, [net](const std::vector<at::Tensor>& x) {
                             const at::Tensor y = net->forward(x.at(0) + x.at(1));
                             return std::vector{y, y * 2};
                           }};
  });
  tessera::register_model("none", [](const std::string&) { return tessera::CModel{}; });
}

extern "C" int test_script(const char* path) {
  try {
    at::manual_seed(11);
    torch::jit::Module module("Scripted");
    module.register_parameter("w1", at::randn({5, 3, 3, 3}) * 0.2, false);
    module.register_parameter("b1", at::randn({5}) * 0.1, false);
    module.register_parameter("w2", at::randn({3, 5, 3, 3}) * 0.2, false);
    for (const char* name : {"w1", "b1", "w2"}) module.attr(name).toTensor().requires_grad_();
    module.define(R"(
def forward(self, x):
    y = torch.tanh(torch.conv2d(x, self.w1, self.b1, [1, 1], [1, 1]))
    return x + torch.conv2d(y, self.w2, None, [1, 1], [1, 1])
)");
    module.save(path);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
