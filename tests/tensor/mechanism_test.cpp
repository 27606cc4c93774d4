// The mechanism, with everything replicated: what differs from plain libtorch here is the
// mechanism's fault, not a rule's. Suites are named after the rules that the mechanism keeps; more
// of them: mechanism_rules_test.cpp, sharded_views_test.cpp.

#include <ATen/autocast_mode.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "support.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::test {

namespace {

DeviceMesh one_axis(DistributedManager& manager) {
  return manager.mesh({{"x", manager.world_size()}});
}

at::Tensor replicated(const at::Tensor& t, const DeviceMesh& mesh, bool requires_grad = false) {
  return leaf(t, ShardSpec::replicated(mesh, t.sizes().vec()), requires_grad);
}

// Runs on a mesh of one and of two.
void everywhere(const std::function<void(DistributedManager&, const DeviceMesh&)>& body) {
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [&](DistributedManager& manager) { body(manager, one_axis(manager)); });
  }
}

struct Result {
  at::Tensor output, input_gradient;
  std::vector<at::Tensor> gradients;
};

template <class Module, class Forward>
Result run(Module& module, const at::Tensor& input, Forward forward) {
  Result r;
  r.output = forward(module, input);
  test::seed(5);
  const at::Tensor weight = randn(r.output.sizes(), at::kDouble);
  (r.output * weight).sum().backward();
  r.input_gradient = input.grad();
  for (const auto& p : module->parameters()) r.gradients.push_back(p.grad());
  return r;
}

// The module with plain input; then with replicated input, its parameters plain or distributed;
// inputs contiguous or transposed in memory.
template <class Make, class Forward>
void compare(const char* name, Make make, const std::vector<std::int64_t>& shape, Forward forward) {
  everywhere([&](DistributedManager&, const DeviceMesh& mesh) {
    for (const bool transposed : {false, true}) {
      for (const bool distributed : {false, true}) {
        auto expected_module = make();
        auto module = make();
        expected_module->to(at::kDouble);
        module->to(at::kDouble);
        fill(*expected_module, 1);
        fill(*module, 1);
        test::seed(2);
        at::Tensor value = randn(shape, at::kDouble);
        if (transposed) value = value.transpose(0, -1).contiguous().transpose(0, -1);
        const at::Tensor plain = value.clone(at::MemoryFormat::Preserve).requires_grad_(true);
        const Result expected = run(expected_module, plain, forward);
        if (distributed) distribute_module(*module, mesh);
        const at::Tensor x = replicated(value, mesh, true);
        ASSERT_EQ(x.strides(), value.strides());
        const Result got = run(module, x, forward);
        const std::string where =
            concat(name, " transposed ", transposed, " distributed ", distributed);
        EXPECT_EQ(got.output.strides(), expected.output.strides()) << where;
        EXPECT_LT(difference(got.output, expected.output), 1e-12) << where;
        EXPECT_LT(difference(got.input_gradient, expected.input_gradient), 1e-12) << where;
        for (std::size_t i = 0; i < got.gradients.size(); ++i) {
          ASSERT_EQ(got.gradients[i].defined(), expected.gradients[i].defined())
              << where << " parameter " << i;
          if (!got.gradients[i].defined()) continue;
          EXPECT_EQ(is_sharded(got.gradients[i]), distributed) << where << " parameter " << i;
          EXPECT_LT(difference(got.gradients[i], expected.gradients[i]), 1e-12)
              << where << " parameter " << i;
        }
      }
    }
  });
}

const auto call = [](auto& module, const at::Tensor& x) { return module->forward(x); };

}  // namespace

// ---- modules ----

