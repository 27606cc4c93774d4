// What the mechanism keeps, rule by rule, on uneven shards and where it takes more than one tensor
// to break it. Suites are named after the rules; those of gradients are in
// mechanism_gradients_test.cpp, and what everything replicated can show is in mechanism_test.cpp.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <thread>

#include "../support/sanitized.h"
#include "call_counts.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/dispatch/rule.h"
#include "uneven_rows.h"

namespace {
// Allocations of this thread, by operator new: what kernels allocate for values does not come this
// way.
thread_local std::int64_t allocations = 0;
}  // namespace

#ifndef __SANITIZE_ADDRESS__  // which has its own
[[gnu::noinline]] void* operator new(std::size_t n) {
  ++allocations;
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
// Inlined, GCC 12 takes free() for the wrong end of new.
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
#endif

namespace tessera::test::mechanism_rules_test {

namespace {

void expect_shown_alike(const at::Tensor& got, const at::Tensor& plain, const std::string& where) {
  EXPECT_EQ(got.sizes(), plain.sizes()) << where;
  EXPECT_EQ(got.strides(), plain.strides()) << where;
  EXPECT_EQ(got.storage_offset(), plain.storage_offset()) << where;
  EXPECT_EQ(got.is_contiguous(), plain.is_contiguous()) << where;
  EXPECT_EQ(got.is_contiguous(at::MemoryFormat::ChannelsLast),
            plain.is_contiguous(at::MemoryFormat::ChannelsLast))
      << where;
  EXPECT_EQ(got.is_non_overlapping_and_dense(), plain.is_non_overlapping_and_dense()) << where;
  EXPECT_EQ(got.numel(), plain.numel()) << where;
}

}  // namespace

TEST(Rule01TrueStrides, OfViewsAndOfWhatIsMadeOfThem) {
  on_three([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor plain = randn({5, 4, 6, 2}), x = by_rows(plain, mesh);
    const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> views =
        {
            {"transpose", [](const at::Tensor& t) { return t.transpose(0, 2); }},
            {"permute", [](const at::Tensor& t) { return t.permute({3, 1, 0, 2}); }},
            {"narrow", [](const at::Tensor& t) { return t.narrow(1, 1, 2); }},
            {"slice with a step", [](const at::Tensor& t) { return t.slice(2, 1, 6, 2); }},
            {"select", [](const at::Tensor& t) { return t.select(1, 3); }},
            {"expand", [](const at::Tensor& t) { return t.unsqueeze(1).expand({5, 3, 4, 6, 2}); }},
            {"diagonal", [](const at::Tensor& t) { return t.diagonal(0, 1, 2); }},
            {"channels_last",
             [](const at::Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); }},
            {"view", [](const at::Tensor& t) { return t.view({5, 24, 2}); }},
            {"detach of a view", [](const at::Tensor& t) { return t.transpose(1, 2).detach(); }},
    };
    for (const auto& [name, view] : views) {
      const at::Tensor got = view(x), expected = view(plain);
      expect_shown_alike(got, expected, name);
      expect_shown_alike(got * 2, expected * 2, concat(name, " times two"));
      expect_shown_alike(got.clone(), expected.clone(), concat("clone of ", name));
      EXPECT_EQ(difference(got, expected), 0) << name;
    }
    // Given strides are those of the global tensor, and never reach the local.
    const at::Tensor t = by_rows(randn({5, 6}), mesh);
    EXPECT_EQ(difference(at::_reshape_alias(t, {5, 2, 3}, {6, 3, 1}), whole(t).view({5, 2, 3})), 0);
  });
}

// A fused kernel walks all its tensors in one order, that of the memory of the first.
TEST(Rule02RankInvariant, LocalsOfOneKernelLieAlike) {
  on_three([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor value = randn({5, 4}, at::kDouble), slope = randn({5, 4}, at::kDouble);
    const auto step = [&](const std::function<at::Tensor(const at::Tensor&)>& place) {
      // All are transposed in memory; the kernel needs no other rank.
      const at::Tensor p = place(value.t().contiguous().t()), g = place(slope.t().contiguous().t()),
                       momentum = at::zeros_like(p);
      at::_fused_sgd_({p}, {g}, {momentum}, 0.1, 0.9, 0.5, 0, true, false, true);
      at::_fused_sgd_({p}, {g}, {momentum}, 0.1, 0.9, 0.5, 0, true, false, false);
      return std::make_pair(p, momentum);
    };
    const auto expected = step([](const at::Tensor& t) { return t.clone(); });
    const auto got = step([&](const at::Tensor& t) {
      return leaf(t, ShardSpec::replicated(mesh, t.sizes().vec()), false);
    });
    EXPECT_LT(difference(got.first, expected.first), 1e-14);
    EXPECT_LT(difference(got.second, expected.second), 1e-14);
    try {
      const auto sharded = step([&](const at::Tensor& t) { return by_rows(t, mesh); });
      EXPECT_LT(difference(sharded.first, expected.first), 1e-14);
      EXPECT_LT(difference(sharded.second, expected.second), 1e-14);
    } catch (const NoRuleError&) {
    }
  });
}

TEST(Rule05WritesToViews, AsStridedIsDecodedOrRefused) {
  on_three([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor plain = randn({5, 4});
    for (const bool sharded : {false, true}) {
      const at::Tensor x =
          sharded ? by_rows(plain, mesh) : leaf(plain, ShardSpec::replicated(mesh, {5, 4}), false);
      int equal = 0;
      for (const auto& [size, stride, offset] : std::vector<
               std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t>>{
               {{5, 4}, {4, 1}, 0},
               {{4, 5}, {1, 4}, 0},
               {{5, 2}, {4, 1}, 1},
               {{3, 3}, {1, 1}, 2},
               {{2, 7}, {9, 1}, 0}}) {
        try {
          EXPECT_EQ(difference(x.as_strided(size, stride, offset),
                               plain.as_strided(size, stride, offset)),
                    0)
              << "strides " << list(stride);
          ++equal;
        } catch (const ShardingError&) {
        }
      }
      EXPECT_GE(equal, sharded ? 1 : 5);
    }
  });
}

// A tangent is carried, or refused: it is never dropped.
TEST(Rule11Promotion, ForwardModeTangents) {
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();  // the process has one
  on_three([level](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor value = randn({5, 4}, at::kDouble), along = randn({5, 4}, at::kDouble),
                     w = randn({5, 4}, at::kDouble);
    const auto number = static_cast<std::int64_t>(level);
    int carried = 0;
    for (const auto& [name, f] :
         std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>>{
             {"mul", [&](const at::Tensor& t) { return t * t; }},
             {"mul with a plain one", [&](const at::Tensor& t) { return t * w; }},
             {"exp", [&](const at::Tensor& t) { return t.exp(); }},
             {"t", [&](const at::Tensor& t) { return t.t(); }},
             {"detach", [&](const at::Tensor& t) { return t.detach() + t; }},
             {"add_", [&](const at::Tensor& t) { return t.clone().add_(t); }}}) {
      const at::Tensor plain = at::_make_dual(value, along, number);
      const at::Tensor expected = std::get<1>(at::_unpack_dual(f(plain), number));
      for (const bool sharded : {false, true}) {
        const auto place = [&](const at::Tensor& t) {
          return sharded ? by_rows(t, mesh) : leaf(t, ShardSpec::replicated(mesh, {5, 4}), false);
        };
        at::Tensor tangent;
        try {
          const at::Tensor dual = at::_make_dual(place(value), place(along), number);
          tangent = std::get<1>(at::_unpack_dual(f(dual), number));
        } catch (const Error&) {
          continue;
        }
        ASSERT_TRUE(tangent.defined()) << name << ": the tangent is lost";
        EXPECT_LT(difference(tangent, expected), 1e-14) << name << " sharded " << sharded;
        ++carried;
      }
    }
    EXPECT_GE(carried, 5) << "of replicated tensors at least";
  });
  torch::autograd::ForwardADLevel::release_idx(level);
}

// Engine and kernels on side streams. Without a device there is no stream.
TEST(Rule20Streams, OfForwardAndBackwardMayDiffer) {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA) || at::detail::getCUDAHooks().deviceCount() == 0)
    GTEST_SKIP() << "no CUDA device";
  on_ranks(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    const c10::Device device(c10::kCUDA, 0);
    const at::Tensor value = randn({64, 64}).to(device), weight = randn({64, 64}).to(device);
    const at::Tensor px = value.clone().requires_grad_(true);
    px.mm(weight).relu().sum().backward();
    const at::Tensor x = leaf(value, ShardSpec(mesh, {64, 64}, {Shard(0)}));
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    const c10::Stream side = guard.getStreamFromGlobalPool(device);
    guard.synchronizeDevice(0);
    at::Tensor loss;
    {
      const c10::StreamGuard on(side);
      loss = x.mm(distribute_tensor(weight, mesh, {Replicate()})).relu().sum();
    }
    guard.synchronizeDevice(0);
    loss.backward();
    guard.synchronizeDevice(0);
    EXPECT_LT(difference(x.grad().cpu(), px.grad().cpu()), 1e-5);
  });
}

