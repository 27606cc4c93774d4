// check_module: what it says of modules that are safe, that are refused, and that are wrong.

#include <torch/library.h>
#include <torch/script.h>

#include <sstream>

#include "support.h"
#include "tessera/nn/check_module.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::check_module_test {

namespace {

at::Tensor twice(const at::Tensor& t) { return t * 2; }

TORCH_LIBRARY(tessera_check_tests, library) { library.def("twice(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(tessera_check_tests, CPU, library) { library.impl("twice", twice); }

at::Tensor call_twice(const at::Tensor& t) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_check_tests::twice", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(t);
}

// Gives its input, and a gradient that is wrong where ranks share it.
struct WrongGradient : torch::autograd::Function<WrongGradient> {
  using Context = torch::autograd::AutogradContext;
  static at::Tensor forward(Context*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(Context*, torch::autograd::variable_list g) {
    return {is_sharded(g[0]) ? g[0] * 1.001 : g[0]};
  }
};

struct FieldImpl : torch::nn::Cloneable<FieldImpl> {
  FieldImpl() { reset(); }
  void reset() override {
    convolution = register_module("convolution",
                                  torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    norm = register_module("norm", torch::nn::GroupNorm(2, 4));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return drop(at::gelu(norm(convolution(x)))).mean({2, 3});
  }
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::GroupNorm norm{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Field);

}  // namespace

TEST(CheckModule, OfASafeOne) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Field net;
    fill(*net, 4);
    const auto report = check_module(net, {randn({3, 2, 8, 6}, at::kDouble)}, mesh, {},
                                     {.placements = {{Shard(2)}}});
    EXPECT_TRUE(report.safe()) << report.to_string();
    EXPECT_EQ(report.values.size(), 1u);
    EXPECT_EQ(report.gradients.size(), 5u);  // the input's, and of four parameters
    EXPECT_GT(report.forward_bytes, 0);
    EXPECT_NE(report.to_string().find("safe: "), std::string::npos);
    for (const auto& p : net->parameters()) {
      EXPECT_FALSE(is_sharded(p));
      EXPECT_FALSE(p.grad().defined());
    }
    EXPECT_TRUE(net->drop->is_training()) << "the module itself stays as it is";
    EXPECT_THROW(check_module(net, {randn({1, 2, 4, 4}, at::kDouble)}, mesh, {},
                              {.placements = {{Shard(2)}, {Shard(2)}}}),
                 InvalidArgument);
  });
}

TEST(CheckModule, NamesWhatIsRefusedAndWhatDiffers) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(6, 4);
    net->to(at::kDouble);
    fill(*net, 4);
    const at::Tensor x = randn({5, 6}, at::kDouble);
    // Two refusals, with a use of what the first gave in between.
    auto report = check_module(
        *net,
        [](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
          const at::Tensor y = m.as<torch::nn::Linear>()->forward(t[0]);
          return std::vector<at::Tensor>{call_twice(call_twice(t[0]).narrow(1, 0, 4) + y.detach())};
        },
        {x}, mesh, {}, {.gradients = false});
    EXPECT_FALSE(report.safe());
    ASSERT_EQ(report.refused.size(), 2u) << "not the first one alone";
    EXPECT_EQ(report.refused[0].op, "tessera_check_tests::twice");
    EXPECT_TRUE(report.values[0].equal()) << report.to_string();
    // Outside of a check it is refused as ever.
    EXPECT_THROW(call_twice(distribute_tensor(x, mesh, {Shard(0)})), NoRuleError);
    EXPECT_EQ(distribute_tensor(x, mesh, {Shard(0)}).sum().sizes().size(), 0u);
    report = check_module(
        *net,
        [&](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
          const at::Tensor y = m.as<torch::nn::Linear>()->forward(t[0]);
          return std::vector<at::Tensor>{is_sharded(y) ? y * 1.001 : y};
        },
        {x}, mesh);
    EXPECT_FALSE(report.safe());
    EXPECT_FALSE(report.values[0].equal());
    EXPECT_NE(report.to_string().find("differs: output"), std::string::npos);
  });
}