TEST(Modules, Linear) {
  compare("Linear", [] { return torch::nn::Linear(6, 3); }, {4, 5, 6}, call);
}
TEST(Modules, Conv2d) {
  compare(
      "Conv2d", [] { return torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)); },
      {2, 3, 5, 4}, call);
}
TEST(Modules, Conv2dCircular) {
  compare(
      "Conv2d circular",
      [] {
        return torch::nn::Conv2d(
            torch::nn::Conv2dOptions(3, 4, 3).padding(1).padding_mode(torch::kCircular));
      },
      {2, 3, 5, 4}, call);
}
TEST(Modules, BatchNorm) {
  compare("BatchNorm2d", [] { return torch::nn::BatchNorm2d(3); }, {4, 3, 5, 4}, call);
}
TEST(Modules, LayerNorm) {
  compare(
      "LayerNorm", [] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})); }, {4, 5, 6},
      call);
}
TEST(Modules, GroupNorm) {
  compare("GroupNorm", [] { return torch::nn::GroupNorm(2, 4); }, {3, 4, 5}, call);
}
TEST(Modules, Lstm) {
  compare(
      "LSTM",
      [] { return torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2).batch_first(true)); },
      {3, 4, 6}, [](auto& m, const at::Tensor& x) { return std::get<0>(m->forward(x)); });
}
TEST(Modules, Gru) {
  compare(
      "GRU", [] { return torch::nn::GRU(torch::nn::GRUOptions(6, 5)); }, {3, 4, 6},
      [](auto& m, const at::Tensor& x) { return std::get<0>(m->forward(x)); });
}
TEST(Modules, MultiheadAttention) {
  compare(
      "MultiheadAttention", [] { return torch::nn::MultiheadAttention(8, 2); }, {5, 3, 8},
      [](auto& m, const at::Tensor& x) { return std::get<0>(m->forward(x, x, x)); });
}
TEST(Modules, Transformer) {
  compare(
      "TransformerEncoderLayer",
      [] {
        return torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0));
      },
      {5, 3, 8}, call);
}

TEST(Modules, EveryOptimizerTakesTheSameSteps) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const auto train = [&](int kind, bool sharded) {
      torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(),
                                torch::nn::Linear(8, 2));
      net->to(at::kDouble);
      fill(*net, 3);
      at::Tensor x = randn({10, 4}, at::kDouble), y = randn({10, 2}, at::kDouble);
      if (sharded) {
        distribute_module(*net, mesh);
        x = replicated(x, mesh);
        y = replicated(y, mesh);
      }
      std::unique_ptr<torch::optim::Optimizer> opt;
      switch (kind) {
        case 0:
          opt = std::make_unique<torch::optim::SGD>(
              net->parameters(),
              torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
          break;
        case 1:
          opt = std::make_unique<torch::optim::Adam>(net->parameters(),
                                                     torch::optim::AdamOptions(0.01).amsgrad(true));
          break;
        case 2:
          opt = std::make_unique<torch::optim::AdamW>(net->parameters(), 0.01);
          break;
        case 3:
          opt = std::make_unique<torch::optim::RMSprop>(
              net->parameters(), torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5));
          break;
        case 4:
          opt = std::make_unique<torch::optim::Adagrad>(net->parameters(), 0.05);
          break;
        default:
          opt = std::make_unique<torch::optim::LBFGS>(net->parameters(),
                                                      torch::optim::LBFGSOptions(0.5).max_iter(4));
          break;
      }
      for (int i = 0; i < 4; ++i) {
        opt->step([&] {
          opt->zero_grad();
          const at::Tensor loss = torch::mse_loss(net->forward(x), y);
          loss.backward();
          return loss;
        });
      }
      std::vector<at::Tensor> result;
      for (const auto& p : net->parameters()) result.push_back(whole(p));
      return result;
    };
    for (int kind = 0; kind < 6; ++kind) {
      const auto expected = train(kind, false), got = train(kind, true);
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_LT(difference(got[i], expected[i]), 1e-11)
            << "optimizer " << kind << " parameter " << i;
    }
  });
}

// ---- metadata ----

// True strides, the same on every rank.
TEST(Rule02RankInvariant, ShowsTheStridesOfTheGlobalTensorOnEveryRank) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    const ShardSpec s(mesh, {4, 8}, {Shard(0)}, {{0, {0, 1, 3}}});
    const at::Tensor value = randn({4, 8}, at::kDouble);
    const at::Tensor x = leaf(value, s).t();
    EXPECT_EQ(x.strides(), value.t().strides());
    EXPECT_FALSE(x.is_contiguous());
    const at::Tensor y = x.contiguous();
    EXPECT_TRUE(y.is_contiguous());
    EXPECT_EQ((x * 2).strides(), (value.t() * 2).strides());
    EXPECT_TRUE(to_local(y).is_contiguous());
  });
}

