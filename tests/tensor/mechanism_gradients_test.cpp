// What the mechanism keeps of gradients, rule by rule, on uneven shards: several uses, kinds,
// accumulation, the end of backward, and plain temporaries of formulas.

#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call_counts.h"
#include "tessera/nn/distribute_module.h"
#include "uneven_rows.h"

namespace tessera::test::mechanism_gradients_test {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TEST(Rule12SeveralUses, OfAPlainTensorAreReducedOnce) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    const at::Tensor w = randn({4, 4}, at::kDouble).requires_grad_(true),
                     expected = w.detach().clone().requires_grad_(true);
    const at::Tensor value = randn({5, 4}, at::kDouble), x = by_rows(value, mesh);
    const auto loss = [](const at::Tensor& in, const at::Tensor& by) {
      return in.mm(by).mm(by).mm(by).square();
    };
    for (int i = 0; i < 2; ++i) {
      loss(value, expected).sum().backward();
      const at::Tensor l = loss(x, w).sum();
      full_tensor(l);
      const CommTraceScope trace(manager);
      l.backward();
      EXPECT_EQ(calls(*trace), (std::map<std::string, int>{{"all_reduce", 1}})) << trace->table();
      EXPECT_FALSE(is_sharded(w.grad()));
      EXPECT_LT(difference(w.grad(), expected.grad()), 1e-13) << "backward " << i;
    }
    // Two graphs that live at the same time, and a value that changes between them.
    const at::Tensor first = loss(x, w).sum(), plain_first = loss(value, expected).sum();
    const auto both = torch::autograd::grad({loss(x, w * 2).sum() + loss(x, w).sum()}, {w});
    EXPECT_LT(difference(both[0], torch::autograd::grad({loss(value, expected * 2).sum() +
                                                         loss(value, expected).sum()},
                                                        {expected})[0]),
              1e-13);
    EXPECT_LT(difference(torch::autograd::grad({first}, {w})[0],
                         torch::autograd::grad({plain_first}, {expected})[0]),
              1e-13);
    {
      const at::NoGradGuard no_grad;
      w.mul_(0.5);
      expected.mul_(0.5);
    }
    EXPECT_LT(difference(torch::autograd::grad({loss(x, w).sum()}, {w})[0],
                         torch::autograd::grad({loss(value, expected).sum()}, {expected})[0]),
              1e-13);
  });
}

// A user's function of a sharded and a plain tensor: what it returns in backward is sharded for
// both.
struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x * w;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const auto saved = ctx->get_saved_variables();
    return {g[0] * saved[1], (g[0] * saved[0]).sum(0)};
  }
};

// One whose gradient of a sharded tensor is plain: the global gradient, on every rank.
struct WithPlainGradient : torch::autograd::Function<WithPlainGradient> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {whole(g[0]) * whole(ctx->get_saved_variables()[0]) * 2};
  }
};

TEST(Rule13KindsOfGradients, APlainLeafGetsAPlainReducedOneFromAUsersFunction) {
  on_three([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor value = randn({5, 4}, at::kDouble), x = by_rows(value, mesh, true),
                     px = value.clone().requires_grad_(true);
    const at::Tensor w = randn({4}, at::kDouble).requires_grad_(true),
                     pw = w.detach().clone().requires_grad_(true);
    for (int i = 0; i < 2; ++i) {
      // A leaf, and a result of an operator on plain tensors.
      (Scaled::apply(x, w).square().sum() + Scaled::apply(x, w.exp()).sum()).backward();
      (Scaled::apply(px, pw).square().sum() + Scaled::apply(px, pw.exp()).sum()).backward();
      EXPECT_FALSE(is_sharded(w.grad()));
      EXPECT_TRUE(is_sharded(x.grad()));
      EXPECT_LT(difference(w.grad(), pw.grad()), 1e-13) << "backward " << i;
      EXPECT_LT(difference(x.grad(), px.grad()), 1e-13) << "backward " << i;
    }
    torch::optim::SGD opt({w}, 0.1), plain_opt({pw}, 0.1);
    opt.step();
    plain_opt.step();
    EXPECT_LT(difference(w, pw), 1e-13);
  });
}