TEST(Rule21FullySharded, TheShardIsSavedAndGradientsAreReduceScattered) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    // only parameters may be gathered unasked
    set_policies(manager, {.redistribution = Policy::error});
    torch::nn::Linear net(4, 5), expected(4, 5);
    for (auto* m : {&net, &expected}) {
      (*m)->to(at::kDouble);
      fill(**m, 2);
    }
    distribute_module(*net, mesh, {{"weight", {{Shard(0)}, {{0, kUneven}}}}});
    const at::Tensor value = randn({5, 4}, at::kDouble), x = by_rows(value, mesh, true);
    const CommTraceScope trace(manager);
    const at::Tensor y = net(x);
    EXPECT_EQ(calls(*trace), (std::map<std::string, int>{{"all_gather", 1}})) << trace->table();
    EXPECT_TRUE(is_sharded(net->weight) && placements(net->weight)[0].is_shard()) << "as before";
    // t() of a parameter is a new tensor each time, and a parameter all the same.
    trace->clear();
    const at::Tensor z = y.mm(net->weight);
    EXPECT_EQ(calls(*trace), (std::map<std::string, int>{{"all_gather", 1}})) << trace->table();
    trace->clear();
    const at::Tensor loss = z.square().sum();
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    loss.backward();
    auto moved = calls(*trace);
    EXPECT_EQ(moved["all_gather"], 2)
        << "what was saved are the parts: each use gathers once more\n"
        << trace->table();
    EXPECT_EQ(moved["reduce_scatter"], 1) << "of both uses' sum\n" << trace->table();
    EXPECT_TRUE(spec(net->weight.grad()) == spec(net->weight));
    expected(value).mm(expected->weight).square().sum().backward();
    EXPECT_LT(difference(net->weight.grad(), expected->weight.grad()), 1e-13);
  });
}