// The meta is immutable; in-place metadata operators install a new one.
TEST(Rule03ImmutableMeta, InPlaceViewsChangeOneTensorOnly) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor p = replicated(randn({3, 4}), mesh, true);
    at::Tensor d = p.data();
    d.unsqueeze_(0);
    EXPECT_EQ(d.sizes(), at::IntArrayRef({1, 3, 4}));
    EXPECT_EQ(p.sizes(), at::IntArrayRef({3, 4}));
    EXPECT_EQ(to_local(p).sizes(), at::IntArrayRef({3, 4}));
    d.squeeze_(0).t_();
    EXPECT_EQ(d.sizes(), at::IntArrayRef({4, 3}));
    EXPECT_EQ(d.strides(), at::IntArrayRef({1, 4}));
    d.mul_(0);
    EXPECT_EQ(whole(p).abs().sum().item<float>(), 0) << "still the same memory";
    const at::Tensor r = replicated(randn({3}), mesh);
    const at::Tensor alias = r.detach();
    r.resize_({2, 5});
    EXPECT_EQ(to_local(r).sizes(), at::IntArrayRef({2, 5}));
    EXPECT_EQ(to_local(alias).sizes(), at::IntArrayRef({3}));
  });
}

TEST(Rule03ImmutableMeta, OutVariantsGiveTheirTargetShapeAndValue) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor a = randn({3, 4}), b = randn({4});
    at::Tensor out = replicated(torch::empty({0}), mesh);
    at::add_out(out, replicated(a, mesh), replicated(b, mesh));
    EXPECT_EQ(difference(out, a + b), 0);
    at::mm_out(out, replicated(a, mesh), replicated(a, mesh).t());
    EXPECT_LT(difference(out, a.mm(a.t())), 1e-6);
  });
}

// Lazy conjugate and negative bits.
TEST(Rule04LazyBits, ComplexViews) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor a = randn({3, 4}, at::kComplexDouble);
    const at::Tensor x = replicated(a, mesh);
    EXPECT_EQ(difference(at::view_as_real(x.conj() * x), at::view_as_real(a.conj() * a)), 0);
    EXPECT_EQ(difference(at::imag(x.conj()), at::imag(a.conj())), 0);
  });
}

// ---- aliasing ----

// Views are replayed in backward.
TEST(Rule05WritesToViews, HaveTheirGradients) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor value = randn({4, 3}, at::kDouble);
    const auto loss = [](const at::Tensor& a) {
      at::Tensor c = a * 2;
      c[1].mul_(10);
      c.t()[2].add_(a.sum());
      c.slice(0, 2, 4).view({-1}).exp_();
      return (c * c).sum();
    };
    const at::Tensor plain = value.clone().requires_grad_(true);
    loss(plain).backward();
    const at::Tensor x = replicated(value, mesh, true);
    const at::Tensor l = loss(x);
    l.backward();
    EXPECT_LT(difference(l, loss(plain)), 1e-14);
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-14);
  });
}

// Views that must gather: sharded_views_test.cpp.
TEST(Rule06ViewsThatMove, SliceAssignment) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    at::Tensor plain = torch::zeros({4, 3}, at::kDouble);
    at::Tensor x = replicated(plain, mesh);
    using namespace torch::indexing;
    for (at::Tensor* t : {&plain, &x}) {
      t->index_put_({1}, 5.0);
      t->index_put_({Slice(2, 4), 0}, 7.0);
      (*t)[0] = 3.0;
      t->narrow(1, 1, 1).fill_(2.0);
      t->select(0, 3).copy_(at::ones({3}, at::kDouble));
    }
    EXPECT_EQ(difference(x, plain), 0);
  });
}

// The local shares the version counter.
TEST(Rule08LocalVersion, ToLocalSharesMemoryAndVersion) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor x = replicated(torch::ones({3}, at::kDouble), mesh, true);
    const at::Tensor y = x * 1;
    const at::Tensor z = (y * y).sum();
    {
      const at::NoGradGuard no_grad;
      to_local(y).mul_(2);
    }
    EXPECT_EQ(whole(y).sum().item<double>(), 6);
    EXPECT_THROW(z.backward(), c10::Error) << "the saved value was changed";
  });
}

