// The dispatcher's side of the mechanism: registration, rules, policies, reads of memory,
// parameters that are exchanged, and ranks that are threads.

#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "mechanism.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::test::mechanism_dispatcher_test {

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

// The impl that showed a sharded tensor is a plain one's then.
TEST(Rule09SetData, ATensorMayBecomePlainAgain) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({4, 3}, at::kDouble);
    at::Tensor t = distribute_tensor(value.clone(), mesh, {Shard(0)});
    const at::Tensor handle = t;
    t.set_data(value.clone());
    EXPECT_FALSE(is_sharded(handle));
    handle.data().mul_(2);
    EXPECT_EQ(difference(handle.detach(), value * 2), 0);
    t.set_data(distribute_tensor(value, mesh, {Shard(1)}));
    EXPECT_TRUE(placements(handle)[0].is_shard(1));
    EXPECT_EQ(difference(handle.data(), value), 0);
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

TEST(Dispatcher, RandomNumbersAreAlikeOnAllRanks) {
  on_threads(2, [](DistributedManager& manager) {
    torch::manual_seed(manager.rank());  // the generators of plain tensors say nothing about it
    const at::Tensor y = at::rand_like(replicated(torch::ones({20}), one_axis(manager)));
    ASSERT_TRUE(is_sharded(y));
    at::Tensor most = to_local(y).clone();
    EXPECT_GT(most.max().item<float>(), most.min().item<float>());
    one_axis(manager).all().all_reduce(most, ReduceOp::max);
    EXPECT_EQ(difference(most, to_local(y)), 0);
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

// ---- threads ----

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
  const at::Tensor value = torch::full({3, 3}, 0.5, at::kDouble).requires_grad_(true);
  torch::ones({4, 3}, at::kDouble).mm(value).mm(value).sum().backward();
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = one_axis(manager);
    for (int i = 0; i < 50; ++i) {
      const at::Tensor w = replicated(value, mesh, true);
      const at::Tensor x = distribute_tensor(torch::ones({4, 3}, at::kDouble), mesh, {Shard(0)});
      const at::Tensor y = redistribute(x.mm(w), {Replicate()});
      std::vector<std::thread::id> threads;
      w.register_hook([&](const at::Tensor&) { threads.push_back(std::this_thread::get_id()); });
      full_tensor(y.mm(w)).sum().backward();
      ASSERT_EQ(threads, std::vector{std::this_thread::get_id()});
      ASSERT_LT(difference(w.grad(), value.grad()), 1e-12);
    }
  });
}

}  // namespace tessera::test::mechanism_dispatcher_test
