// Gradients of distribute_module()'s parameters: reduced over the right axes, once, in buckets,
// while backward runs.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <set>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::sharded_gradients_test {

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", torch::nn::Linear(4, 6))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        shared(register_module("shared", torch::nn::Linear(6, 6))),
        unused(register_module("unused", torch::nn::Linear(3, 3))),
        last(register_module("last", torch::nn::Linear(6, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(shared(torch::tanh(shared(norm(torch::tanh(first(x)))))));
  }
  torch::nn::Linear first;
  torch::nn::LayerNorm norm;
  torch::nn::Linear shared, unused, last;
};
TORCH_MODULE(Net);

Net make(std::uint64_t seed = 7) {
  Net net;
  net->to(at::kDouble);
  fill(*net, seed);
  return net;
}

void expect_gradients(torch::nn::Module& got, torch::nn::Module& expected,
                      const std::string& where) {
  const auto a = got.named_parameters(), b = expected.named_parameters();
  for (const auto& item : b) {
    const at::Tensor p = a[item.key()], g = p.grad();
    ASSERT_EQ(g.defined(), item.value().grad().defined()) << where << " " << item.key();
    if (!g.defined()) continue;
    EXPECT_LT(difference(g, item.value().grad()), 1e-12) << where << " " << item.key();
    EXPECT_TRUE(spec(g) == spec(p))
        << where << " " << item.key() << ": " << spec(g) << " and " << spec(p);
  }
}

// What the reducer sent: groups by name.
std::vector<std::string> sent(const CommTrace& trace) {
  std::vector<std::string> groups;
  for (const CommEvent& e : trace.events()) {
    if (e.name == "gradients") groups.push_back(e.group);
  }
  return groups;
}

std::vector<std::vector<Axis>> meshes() {
  return {{{"x", 1}}, {{"x", 2}},           {{"x", 3}},
          {{"x", 4}}, {{"x", 2}, {"y", 2}}, {{"x", 2}, {"y", 1}, {"z", 2}}};
}

int ranks_of(const std::vector<Axis>& axes) {
  int n = 1;
  for (const Axis& a : axes) n *= a.size;
  return n;
}

}  // namespace

TEST(ShardedGradients, AreThoseOfOneProcessHoweverDataAreSharded) {
  for (const auto& axes : meshes()) {
    on_ranks(ranks_of(axes), [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh(test::mapped(axes));
      Draw draw(11);
      for (int round = 0; round < 6; ++round) {
        const std::int64_t bytes = draw.of(std::vector<std::int64_t>{1, 200, 1 << 20});
        const bool overlap = draw.chance(70);
        Net net = make(), expected = make();
        distribute_module(*net, mesh, ModuleRule(),
                          {.first_bucket_bytes = bytes, .bucket_bytes = bytes, .overlap = overlap});
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = randn({5, 3, 4}, at::kDouble);
          const ShardSpec lies = draw.spec(mesh, {5, 3, 4});
          expected(x).square().mean().backward();
          const at::Tensor sharded = leaf(x, lies, false);
          if (step == 1) {
            const auto scope = no_sync(*net);
            net(sharded).square().mean().backward();
          } else {
            net(sharded).square().mean().backward();
            expect_gradients(*net, *expected, concat(lies, " round ", round, " step ", step));
          }
          if (draw.chance(30)) {
            if (step == 1) reduce_gradients(*net);
            net->zero_grad();
            expected->zero_grad();
          }
        }
      }
    });
  }
}