// In every step of a sequence the same weights are used.
TEST(Rule21FullySharded, ARecurrentLayerGathersItsWeightsOnce) {
  on_three([](DistributedManager& manager, const DeviceMesh& mesh) {
    set_policies(manager, {.redistribution = Policy::error});
    constexpr std::int64_t kSteps = 6;
    const at::Tensor value = randn({kSteps, 5, 4}, at::kDouble);
    const auto compare = [&](const char* name, auto make, int gates) {
      auto net = make(), expected = make();
      for (auto* m : {&net, &expected}) {
        (*m)->to(at::kDouble);
        fill(**m, 3);
      }
      const Sizes rows{3 * gates, 0, 2 * gates};
      distribute_module(*net, mesh, {{"*", {{Shard(0)}, {{0, rows}}}}});
      torch::optim::SGD opt(net->parameters(), 0.1), plain_opt(expected->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        // The input's own history ends the layer's backward; a leaf, and one that needs no
        // gradient, leave that to the end of backward.
        const at::Tensor leaf_x = leaf(value, ShardSpec(mesh, value.sizes().vec(), {Shard(1)},
                                                        {{1, {1, 4, 0}}})),
                         plain_x = value.clone().requires_grad_(true);
        const CommTraceScope trace(manager);
        const at::Tensor y = std::get<0>(net->forward(step == 0 ? leaf_x * 2 : leaf_x));
        EXPECT_EQ(calls(*trace), (std::map<std::string, int>{{"all_gather", 8}}))
            << name << ": two layers of four parameters\n"
            << trace->table();
        trace->clear();
        const at::Tensor loss = y.square().sum();
        loss.backward();
        EXPECT_LE(calls(*trace)["all_gather"], 4) << name << ": both weights of each layer\n"
                                                  << trace->table();
        std::get<0>(expected->forward(step == 0 ? plain_x * 2 : plain_x)).square().sum().backward();
        EXPECT_LT(difference(leaf_x.grad(), plain_x.grad()), 1e-12) << name;
        for (std::size_t i = 0; i < net->parameters().size(); ++i)
          EXPECT_LT(difference(net->parameters()[i].grad(), expected->parameters()[i].grad()),
                    1e-12)
              << name << " parameter " << i;
        // What a step writes is gathered anew.
        opt.step();
        plain_opt.step();
        opt.zero_grad();
        plain_opt.zero_grad();
        const c10::InferenceMode inference;
        EXPECT_LT(
            difference(std::get<0>(net->forward(leaf_x)), std::get<0>(expected->forward(plain_x))),
            1e-12)
            << name;
      }
    };
    compare("LSTM", [] { return torch::nn::LSTM(torch::nn::LSTMOptions(4, 5).num_layers(2)); }, 4);
    compare("GRU", [] { return torch::nn::GRU(torch::nn::GRUOptions(4, 5).num_layers(2)); }, 3);
    compare("RNN", [] { return torch::nn::RNN(torch::nn::RNNOptions(4, 5).num_layers(2)); }, 1);
  });
}