TEST(Rule07Targets, ArePromotedWhereTheyStand) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor w = randn({3}, at::kDouble).requires_grad_(true);
    const at::Tensor x = replicated(randn({3}, at::kDouble), mesh, true);
    at::Tensor y = w * 2;
    y.add_(x);
    EXPECT_TRUE(is_sharded(y));
    y.sum().backward();
    EXPECT_FALSE(is_sharded(w.grad()));
    EXPECT_EQ(difference(w.grad(), at::full({3}, 2.0, at::kDouble)), 0);
    EXPECT_EQ(difference(x.grad(), at::ones({3}, at::kDouble)), 0);
    at::Tensor leaf_target = torch::zeros({3}, at::kDouble).requires_grad_(true);
    EXPECT_THROW(leaf_target.data().view({3}).add_(x), ShardingError);
    // The base of a slice becomes sharded, and the slice stays a view of it.
    const at::Tensor z = replicated(randn({3}, at::kDouble), mesh, true);
    at::Tensor base = torch::zeros({2, 3}, at::kDouble);
    at::Tensor view = base[0];
    view.add_(z);
    EXPECT_TRUE(is_sharded(base) && is_sharded(view));
    EXPECT_EQ(difference(base[0], z), 0);
    base.mul_(2);
    EXPECT_EQ(difference(view, z * 2), 0);
    base.pow(2).sum().backward();
    EXPECT_LT(difference(z.grad(), z.detach() * 8), 1e-14);
    const at::Tensor held = torch::zeros({2, 3}, at::kDouble), kept = held[1];
    EXPECT_THROW(held[0].add_(x), ShardingError);
  });
}

// Tensors that libtorch's own formulas make of numbers are not plain tensors of the program.
TEST(Rule07Targets, NumbersOfFormulasAreNotReported) {
  everywhere([](DistributedManager& manager, const DeviceMesh& mesh) {
    const at::Tensor x = replicated(randn({3, 4}, at::kDouble), mesh, true);
    set_policies(manager, {.promotion = Policy::error});
    EXPECT_NO_THROW(x.clamp(-0.5, 0.5).sum().backward());
    EXPECT_NO_THROW(torch::nn::functional::normalize(x).sum().backward());
    EXPECT_NO_THROW(at::cosine_similarity(x, x * 2).sum().backward());
    EXPECT_NO_THROW(at::where(x.gt(0), x, 0.).sum().backward());
    EXPECT_THROW(x + at::ones({3, 4}, at::kDouble), ShardingError);
    set_policies(manager, {.promotion = Policy::allow});
  });
}

// ---- autograd ----

// Promotion and demotion are each other's derivative.
TEST(Rule11Promotion, HasSecondDerivatives) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor wv = randn({3}, at::kDouble), xv = randn({3}, at::kDouble);
    const auto second = [](const at::Tensor& w, const at::Tensor& x) {
      const at::Tensor y = (w.pow(3) * x.pow(2)).sum();
      const auto g = torch::autograd::grad({y}, {w, x}, {}, true, true);
      const at::Tensor z =
          whole(g[0]).defined() ? (g[0] * g[0]).sum() + (g[1] * x).sum() : at::Tensor();
      return torch::autograd::grad({z}, {w, x});
    };
    const auto expected = second(wv.clone().requires_grad_(true), xv.clone().requires_grad_(true));
    const auto mixed = second(wv.clone().requires_grad_(true), replicated(xv, mesh, true));
    EXPECT_FALSE(is_sharded(mixed[0]));
    EXPECT_TRUE(is_sharded(mixed[1]));
    for (int i = 0; i < 2; ++i) EXPECT_LT(difference(mixed[i], expected[i]), 1e-12) << i;
  });
}