TEST(ShardedGradients, GoInOneMessagePerBucketOverTheAxesOfTheData) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"model", 2}});
    const at::Tensor value = randn({5, 4}, at::kDouble);
    for (const bool small : {false, true}) {
      Net net = make(), expected = make();
      // Four tensors of 6 numbers or fewer, and three matrices: with small buckets each is
      // alone.
      distribute_module(
          *net, mesh, ModuleRule(),
          {.first_bucket_bytes = small ? 1 : 1 << 20, .bucket_bytes = small ? 1 : 1 << 20});
      expected(value).square().mean().backward();
      const at::Tensor x = distribute_tensor(value, mesh, {Shard(0), Replicate()}, {{0, {4, 1}}});
      const CommTraceScope trace(manager);
      net(x).square().mean().backward();
      expect_gradients(*net, *expected, "data");
      const auto groups = sent(*trace);
      EXPECT_EQ(groups.size(), small ? 8u : 1u);  // eight parameters are used
      for (const auto& group : groups) EXPECT_EQ(group, mesh.group("data").name());
      EXPECT_EQ(trace->events().size(), groups.size()) << trace->table();
    }
    // Over both axes at once: one message among all four ranks.
    Net net = make(), expected = make();
    distribute_module(*net, mesh);
    expected(value).square().mean().backward();
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0), Shard(0)}, {{0, {2, 0, 1, 2}}});
    const CommTraceScope trace(manager);
    net(x).square().mean().backward();
    expect_gradients(*net, *expected, "both");
    EXPECT_EQ(sent(*trace), std::vector<std::string>{mesh.group(std::vector<int>{0, 1}).name()});
    // Replicated data: nothing.
    net->zero_grad();
    trace->clear();
    net(distribute_tensor(value, mesh, {Replicate(), Replicate()})).square().mean().backward();
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    expect_gradients(*net, *expected, "replicated");
  });
}

TEST(ShardedGradients, StayWhereTheyAreInNoSync) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = make(), expected = make();
    distribute_module(*net, mesh);
    const CommTraceScope trace(manager);
    const auto step = [&] {
      const at::Tensor x = randn({5, 4}, at::kDouble);
      expected(x).square().sum().backward();
      net(distribute_tensor(x, mesh, {Shard(0)}, {{0, {3, 0, 2}}})).square().sum().backward();
    };
    {
      const auto scope = no_sync(*net);
      const auto nested = no_sync(*net);
      for (int i = 0; i < 3; ++i) step();
    }
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    EXPECT_TRUE(placements(net->first->weight.grad())[0].is_partial());
    EXPECT_LT(difference(net->first->weight.grad(), expected->first->weight.grad()), 1e-12)
        << "partial, and right all the same";
    trace->clear();
    step();
    EXPECT_EQ(sent(*trace).size(), 1u);
    expect_gradients(*net, *expected, "after no_sync");
    // Onto what is reduced already: one message again, and nothing counted twice.
    trace->clear();
    step();
    EXPECT_EQ(trace->events().size(), 1u) << trace->table();
    expect_gradients(*net, *expected, "a second backward");
    {
      const auto scope = no_sync(*net);
      step();
    }
    trace->clear();
    reduce_gradients(*net);
    EXPECT_EQ(trace->events().size(), 1u);
    expect_gradients(*net, *expected, "reduce_gradients");
    reduce_gradients(*net);
    EXPECT_EQ(trace->events().size(), 1u) << "everything is reduced";
  });
}

TEST(ShardedGradients, StartBeforeBackwardEnds) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = make();
    // Without the parameters that are never used, which hold their bucket back to the end.
    net->unused->weight.set_requires_grad(false);
    net->unused->bias.set_requires_grad(false);
    distribute_module(*net, mesh, ModuleRule(), {.first_bucket_bytes = 1, .bucket_bytes = 1});
    const at::Tensor x = leaf(randn({4, 4}, at::kDouble), ShardSpec(mesh, {4, 4}, {Shard(0)}));
    const auto before = mesh.group("x").sequence();
    std::uint64_t at_the_input = 0;
    x.register_hook([&](const at::Tensor&) { at_the_input = mesh.group("x").sequence(); });
    net(x).square().mean().backward();
    EXPECT_GE(at_the_input - before, 6u)
        << "all but those of the first layer, which come together with the input's";
    EXPECT_EQ(mesh.group("x").sequence() - before, 8u);
  });
}