TEST(Rule22Speed, ARuleRunsOnceForEachCombination) {
  static std::atomic<int> asked = 0;
  static auto library = [] {
    torch::Library lib(torch::Library::FRAGMENT, "tessera_rules_test", std::nullopt, __FILE__,
                       __LINE__);
    lib.def("scaled(Tensor x, float by) -> Tensor");
    lib.impl("scaled", torch::dispatch(c10::DispatchKey::CPU,
                                       [](const at::Tensor& t, double by) { return t * by; }));
    return lib;
  }();
  register_rule("tessera_rules_test::scaled", [](const OpCall& c) {
    ++asked;
    Plan plan;
    plan.outputs = {{c.tensor(0).spec, c.tensor(0).strides}};
    return plan;
  });
  on_ranks(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("tessera_rules_test::scaled", "")
                        .typed<at::Tensor(const at::Tensor&, double)>();
    const auto made = [&](std::int64_t rows) {
      return distribute_tensor(at::ones({rows, 2}), mesh, {Shard(0)});
    };
    EXPECT_TRUE(spec(made(3)) == spec(made(3)));
    EXPECT_EQ(spec(made(3)).data().get(), spec(op.call(made(3), 2.0)).data().get())
        << "specs are interned";
    EXPECT_EQ(asked, 1);
    for (int i = 0; i < 10; ++i)
      EXPECT_EQ(difference(op.call(made(3), i), at::full({3, 2}, static_cast<float>(i))), 0);
    EXPECT_EQ(asked, 1) << "a number is no part of the key unless the rule asks for it";
    op.call(made(4), 1.0);
    op.call(made(4).t().contiguous().t(), 1.0);
    EXPECT_EQ(asked, 3);
    // Another thread has a cache of its own.
    std::thread([&] { op.call(made(3), 1.0); }).join();
    EXPECT_EQ(asked, 4);
  });
}

TEST(Rule22Speed, AnOperatorAllocatesLittleMoreThanOnPlainTensors) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer allocates in its own way";
  on_ranks(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    const at::Tensor a = randn({4, 8}), b = randn({4, 8}), w = randn({8, 3});
    const at::Tensor sa = distribute_tensor(a, mesh, {Shard(0)}),
                     sb = distribute_tensor(b, mesh, {Shard(0)}),
                     sw = distribute_tensor(w, mesh, {Replicate()});
    const auto counted = [](const std::function<void()>& f) {
      for (int i = 0; i < 4; ++i) f();
      const std::int64_t before = allocations;
      for (int i = 0; i < 10; ++i) f();
      return static_cast<double>(allocations - before) / 10;
    };
    const at::Tensor ga = a.clone().requires_grad_(true),
                     gs = sa.detach().clone().requires_grad_(true);
    struct Case {
      const char* name;
      double limit;
      std::function<void()> plain, sharded;
    };
    // The wrapper, what it carries, and its version counter; of views also what replaying them
    // takes.
    const std::vector<Case> all = {
        {"add", 3, [&] { a + b; }, [&] { sa + sb; }},
        {"relu", 3, [&] { a.relu(); }, [&] { sa.relu(); }},
        {"mm", 3, [&] { a.mm(w); }, [&] { sa.mm(sw); }},
        {"add_", 0, [&] { a.add_(b); }, [&] { sa.add_(sb); }},
        {"mul_ by a number", 0, [&] { a.mul_(0.5); }, [&] { sa.mul_(0.5); }},
        {"detach", 0, [&] { a.detach(); }, [&] { sa.detach(); }},
        {"add with grad", 3, [&] { ga + b; }, [&] { gs + sb; }},
        {"t", 6, [&] { a.t(); }, [&] { sa.t(); }},
        {"view", 10, [&] { a.view({4, 2, 4}); }, [&] { sa.view({4, 2, 4}); }},
    };
    for (const Case& c : all) {
      const double plain = counted(c.plain), sharded = counted(c.sharded);
      EXPECT_LE(sharded - plain, c.limit) << c.name << ": " << sharded << " beside " << plain;
    }
  });
}

}  // namespace tessera::test::mechanism_rules_test