TEST(CheckModule, JudgesFloatByDoubleAndComparesWhatRanksGiveFirst) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(6, 4);
    fill(*net, 4);
    // Off by a hundredth where it is sharded: in float32 alone, as rounding may be, or always.
    const auto off = [](bool always) {
      return [always](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
        const at::Tensor y = m.as<torch::nn::Linear>()->forward(t[0]);
        const bool slips = is_sharded(y) && (always || y.scalar_type() == at::kFloat);
        return std::vector<at::Tensor>{slips ? y * 1.01 : y};
      };
    };
    const at::Tensor x = randn({5, 6});
    const auto report = check_module(*net, off(false), {x}, mesh);
    EXPECT_TRUE(report.safe()) << report.to_string();
    EXPECT_GT(report.values[0].rounding.value_or(0), 1e-3);
    EXPECT_NE(report.to_string().find("rounded differently"), std::string::npos);
    EXPECT_FALSE(check_module(*net, off(false), {x}, mesh, {}, {.tolerance = 1e-4}).safe());
    EXPECT_FALSE(check_module(*net, off(true), {x}, mesh).safe());
    EXPECT_THROW(check_module(*net, off(false), {x + manager.rank()}, mesh), MismatchError);
    if (manager.rank() == 1) net->bias.data().add_(1);
    try {
      check_module(*net, off(false), {x}, mesh);
      ADD_FAILURE() << "of parameters that differ nothing is said";
    } catch (const MismatchError& e) {
      EXPECT_NE(std::string(e.what()).find("parameter 'bias' differs between ranks 0 and 1"),
                std::string::npos)
          << e.what();
    }
  });
}

// What it computes is right: of its backward alone can it be told.
TEST(CheckModule, NamesGradientsThatDiffer) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(6, 4);
    net->to(at::kDouble);
    fill(*net, 4);
    const std::vector<at::Tensor> x = {randn({5, 6}, at::kDouble)};
    const auto slips_at = [&](const std::string& where) {
      return [where](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
        const auto slips = [&](const at::Tensor& v, const char* name) {
          return name == where ? WrongGradient::apply(v) : v;
        };
        const auto& layer = *m.as<torch::nn::Linear>();
        return std::vector<at::Tensor>{at::linear(
            slips(t[0], "input 0"), slips(layer.weight, "weight"), slips(layer.bias, "bias"))};
      };
    };
    EXPECT_TRUE(check_module(*net, slips_at("nowhere"), x, mesh).safe());
    for (const std::string where : {"input 0", "weight", "bias"}) {
      const auto report = check_module(*net, slips_at(where), x, mesh);
      EXPECT_FALSE(report.safe()) << where;
      EXPECT_TRUE(report.refused.empty()) << report.to_string();
      EXPECT_TRUE(report.values[0].equal()) << report.to_string();
      ASSERT_EQ(report.gradients.size(), 3u);
      for (const CheckedValue& g : report.gradients)
        EXPECT_EQ(g.equal(), g.name != "gradient of " + where) << report.to_string();
      EXPECT_NE(report.to_string().find("NOT SAFE"), std::string::npos);
      EXPECT_NE(report.to_string().find("differs: gradient of " + where), std::string::npos);
      // What compares no gradients cannot see it.
      EXPECT_TRUE(check_module(*net, slips_at(where), x, mesh, {}, {.gradients = false}).safe());
    }
  });
}

// Buffers that forward writes to are values too.
TEST(CheckModule, NamesBuffersThatDiffer) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::BatchNorm1d net(4);
    net->to(at::kDouble);
    fill(*net, 4);
    const std::vector<at::Tensor> x = {randn({5, 4}, at::kDouble)};
    for (const double slip : {1.0, 1.5}) {
      const auto report = check_module(*net,
                                       [&](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
                                         auto& norm = *m.as<torch::nn::BatchNorm1d>();
                                         const at::Tensor y = norm.forward(t[0]);
                                         const at::NoGradGuard no_grad;
                                         if (is_sharded(t[0])) norm.running_mean.mul_(slip);
                                         return std::vector<at::Tensor>{y};
                                       },
                                       x, mesh, {}, {.gradients = false});
      EXPECT_EQ(report.safe(), slip == 1) << report.to_string();
      EXPECT_EQ(report.to_string().find("differs: buffer running_mean") == std::string::npos,
                slip == 1)
          << report.to_string();
    }
    EXPECT_EQ(net->running_mean.abs().max().item<double>(), 0) << "the module itself";
  });
}

// What one rank alone sees is in every rank's report.
TEST(CheckModule, SaysTheSameOnEveryRank) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    torch::nn::Linear net(6, 4);
    net->to(at::kDouble);
    fill(*net, 4);
    const std::vector<at::Tensor> x = {randn({5, 6}, at::kDouble)};
    for (const int off : {-1, 0, 2}) {  // this rank's value of a plain output
      const auto report = check_module(
          *net,
          [&](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
            const at::Tensor y = m.as<torch::nn::Linear>()->forward(t[0]);
            const double mine = is_sharded(t[0]) && manager.rank() == off ? 2 : 1;
            return std::vector<at::Tensor>{y, at::full({2}, mine, at::kDouble)};
          },
          x, mesh);
      EXPECT_EQ(report.safe(), off < 0) << off << ": " << report.to_string();
    }
  });
}