TEST(ShardedGradients, AreTheSameBitsInEveryRun) {
  std::vector<std::vector<at::Tensor>> runs(2);
  for (auto& run : runs) {
    on_ranks(3, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", 3}});
      Net net;
      fill(*net, 5);
      distribute_module(*net, mesh, ModuleRule(), {.first_bucket_bytes = 100, .bucket_bytes = 300});
      torch::optim::AdamW opt(net->parameters(), 0.01);
      for (int i = 0; i < 5; ++i) {
        opt.zero_grad();
        net(distribute_tensor(randn({7, 4}), mesh, {Shard(0)}, {{0, {4, 0, 3}}}))
            .square()
            .mean()
            .backward();
        opt.step();
      }
      std::vector<at::Tensor> all;
      for (const auto& p : net->parameters()) {
        at::Tensor mine = to_local(p.detach()).clone();
        at::Tensor largest = mine.clone(), least = mine.clone();
        mesh.all().all_reduce(largest, ReduceOp::max);
        mesh.all().all_reduce(least, ReduceOp::min);
        EXPECT_TRUE(at::equal(largest, least)) << "the same on all ranks";
        all.push_back(mine);
      }
      if (manager.rank() == 0) run = all;
    });
  }
  for (std::size_t i = 0; i < runs[0].size(); ++i)
    EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
}

TEST(ShardedGradients, OfAParameterThatMeetsShardedAndReplicatedData) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear net(4, 4), expected(4, 4);
    for (auto* m : {&net, &expected}) {
      (*m)->to(at::kDouble);
      fill(**m, 2);
    }
    const at::Tensor a = randn({5, 4}, at::kDouble), b = randn({3, 4}, at::kDouble);
    distribute_module(*net, mesh);
    const at::Tensor sa = distribute_tensor(a, mesh, {Shard(0)}, {{0, {1, 4}}}),
                     sb = distribute_tensor(b, mesh, {Replicate()});
    for (int i = 0; i < 2; ++i) {
      (expected(a).square().sum() + expected(b).square().sum()).backward();
      const CommTraceScope trace(manager);
      (net(sa).square().sum() + net(sb).square().sum()).backward();
      EXPECT_EQ(sent(*trace).size(), 1u);
      expect_gradients(*net, *expected, "one backward");
    }
    // Replicated data alone, onto a reduced gradient and onto a partial one.
    expected(b).square().sum().backward();
    net(sb).square().sum().backward();
    expect_gradients(*net, *expected, "replicated");
    {
      const auto scope = no_sync(*net);
      net(sa).square().sum().backward();
    }
    net(sb).square().sum().backward();
    expected(a).square().sum().backward();
    expected(b).square().sum().backward();
    expect_gradients(*net, *expected, "onto a partial one");
  });
}

TEST(ShardedGradients, PlainParametersGetPlainReducedOnes) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = make(), expected = make();
    const at::Tensor value = randn({5, 4}, at::kDouble);
    expected(value).square().mean().backward();
    net(distribute_tensor(value, mesh, {Shard(0)}, {{0, {2, 0, 3}}})).square().mean().backward();
    for (const auto& item : expected->named_parameters()) {
      const at::Tensor g = net->named_parameters()[item.key()].grad();
      ASSERT_EQ(g.defined(), item.value().grad().defined()) << item.key();
      if (!g.defined()) continue;
      EXPECT_FALSE(is_sharded(g));
      EXPECT_LT(difference(g, item.value().grad()), 1e-12) << item.key();
    }
  });
}