TEST(Rule11Promotion, OfListsOptionalsAndScalars) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor a = randn({2, 3}, at::kDouble).requires_grad_(true),
                     zero_dim = randn({}, at::kDouble).requires_grad_(true);
    const at::Tensor x = replicated(randn({2, 3}, at::kDouble), mesh, true);
    const at::Tensor index = torch::tensor({1, 0});
    const at::Tensor y = at::cat({a, x, a}, 0).index({index}) * zero_dim;
    y.sum().backward();
    EXPECT_FALSE(is_sharded(a.grad()));
    EXPECT_FALSE(is_sharded(zero_dim.grad()));
    EXPECT_LT(difference(zero_dim.grad(), a.detach().sum()), 1e-12);
    EXPECT_EQ((x * 2).dtype(), (a * 2).dtype());
    EXPECT_EQ(replicated(torch::ones({2}, at::kFloat), mesh).mul(2.0).scalar_type(), at::kFloat)
        << "a number is no tensor";
  });
}

// A gradient that is reduced already is not reduced again.
TEST(Rule14Accumulation, AddsUp) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    torch::nn::Linear expected(3, 2), net(3, 2);
    expected->to(at::kDouble);
    net->to(at::kDouble);
    fill(*expected, 1);
    fill(*net, 1);
    distribute_module(*net, mesh);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = randn({4, 3}, at::kDouble);
      expected(x).square().sum().backward();
      net(distribute_tensor(x, mesh, {Shard(0)})).square().sum().backward();
    }
    EXPECT_LT(difference(net->weight.grad(), expected->weight.grad()), 1e-12);
    EXPECT_LT(difference(net->bias.grad(), expected->bias.grad()), 1e-12);
    EXPECT_TRUE(spec(net->weight.grad()).is_replicated());
  });
}

// Buckets and nested backwards: nn/sharded_gradients_test.cpp, ops/module_matrix_test.cpp.
TEST(Rule12SeveralUses, OfSharedAndUnusedParameters) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    torch::nn::Linear net(3, 3), unused(3, 3);
    net->to(at::kDouble);
    fill(*net, 1);
    torch::nn::Sequential all(net, unused);
    const at::Tensor w = net->weight.detach().clone().requires_grad_(true),
                     x = randn({5, 3}, at::kDouble);
    x.mm(w).mm(w).mm(w.t()).sum().backward();
    distribute_module(*all, mesh);
    const at::Tensor s = distribute_tensor(x, mesh, {Shard(0)}, {{0, {4, 1}}});
    s.mm(net->weight).mm(net->weight).mm(net->weight.t()).sum().backward();
    EXPECT_LT(difference(net->weight.grad(), w.grad()), 1e-12);
    EXPECT_FALSE(unused->weight.grad().defined());
  });
}

// Without the kernel above autograd.
TEST(Rule11Promotion, InInferenceMode) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    torch::nn::Linear net(3, 2);
    fill(*net, 1);
    const at::Tensor x = randn({4, 3});
    const at::Tensor expected = net(x).detach();
    const at::Tensor outside = replicated(x, mesh);
    const c10::InferenceMode mode;
    EXPECT_LT(difference(net(outside), expected), 1e-6) << "plain parameters";
    EXPECT_LT(difference(net(distribute_tensor(x, mesh, {Replicate()})), expected), 1e-6);
    // Views of what was made outside are no inference tensors: autograd keeps a record of them.
    const auto views = [](const at::Tensor& t) {
      return at::cat({t.t().contiguous().view({-1}), t.view({-1}), t.select(0, 1),
                      t.split(1, 1)[2].squeeze(1), t.unsqueeze(0).detach().view({-1})});
    };
    EXPECT_EQ(difference(views(outside), views(x)), 0);
    EXPECT_FALSE(outside.t().is_inference());
    EXPECT_TRUE((outside * 2).is_inference());
  });
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    torch::nn::Linear net(3, 2), plain(3, 2);
    for (auto* m : {&net, &plain}) fill(**m, 1);
    distribute_module(*net, mesh, {{"weight", {{Shard(0)}}}});
    const at::Tensor x = randn({4, 3}), sharded = distribute_tensor(x, mesh, {Shard(0)}),
                     expected = plain(x).detach();
    const c10::InferenceMode mode;
    EXPECT_LT(difference(net(sharded), expected), 1e-6) << "sharded parameters";
    EXPECT_LT(difference(sharded.t().t() + sharded.slice(0, 0, 4), x * 2), 1e-6);
  });
}

