// The mechanism, with everything replicated: metadata, views, writes, promotion, autocast. Suites
// are named after the rules that the mechanism keeps; more of them: mechanism_modules_test.cpp,
// mechanism_dispatcher_test.cpp, mechanism_rules_test.cpp, mechanism_gradients_test.cpp,
// sharded_views_test.cpp.

#include <ATen/autocast_mode.h>

#include "mechanism.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::mechanism_test {

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

TEST(Rule07Targets, ArePromotedInPlace) {
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

}  // namespace tessera::test::mechanism_test