// Runs its body's backward inside its own backward, as reentrant checkpointing does.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->saved_data["weight"] = weight;
    context->save_for_backward({x});
    const at::NoGradGuard no_grad;
    return torch::tanh(x.mm(weight));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(),
                     weight = context->saved_data["weight"].toTensor();
    at::Tensor y;
    {
      const at::AutoGradMode grad(true);
      y = torch::tanh(x.mm(weight));
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

TEST(ShardedGradients, OfCheckpointedModules) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const bool overlap : {true, false}) {
      torch::nn::Linear net(4, 4), expected(4, 4);
      for (auto* m : {&net, &expected}) {
        (*m)->to(at::kDouble);
        fill(**m, 2);
      }
      distribute_module(*net, mesh, ModuleRule(),
                        {.first_bucket_bytes = 1, .bucket_bytes = 1, .overlap = overlap});
      const auto loss = [](torch::nn::Linear& m, const at::Tensor& x) {
        // The weight's gradient comes in three pieces, two of them from nested backwards.
        return Reentrant::apply(Reentrant::apply(m->forward(x), m->weight), m->weight)
            .square()
            .sum();
      };
      for (int i = 0; i < 2; ++i) {
        const at::Tensor x = randn({5, 4}, at::kDouble);
        loss(expected, x).backward();
        loss(net, distribute_tensor(x, mesh, {Shard(0)}, {{0, {4, 1}}})).backward();
        expect_gradients(*net, *expected, concat("overlap ", overlap, " backward ", i));
      }
    }
  });
}

TEST(ShardedGradients, OfGradients) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = make(), expected = make();
    distribute_module(*net, mesh);
    const at::Tensor value = randn({5, 4}, at::kDouble);
    const auto second = [](Net& m, const at::Tensor& x) {
      m(x).square().sum().backward({}, std::nullopt, true);
      at::Tensor norm;
      for (const auto& p : m->parameters()) {
        if (!p.grad().defined()) continue;
        const at::Tensor g = p.grad();
        p.mutable_grad() = at::Tensor();
        norm = norm.defined() ? norm + g.square().sum() : g.square().sum();
      }
      norm.backward();
    };
    second(expected, value);
    second(net, distribute_tensor(value, mesh, {Shard(0)}, {{0, {4, 1}}}));
    expect_gradients(*net, *expected, "second derivatives");
  });
}

TEST(ShardedGradients, OfAModuleThatIsGoneAreForgotten) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    c10::weak_intrusive_ptr<c10::TensorImpl> weight{c10::intrusive_ptr<c10::TensorImpl>()};
    {
      Net net = make();
      distribute_module(*net, mesh);
      net(distribute_tensor(randn({4, 4}, at::kDouble), mesh, {Shard(0)})).sum().backward();
      weight = c10::weak_intrusive_ptr<c10::TensorImpl>(net->first->weight.getIntrusivePtr());
    }
    EXPECT_TRUE(weight.expired()) << "nothing keeps the parameters";
  });
}

// An exception in the middle of backward leaves nothing behind that the next one stumbles over.
TEST(ShardedGradients, AreReducedAgainAfterABackwardThatFailed) {
  for (const bool overlap : {true, false}) {
    on_ranks(2, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"data", 2}});
      Net net = make(), plain = make();
      distribute_module(*net, mesh, ModuleRule(),
                        {.first_bucket_bytes = 1, .bucket_bytes = 1, .overlap = overlap});
      seed(11);
      const at::Tensor input = randn({5, 4}, at::kDouble);
      for (int which = 0; which < 4; ++which) {
        const auto loss = [&](Net& of, const at::Tensor& x, bool fails) {
          at::Tensor h = torch::tanh(of->first(x));
          const auto raise = [&](const at::Tensor& t, int number) {
            if (fails && number == which)
              t.register_hook(
                  [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook"); });
          };
          raise(h, 0);
          h = of->shared(of->norm(h));
          raise(h, 1);
          h = of->last(torch::tanh(h));
          raise(h, 2);
          return h.square().sum();
        };
        const at::Tensor x = distribute_tensor(input, mesh, {Shard(0)});
        if (which < 3) {
          EXPECT_THROW(loss(net, x, true).backward(), std::runtime_error);
        } else {
          // of an operator: dtypes that do not fit
          EXPECT_ANY_THROW(at::mm(x, at::ones({4, 2})));
        }
        net->zero_grad();
        plain->zero_grad();
        loss(net, x, false).backward();
        loss(plain, input, false).backward();
        expect_gradients(*net, *plain, concat("after failure ", which));
      }
    });
  }
}

}  // namespace tessera::test::sharded_gradients_test