TEST(Rule10Autocast, CastsAsItDoesPlainTensors) {
  everywhere([](DistributedManager&, const DeviceMesh& mesh) {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
    torch::nn::Linear linear(4, 2);
    fill(*conv, 1);
    fill(*linear, 2);
    const at::Tensor x = randn({2, 3, 5, 5});
    const auto forward = [&](const at::Tensor& in) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor h = conv(in);
      const at::Tensor y = linear(h.mean({2, 3}));
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return std::make_pair(h, y);
    };
    const auto [ph, py] = forward(x);
    py.sum().backward();
    const at::Tensor expected = conv->weight.grad().clone();
    conv->zero_grad();
    linear->zero_grad();
    const auto [h, y] = forward(replicated(x, mesh));
    EXPECT_EQ(h.scalar_type(), at::kBFloat16);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_LT(difference(y, py), 1e-2);
    y.sum().backward();
    EXPECT_LT(difference(conv->weight.grad(), expected), 1e-2);
  });
}

// ---- distribute_module ----

// set_data() is for distribute_module alone.
TEST(Rule09SetData, EveryHandleSeesTheShardedParameter) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    torch::nn::Linear net(6, 5);
    fill(*net, 1);
    const at::Tensor handle = net->weight, value = net->weight.detach().clone();
    distribute_module(
        *net, mesh,
        [](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
          if (name == "weight") return ParameterPlacement{{Shard(0)}, {{0, {4, 1}}}};
          return std::nullopt;
        });
    EXPECT_TRUE(is_sharded(handle) && is_sharded(net->named_parameters()["weight"]));
    EXPECT_EQ(to_local(handle).size(0), manager.rank() == 0 ? 4 : 1);
    EXPECT_EQ(difference(handle, value), 0);
    EXPECT_TRUE(handle.is_leaf() && handle.requires_grad());
  });
}

TEST(Rule09SetData, RefusesWhatWouldGoWrongInSilence) {
  on_threads(1, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    torch::nn::Linear a(3, 3), b(3, 3);
    b->weight.set_data(a->weight.data());
    torch::nn::Sequential tied(a, b);
    EXPECT_THROW(distribute_module(*tied, mesh), ShardingError);
    EXPECT_FALSE(is_sharded(a->weight)) << "nothing is changed when something is refused";
    torch::nn::Linear used(3, 3);
    used(randn({2, 3})).sum().backward();
    EXPECT_THROW(distribute_module(*used, mesh), ShardingError);
    torch::nn::Linear twice(3, 3);
    distribute_module(*twice, mesh);
    EXPECT_THROW(distribute_module(*twice, mesh), ShardingError);
  });
}

TEST(Rule09SetData, RefusesBeforeAnythingHasChanged) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(3, 3);
    const at::NoGradGuard no_grad;
    const auto own = static_cast<float>(manager.rank() + 1);
    net->weight.fill_(own);
    const auto refused = [&](const std::vector<Placement>& weight) {
      const auto rule = [&](const std::string& name, const at::Tensor&) {
        return std::optional<ParameterPlacement>(
            ParameterPlacement{name == "weight" ? weight : std::vector<Placement>{Replicate()}});
      };
      EXPECT_THROW(distribute_module(*net, mesh, rule), Error);
      EXPECT_FALSE(is_sharded(net->weight));
      EXPECT_TRUE(net->weight.eq(own).all().item<bool>()) << "the first rank's values";
    };
    refused({Shard(2)});
    refused({Partial()});
    refused({Shard(manager.rank() == 0 ? 2 : 0)});
    refused({manager.rank() == 0 ? Shard(0) : Shard(1)});
    distribute_module(*net, mesh);
    EXPECT_TRUE(whole(net->weight).eq(1).all().item<bool>());
  });
}

// ---- dispatcher ----

TEST(Rule18DirectReads, SayWhatToDo) {
  on_threads(1, [](DistributedManager& manager) {
    const at::Tensor x = replicated(torch::ones({2}), one_axis(manager));
    const auto message = [](const std::function<void()>& f) -> std::string {
      try {
        f();
      } catch (const std::exception& e) {
        return e.what();
      }
      return "nothing was thrown";
    };
    EXPECT_NE(message([&] { x.data_ptr(); }).find("tessera::to_local"), std::string::npos)
        << message([&] { x.data_ptr(); });
    EXPECT_NE(message([&] { (void)x.storage(); }).find("tessera::to_local"), std::string::npos);
    std::ostringstream out;
    EXPECT_NE(message([&] { out << x; }).find("tessera::print"), std::string::npos)
        << message([&] { out << x; });
  });
}