TEST(Rule13KindsOfGradients, AShardedParameterTakesAPlainOne) {
  on_three([](DistributedManager&, const DeviceMesh& mesh) {
    torch::nn::Linear net(4, 5), expected(4, 5);
    for (auto* m : {&net, &expected}) {
      (*m)->to(at::kDouble);
      fill(**m, 3);
    }
    distribute_module(*net, mesh, {{"weight", {{Shard(0)}, {{0, kUneven}}}}});
    torch::optim::Adam opt(net->parameters(), 0.1), plain_opt(expected->parameters(), 0.1);
    const at::Tensor value = randn({3, 4}, at::kDouble);
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 2; ++part) {
        // One summand is plain, the other sharded.
        (WithPlainGradient::apply(net->weight).sum() +
         net(distribute_tensor(value, mesh, {Replicate()})).square().sum())
            .backward();
        (WithPlainGradient::apply(expected->weight).sum() + expected(value).square().sum())
            .backward();
        ASSERT_TRUE(is_sharded(net->weight.grad()));
        EXPECT_TRUE(spec(net->weight.grad()) == spec(net->weight));
        EXPECT_LT(difference(net->weight.grad(), expected->weight.grad()), 1e-13);
      }
      opt.step();
      plain_opt.step();
      EXPECT_LT(difference(net->weight, expected->weight), 1e-13);
    }
  });
}

TEST(Rule13KindsOfGradients, AStepOfAPlainLeafWithAShardedGradientIsRightOrRefused) {
  on_three([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor start = randn({5}, at::kDouble), slope = randn({5}, at::kDouble);
    for (const bool adam : {false, true}) {
      const auto step = [&](const at::Tensor& gradient) {
        const at::Tensor w = start.clone().requires_grad_(true);
        w.mutable_grad() = gradient;
        std::unique_ptr<torch::optim::Optimizer> opt;
        if (adam) {
          opt = std::make_unique<torch::optim::Adam>(std::vector<at::Tensor>{w}, 0.1);
        } else {
          opt = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{w}, 0.1);
        }
        try {
          opt->step();
        } catch (const ShardingError&) {
          EXPECT_EQ(difference(w, start), 0) << "refused, and untouched";
          return at::Tensor();
        }
        EXPECT_FALSE(is_sharded(w));
        return w.detach();
      };
      const at::Tensor got = step(by_rows(slope, mesh));
      if (got.defined()) {
        EXPECT_LT(difference(got, step(slope)), 1e-14);
      }
    }
  });
}

TEST(Rule14Accumulation, OfSummandsInTheEnginesOwnSum) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    // One node gets a partial and a replicated gradient: their sum is partial, and nothing is sent
    // for it.
    const at::Tensor value = randn({4}, at::kDouble), data = randn({5, 4}, at::kDouble);
    const at::Tensor w = leaf(value, ShardSpec::replicated(mesh, {4})),
                     pw = value.clone().requires_grad_(true);
    const at::Tensor x = by_rows(data, mesh);
    const at::Tensor l = (x * w.exp()).sum() + w.exp().square().sum();
    full_tensor(l);
    const CommTraceScope trace(manager);
    l.backward();
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    ((data * pw.exp()).sum() + pw.exp().square().sum()).backward();
    EXPECT_LT(difference(w.grad(), pw.grad()), 1e-13);
  });
}

// Runs its body's backward inside its own.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->saved_data["w"] = w;
    ctx->save_for_backward({x});
    const at::NoGradGuard no_grad;
    return torch::tanh(x.mm(w));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(),
                     w = ctx->saved_data["w"].toTensor();
    at::Tensor y;
    {
      const at::AutoGradMode grad(true);
      y = torch::tanh(x.mm(w));
    }
    torch::autograd::backward({y}, {g[0]});
    return {x.grad(), at::Tensor()};
  }
};

TEST(Rule15EndOfBackward, OfANestedOneFlushesNothingTwice) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    torch::nn::Linear net(4, 4), expected(4, 4);
    for (auto* m : {&net, &expected}) {
      (*m)->to(at::kDouble);
      fill(**m, 2);
    }
    distribute_module(*net, mesh);
    const auto loss = [](torch::nn::Linear& m, const at::Tensor& x) {
      return Nested::apply(Nested::apply(m(x), m->weight), m->weight).sum();
    };
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = randn({5, 4}, at::kDouble);
      loss(expected, x).backward();
      loss(net, by_rows(x, mesh)).backward();
      for (const bool bias : {false, true}) {
        const at::Tensor p = bias ? net->bias : net->weight;
        EXPECT_TRUE(spec(p.grad()) == spec(p));
        EXPECT_LT(difference(p.grad(), bias ? expected->bias.grad() : expected->weight.grad()),
                  1e-13)
            << "backward " << i;
      }
    }
    // grad() runs no hooks of parameters: what it returns is partial, and .grad() stays as it is.
    const at::Tensor before = whole(net->weight.grad()).clone(), x = randn({5, 4}, at::kDouble);
    const auto g = torch::autograd::grad({net(by_rows(x, mesh)).square().sum()}, {net->weight});
    EXPECT_LT(difference(
                  g[0], torch::autograd::grad({expected(x).square().sum()}, {expected->weight})[0]),
              1e-13);
    const CommTraceScope trace(manager);
    reduce_gradients(*net);
    EXPECT_TRUE(trace->events().empty()) << "nothing is left to reduce";
    EXPECT_EQ(difference(net->weight.grad(), before), 0);
  });
}