TEST(CheckModule, OfOutputsThatAreNotThereOrHaveNoGradient) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(6, 4);
    net->to(at::kDouble);
    fill(*net, 4);
    const std::vector<at::Tensor> x = {randn({5, 6}, at::kDouble)};
    auto report = check_module(
        *net,
        [](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
          return std::vector<at::Tensor>{m.as<torch::nn::Linear>()->forward(t[0]), at::Tensor()};
        },
        x, mesh);
    EXPECT_TRUE(report.safe()) << report.to_string();
    for (const bool of_sharded : {false, true}) {
      report = check_module(
          *net,
          [&](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
            const at::Tensor y = m.as<torch::nn::Linear>()->forward(t[0]);
            return std::vector<at::Tensor>{is_sharded(y) == of_sharded ? y.detach() : y};
          },
          x, mesh);
      EXPECT_FALSE(report.safe()) << "a gradient on one side alone: " << report.to_string();
    }
    EXPECT_THROW(check_module(*net, {}, x, mesh), InvalidArgument);
    EXPECT_THROW(check_module(net, {at::Tensor()}, mesh), InvalidArgument);
  });
}

// As torch::jit::load() gives it: one rank and two train alike.
TEST(ScriptModules, DistributeAndTrain) {
  const auto make = [] {
    test::seed(5);
    torch::jit::Module net("net");
    net.register_parameter("weight", randn({2, 2, 3, 3}, at::kDouble), false);
    net.register_parameter("scale", randn({2, 1, 1}, at::kDouble), false);
    net.register_buffer("shift", randn({2, 1, 1}, at::kDouble));
    // the form that traces have
    net.define(R"(
def forward(self, x):
    y = torch._convolution(x, self.weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                           False, False, True, True)
    return torch.relu(y) * self.scale + self.shift
)");
    for (auto p : net.parameters()) p.requires_grad_(true);
    std::stringstream file;
    net.save(file);
    return torch::jit::load(file);
  };
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    test::seed(1);
    const at::Tensor field = randn({3, 2, 8, 6}, at::kDouble);
    const auto trained = [](torch::jit::Module& net, const at::Tensor& x) {
      at::Tensor y;
      for (int step = 0; step < 3; ++step) {
        for (auto p : net.parameters()) p.mutable_grad() = at::Tensor();
        y = net.forward({x}).toTensor();
        y.square().mean().backward();
        const at::NoGradGuard guard;
        for (auto p : net.parameters()) p.sub_(p.grad(), 0.1);
      }
      return y;
    };
    auto alone = make(), mine = make();
    distribute_module(mine, mesh);
    const at::Tensor expected = trained(alone, field),
                     got = trained(mine, distribute_tensor(field, mesh, {Shard(2)}));
    EXPECT_TRUE(spec(got).placements()[0].is_shard(2));
    EXPECT_LT(difference(got, expected), 1e-12);
  });
}

// Frozen, its weights are constants: plain tensors, as ever replicated.
TEST(ScriptModules, FrozenOnesRunAndWhatIsRefusedIsSaid) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    test::seed(5);
    torch::jit::Module net("net");
    net.register_parameter("weight", randn({4, 6}, at::kDouble), false);
    net.register_attribute("training", c10::BoolType::get(), false);
    net.define(R"(
def forward(self, x):
    return torch.relu(torch.linear(x, self.weight)).softmax(-1)
)");
    const at::Tensor value = randn({5, 6}, at::kDouble), expected = net.forward({value}).toTensor(),
                     rows = distribute_tensor(value, mesh, {Shard(0)}, {{0, {5, 0}}});
    torch::jit::Module frozen = torch::jit::freeze(net);
    distribute_module(frozen, mesh);
    distribute_module(net, mesh);
    for (int run = 0; run < 4; ++run) {  // the executor rewrites the graph after the first ones
      for (torch::jit::Module* one : {&frozen, &net}) {
        const at::Tensor got = one->forward({rows}).toTensor();
        EXPECT_TRUE(spec(got).placements()[0].is_shard(0));
        EXPECT_LT(difference(got, expected), 1e-13);
      }
    }
    const auto said = [](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const std::exception& e) {
        return e.what();
      }
      return "nothing was thrown";
    };
    std::stringstream file;
    EXPECT_NE(said([&] { net.save(file); }).find("tessera::save"), std::string::npos)
        << said([&] { net.save(file); });
    const DeviceMesh other = manager.mesh({{"y", 2}});
    const at::Tensor elsewhere = distribute_tensor(value, other, {Shard(0)});
    EXPECT_NE(said([&] { net.forward({elsewhere}); }).find("two meshes"), std::string::npos);
    EXPECT_LT(difference(net.forward({rows}).toTensor(), expected), 1e-13) << "the next one works";
  });
}

}  // namespace tessera::test::check_module_test