TEST(Rule17Registration, OfOperatorsDefinedLater) {
  static const auto twice = [](const at::Tensor& t) { return t * 2; };
  static auto library = [] {
    torch::Library lib(torch::Library::FRAGMENT, "tessera_test", std::nullopt, __FILE__, __LINE__);
    lib.def("cpu_only(Tensor x) -> Tensor");
    lib.impl("cpu_only",
             torch::dispatch(c10::DispatchKey::CPU, [](const at::Tensor& t) { return t * 3; }));
    lib.def("composite(Tensor x) -> Tensor", [](const at::Tensor& t) { return t * 2; });
    lib.def("explicit(Tensor x) -> Tensor");
    lib.impl("explicit", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                         [](const at::Tensor& t) { return t * 4; }));
    return lib;
  }();
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    const auto apply = [](const char* name, const at::Tensor& t) {
      return c10::Dispatcher::singleton()
          .findSchemaOrThrow(name, "")
          .typed<at::Tensor(const at::Tensor&)>()
          .call(t);
    };
    const at::Tensor value = randn({4});
    const at::Tensor r = replicated(value, mesh), s = distribute_tensor(value, mesh, {Shard(0)});
    EXPECT_EQ(difference(apply("tessera_test::cpu_only", r), value * 3), 0);
    EXPECT_EQ(difference(apply("tessera_test::explicit", r), value * 4), 0);
    EXPECT_EQ(difference(apply("tessera_test::composite", s), value * 2), 0);
    EXPECT_EQ(difference(apply("tessera_test::cpu_only", value), value * 3), 0)
        << "plain tensors are as before";
    try {
      apply("tessera_test::explicit", s);
      ADD_FAILURE() << "there is no rule";
    } catch (const NoRuleError& e) {
      EXPECT_NE(std::string(e.what()).find("tessera_test::explicit"), std::string::npos);
      EXPECT_NE(std::string(e.what()).find("register_rule"), std::string::npos);
      EXPECT_NE(std::string(e.what()).find("Shard(0)"), std::string::npos);
    }
    // A user's rule. Registered once for the process, alike on all ranks.
    static std::once_flag once;
    std::call_once(once, [] {
      register_rule("tessera_test::cpu_only", [](const OpCall& c) {
        Plan plan;
        plan.outputs = {{c.tensor(0).spec, c.tensor(0).strides}};
        return plan;
      });
    });
    EXPECT_EQ(difference(apply("tessera_test::cpu_only", s), value * 3), 0);
  });
}