TEST(Rule15EndOfBackward, BucketsStartInAFixedOrder) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    // Of the same size: sent in order of arrival they would be mixed up in silence.
    struct Two : torch::nn::Module {
      at::Tensor a = register_parameter("a", at::full({4}, 2.0, at::kDouble)),
                 b = register_parameter("b", at::full({4}, 3.0, at::kDouble));
    };
    const auto two = std::make_shared<Two>();
    distribute_module(*two, mesh, ModuleRule(), {.first_bucket_bytes = 1, .bucket_bytes = 1});
    const at::Tensor value = randn({5, 4}, at::kDouble), x = by_rows(value, mesh);
    // The engine takes the node that was made last: the ranks' gradients arrive in different
    // orders.
    at::Tensor of_a, of_b;
    if (manager.rank() == 1) {
      of_a = (x * two->a).sum();
      of_b = (x * 10 * two->b).sum();
    } else {
      of_b = (x * 10 * two->b).sum();
      of_a = (x * two->a).sum();
    }
    (of_a + of_b).backward();
    EXPECT_LT(difference(two->a.grad(), value.sum(0)), 1e-13);
    EXPECT_LT(difference(two->b.grad(), value.sum(0) * 10), 1e-13);
  });
}

// Formulas and composites that make plain tensors of the global shape: none may meet sharded ones.
TEST(Rule16PlainTemporaries, MeetNothingInBackward) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::error});
    using F = std::function<at::Tensor(const at::Tensor&)>;
    for (const std::int64_t d : {0, 1}) {
      const std::vector<std::pair<const char*, F>> all = {
          {"max", [d](const at::Tensor& t) { return std::get<0>(t.max(d)); }},
          {"min", [d](const at::Tensor& t) { return std::get<0>(t.min(d)); }},
          {"median", [d](const at::Tensor& t) { return std::get<0>(t.median(d)); }},
          {"mode", [d](const at::Tensor& t) { return std::get<0>(t.mode(d)); }},
          {"kthvalue", [d](const at::Tensor& t) { return std::get<0>(t.kthvalue(2, d)); }},
          {"topk", [d](const at::Tensor& t) { return std::get<0>(t.topk(2, d)); }},
          {"sort", [d](const at::Tensor& t) { return std::get<0>(t.sort(d)); }},
          {"cummax", [d](const at::Tensor& t) { return std::get<0>(t.cummax(d)); }},
          {"cummin", [d](const at::Tensor& t) { return std::get<0>(t.cummin(d)); }},
          {"trace", [](const at::Tensor& t) { return t.trace(); }},
          {"select", [d](const at::Tensor& t) { return t.select(d, 1); }},
          {"slice", [d](const at::Tensor& t) { return t.slice(d, 1, 3); }},
          {"diagonal", [](const at::Tensor& t) { return t.diagonal(); }},
          {"index_select",
           [d](const at::Tensor& t) {
             const at::Tensor index = at::tensor({2, 0});
             return t.index_select(d, is_sharded(t)
                                          ? distribute_tensor(index, spec(t).mesh(), {Replicate()})
                                          : index);
           }},
      };
      for (const auto& [name, f] : all) {
        const at::Tensor value = randn({5, 4}, at::kDouble), x = by_rows(value, mesh, true),
                         p = value.clone().requires_grad_(true);
        f(p).square().sum().backward();
        ASSERT_NO_THROW(f(x).square().sum().backward()) << name << " along " << d;
        EXPECT_LT(difference(x.grad(), p.grad()), 1e-13) << name << " along " << d;
      }
    }
    namespace F2 = torch::nn::functional;
    const at::Tensor value = randn({5, 2, 4, 3}, at::kDouble), x = by_rows(value, mesh, true),
                     p = value.clone().requires_grad_(true);
    const auto pad = [](const at::Tensor& t) {
      return F2::pad(t, F2::PadFuncOptions({1, 2, 1, 1}).mode(torch::kCircular)).square().sum();
    };
    pad(p).backward();
    ASSERT_NO_THROW(pad(x).backward());
    EXPECT_LT(difference(x.grad(), p.grad()), 1e-13);
  });
}

}  // namespace

}  // namespace tessera::test::mechanism_gradients_test