TEST(Dispatcher, TwoRulesUnderOneNameAreRefused) {
  static const auto library = [] {
    torch::Library lib(torch::Library::FRAGMENT, "tessera_test", std::nullopt, __FILE__, __LINE__);
    lib.def("negated(Tensor x) -> Tensor");
    lib.impl("negated",
             torch::dispatch(c10::DispatchKey::CPU, [](const at::Tensor& t) { return -t; }));
    return lib;
  }();
  static int asked = 0;
  const auto rule = [](int who) {
    return [who](const OpCall& c) {
      asked = who;
      Plan plan;
      plan.outputs = {{c.tensor(0).spec, c.tensor(0).strides}};
      return plan;
    };
  };
  EXPECT_THROW(register_rule("tessera_test::negated", rule(1), {.replaces = true}), RuleError)
      << "there is none to replace";
  register_rule("tessera_test::negated", rule(1));
  try {
    register_rule("tessera_test::negated", rule(2));
    ADD_FAILURE() << "the second rule would shadow the first, or the other way round";
  } catch (const RuleError& e) {
    EXPECT_NE(std::string(e.what()).find("'tessera_test::negated'"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("replaces"), std::string::npos) << e.what();
  }
  EXPECT_THROW(register_rule("aten::mm", rule(2)), RuleError);
  const auto use = [&](const std::vector<std::int64_t>& shape) {
    on_threads(1, [&](DistributedManager& manager) {
      const at::Tensor x = randn(shape),
                       s = distribute_tensor(x.clone(), one_axis(manager), {Shard(0)});
      const auto op = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("tessera_test::negated", "")
                          .typed<at::Tensor(const at::Tensor&)>();
      EXPECT_EQ(difference(op.call(s), -x), 0);
    });
  };
  use({4});
  EXPECT_EQ(asked, 1) << "the one that was refused has left nothing behind";
  register_rule("tessera_test::negated", rule(3), {.replaces = true});
  use({5});
  EXPECT_EQ(asked, 3);
}

TEST(Dispatcher, PromotionPolicy) {
  on_threads(1, [](DistributedManager& manager) {
    const at::Tensor x = replicated(torch::ones({2}), one_axis(manager)), plain = torch::ones({2});
    EXPECT_NO_THROW(x + plain);
    set_policies(manager, {.promotion = Policy::error});
    EXPECT_THROW(x + plain, ShardingError);
    EXPECT_NO_THROW(x + 1);
    set_policies(manager, {});
  });
}

TEST(Dispatcher, RandomNumbersOfEachRankAreRefusedRatherThanDifferent) {
  on_threads(2, [](DistributedManager& manager) {
    const at::Tensor x = replicated(torch::ones({2}), one_axis(manager));
    try {
      const at::Tensor y = at::rand_like(x);
      EXPECT_TRUE(is_sharded(y));  // a rule for it draws the same numbers everywhere
      at::Tensor mine = to_local(y).clone();
      one_axis(manager).all().all_reduce(mine, ReduceOp::max);
      EXPECT_EQ(difference(mine, to_local(y)), 0);
    } catch (const NoRuleError&) {
    }
  });
}

TEST(Dispatcher, MixedMeshesAndSparseTensorsAreRefused) {
  on_threads(2, [](DistributedManager& manager) {
    const at::Tensor a =
        distribute_tensor(torch::ones({2}), manager.mesh({{"x", 2}}), {Replicate()});
    const at::Tensor b =
        distribute_tensor(torch::ones({2}), manager.mesh({{"y", 2}}), {Replicate()});
    EXPECT_THROW(a + b, ShardingError);
    EXPECT_THROW(
        distribute_tensor(torch::ones({2}).to_sparse(), manager.mesh({{"x", 2}}), {Replicate()}),
        ShardingError);
  });
}

// In a process of its own, for the first use is the point: whichever rank comes first registers the
// kernels, and those that come meanwhile must not go on with half of them.
TEST(Rule19Threads, FirstUseByAllRanksAtOnceDeathTest) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto first_use = [] {
    std::vector<std::thread> threads;
    for (int i = 0; i < 24; ++i) {
      threads.emplace_back([i] {
        on_threads(1, [i](DistributedManager& manager) {
          const auto mesh = one_axis(manager);
          const at::Tensor local = torch::ones({3, 3}, at::kDouble);
          std::this_thread::sleep_for(std::chrono::milliseconds(2 * i));
          const at::Tensor x = from_local(local, mesh, {Replicate()}).detach().requires_grad_();
          const auto gradient = torch::autograd::grad({x.abs().sum()}, {x}, {}, true, true)[0];
          EXPECT_EQ(to_local(gradient.detach()).sum().item<double>(), 9);
          EXPECT_EQ(to_local(x.detach().abs()).sum().item<double>(), 9);
          EXPECT_EQ(to_local(x.detach().logical_not()).sum().item<std::int64_t>(), 0);
          EXPECT_EQ(full_tensor(x.detach().nan_to_num()).sum().item<double>(), 9);
        });
      });
    }
    for (auto& thread : threads) thread.join();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(first_use(), ::testing::ExitedWithCode(0), "");
}

TEST(Rule19Threads, BackwardRunsOnEveryRanksOwnThread) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    for (int i = 0; i < 50; ++i) {
      const at::Tensor w = replicated(torch::full({3, 3}, 0.5, at::kDouble), mesh, true);
      const at::Tensor x = distribute_tensor(torch::ones({4, 3}, at::kDouble), mesh, {Shard(0)});
      const at::Tensor y = redistribute(x.mm(w), {Replicate()});
      full_tensor(y.mm(w)).sum().backward();
      ASSERT_TRUE(w.grad().defined());
    }
  });
}

}  // namespace tessera::test
