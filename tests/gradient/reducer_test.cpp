#include "tessera/gradient/reducer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "tessera/comm/job/threads.h"

namespace tessera {
namespace {

torch::Tensor leaf(const torch::Tensor& value) { return value.clone().requires_grad_(); }

// The mean over ranks of a function of the rank.
torch::Tensor mean_over(int ranks, const std::function<torch::Tensor(int)>& of) {
  torch::Tensor sum = of(0);
  for (int r = 1; r < ranks; ++r) sum = sum + of(r);
  return sum / ranks;
}

void expect_equal(const torch::Tensor& a, const torch::Tensor& b) {
  EXPECT_TRUE(torch::allclose(a, b, 1e-12, 1e-12)) << a << "\n" << b;
}

std::vector<ReducerOptions> all_options() {
  std::vector<ReducerOptions> options;
  for (const bool overlap : {true, false})
    for (const bool view : {true, false})
      for (const std::int64_t bytes : {1l, 100l, 1l << 20})
        options.push_back({bytes, bytes, overlap, view});
  return options;
}

TEST(Reducer, AveragesOverRanksAndAccumulates) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (const auto& options : all_options())
      run_threads(ranks, [&](DistributedManager& manager) {
        const double r = manager.rank();
        auto a = leaf(torch::full({3, 2}, 2.0, torch::kDouble)),
             b = leaf(torch::ones({5}, torch::kDouble)), c = leaf(torch::ones({}, torch::kFloat));
        GradientReducer reducer(
            {{a, "a", manager.world()}, {b, "b", manager.world()}, {c, "c", manager.world()}},
            options);
        auto loss = [&](double k) {
          return (a * a).sum() * (r + k) + (b * (r * k)).sum() + c * (r + 1);
        };
        const double mean_r = (ranks - 1) / 2.0;
        loss(1).backward();
        expect_equal(a.grad(), torch::full_like(a, 4 * (mean_r + 1)));
        expect_equal(b.grad(), torch::full_like(b, mean_r));
        // Onto gradients that are reduced already.
        loss(2).backward();
        expect_equal(a.grad(), torch::full_like(a, 4 * (2 * mean_r + 3)));
        expect_equal(b.grad(), torch::full_like(b, 3 * mean_r));
        {
          const NoSync scope({a, b, c}), nested({b});
          loss(3).backward();
          EXPECT_FALSE(reducer.syncing());
          expect_equal(b.grad(), torch::full_like(b, 3 * mean_r + 3 * r));
        }
        loss(4).backward();
        expect_equal(a.grad(), torch::full_like(a, 4 * (4 * mean_r + 10)));
        expect_equal(b.grad(), torch::full_like(b, 10 * mean_r));
        {
          const NoSync scope({a, b, c});
          loss(1).backward();
        }
        reducer.reduce();
        expect_equal(b.grad(), torch::full_like(b, 11 * mean_r));
        // Without gradients, as after zero_grad.
        for (auto& p : {a, b, c}) p.mutable_grad().reset();
        loss(1).backward();
        expect_equal(a.grad(), torch::full_like(a, 4 * (mean_r + 1)));
        EXPECT_FLOAT_EQ(c.grad().item<float>(), static_cast<float>(mean_r + 1));
      });
}

TEST(Reducer, GoesOnAfterABackwardThatFailed) {
  for (const auto& options : all_options())
    run_threads(2, [&](DistributedManager& manager) {
      const double r = manager.rank();
      auto a = leaf(torch::ones({3}, torch::kDouble)), b = leaf(torch::ones({2}, torch::kDouble)),
           c = leaf(torch::ones({4}, torch::kDouble));
      GradientReducer reducer(
          {{a, "a", manager.world()}, {b, "b", manager.world()}, {c, "c", manager.world()}},
          options);
      for (const bool set_to_none : {true, false}) {
        for (int which = 0; which < 4; ++which) {
          const auto fails = [&](const torch::Tensor& t, int number) {
            auto same = t * 1;
            if (number == which)
              same.register_hook([](const torch::Tensor&) -> torch::Tensor {
                throw std::runtime_error("a hook");
              });
            return same;
          };
          auto loss = (fails(a, 0) * (r + 1)).sum() + (fails(b, 1) * (r + 2)).sum() +
                      (fails(c, 2) * (r + 3)).sum();
          if (which < 3) {
            EXPECT_THROW(loss.backward(), std::runtime_error);
          } else {
            loss.backward();
          }
          for (auto& p : {a, b, c}) {
            if (set_to_none) p.mutable_grad().reset();
            if (p.grad().defined()) p.grad().zero_();
          }
          ((a * (r + 1)).sum() + (b * (r + 2)).sum()).backward();
          expect_equal(a.grad(), torch::full_like(a, 1.5));
          expect_equal(b.grad(), torch::full_like(b, 2.5));
          if (set_to_none) {
            EXPECT_FALSE(c.grad().defined());
          }
          for (auto& p : {a, b, c}) p.mutable_grad().reset();
        }
      }
    });
}

// True if the ranks that share this host share these bytes.
bool shared_by_ranks(const torch::Tensor& t) {
  std::ifstream maps("/proc/self/maps");
  const auto at = reinterpret_cast<std::uintptr_t>(t.const_data_ptr());
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) == 2 && at >= begin &&
        at < end)
      return line.find("memfd:tessera") != std::string::npos;
  }
  return false;
}

TEST(Reducer, LargeBucketsLieInMemoryThatRanksShare) {
  ManagerOptions options;
  options.backend = "shm";
  for (int ranks = 2; ranks <= 3; ++ranks)
    for (const bool view : {true, false})
      run_threads(
          ranks,
          [&](DistributedManager& manager) {
            const int r = manager.rank();
            const double mean_r = (ranks - 1) / 2.0;
            auto a = leaf(torch::ones({300, 100}, torch::kDouble)),
                 b = leaf(torch::ones({20000}, torch::kDouble)),
                 c = leaf(torch::ones({10}, torch::kDouble)),
                 d = leaf(torch::ones({40000}, torch::kFloat));
            const auto world = manager.world();
            // Two at once on one group.
            GradientReducer reducer({{a, "a", world}, {b, "b", world}, {c, "c", world}},
                                    {80, 100000, true, view}),
                another({{d, "d", world}}, {1 << 20, 1 << 20, true, view});
            EXPECT_EQ(reducer.buckets().size(), 3U);
            const auto step = [&](bool fails) {
              const auto ends = [&](const torch::Tensor& t) {
                auto same = t * 1;
                if (fails)
                  same.register_hook([](const torch::Tensor&) -> torch::Tensor {
                    throw std::runtime_error("a hook");
                  });
                return same;
              };
              auto loss = (b * (r + 1)).sum() + (c * r).sum() + (d * r).sum();
              (loss + (ends(a) * (r + 2)).sum()).backward();
            };
            for (int i = 0; i < 3; ++i) {
              if (i == 1) {
                EXPECT_THROW(step(true), std::runtime_error);
              }
              for (auto& p : {a, b, c, d}) p.mutable_grad().reset();
              step(false);
              expect_equal(a.grad(), torch::full_like(a, mean_r + 2));
              expect_equal(b.grad(), torch::full_like(b, mean_r + 1));
              expect_equal(c.grad(), torch::full_like(c, mean_r));
              expect_equal(d.grad(), torch::full_like(d, mean_r));
            }
            EXPECT_EQ(shared_by_ranks(a.grad()), view);
            EXPECT_EQ(shared_by_ranks(d.grad()), view);
            EXPECT_FALSE(shared_by_ranks(c.grad()));
          },
          options);
}

TEST(Reducer, ParametersThatSomeOrNoRanksUse) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (const auto& options : all_options())
      run_threads(ranks, [&](DistributedManager& manager) {
        const int r = manager.rank();
        auto used = leaf(torch::ones({2}, torch::kDouble)),
             by_one = leaf(torch::ones({3}, torch::kDouble)),
             by_none = leaf(torch::ones({4}, torch::kDouble));
        GradientReducer reducer({{used, "used", manager.world()},
                                 {by_one, "by_one", manager.world()},
                                 {by_none, "by_none", manager.world()}},
                                options);
        for (int step = 0; step < 3; ++step) {
          for (auto& p : {used, by_one, by_none}) p.mutable_grad().reset();
          auto loss = used.sum() * (r + 1.0);
          if (r == step % ranks) loss = loss + by_one.sum() * 6;
          loss.backward();
          expect_equal(used.grad(), mean_over(ranks, [&](int q) {
                                      return torch::full_like(used, q + 1.0);
                                    }).detach());
          expect_equal(by_one.grad(), torch::full_like(by_one, 6.0 / ranks).detach());
          EXPECT_FALSE(by_none.grad().defined());
        }
        // A gradient that nobody touches stays: here one that is not even the same on all ranks.
        by_none.mutable_grad() = torch::full({4}, 10.0 + r, torch::kDouble);
        used.sum().backward();
        expect_equal(by_none.grad(), torch::full({4}, 10.0 + r, torch::kDouble));
      });
}

TEST(Reducer, ARankWithoutAnyBackwardTakesPartByReduce) {
  for (const auto& options : all_options())
    run_threads(3, [&](DistributedManager& manager) {
      auto p = leaf(torch::ones({2}, torch::kDouble)), q = leaf(torch::ones({2}, torch::kDouble));
      GradientReducer reducer({{p, "p", manager.world()}, {q, "q", manager.world()}}, options);
      if (manager.rank() == 1)
        reducer.reduce();
      else
        (p + q).sum().backward();
      expect_equal(p.grad(), torch::full({2}, 2.0 / 3, torch::kDouble));
      expect_equal(q.grad(), torch::full({2}, 2.0 / 3, torch::kDouble));
    });
}

TEST(Reducer, EachParameterOverItsOwnGroupAndOperation) {
  run_threads(4, [](DistributedManager& manager) {
    const int r = manager.rank();
    const auto mesh = manager.mesh({{"data", 2}, {"model", 2}});
    auto p = leaf(torch::ones({2}, torch::kDouble)), q = leaf(torch::ones({2}, torch::kDouble)),
         s = leaf(torch::ones({2}, torch::kComplexDouble));
    GradientReducer reducer({{p, "p", mesh.group("data")},
                             {q, "q", mesh.group("model"), ReduceOp::sum},
                             {s, "s", manager.world()}});
    (torch::real(s).sum() * r + (p + q).sum() * r).backward();
    expect_equal(p.grad(), torch::full({2}, (r % 2 + r % 2 + 2) / 2.0, torch::kDouble));
    expect_equal(q.grad(), torch::full({2}, 1.0 + 4 * (r / 2), torch::kDouble));
    expect_equal(torch::real(s.grad()), torch::full({2}, 1.5, torch::kDouble));
  });
}

TEST(Reducer, TheCallersHooksStayInForceAndGradOnlyCallsSendNothing) {
  struct Count : torch::autograd::PostAccumulateGradHook {
    explicit Count(int& n) : n(n) {}
    void operator()(const torch::Tensor&) override { ++n; }
    int& n;
  };
  run_threads(2, [](DistributedManager& manager) {
    int calls = 0;
    auto p = leaf(torch::ones({2}, torch::kDouble));
    torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<Count>(calls));
    {
      GradientReducer reducer({{p, "p", manager.world()}});
      const auto before = manager.world().sequence();
      if (manager.rank() == 0) torch::autograd::grad({p.sum()}, {p});
      EXPECT_EQ(manager.world().sequence(), before);
      (p.sum() * manager.rank()).backward();
      expect_equal(p.grad(), torch::full({2}, 0.5, torch::kDouble));
    }
    // The reducer is gone; its hook does nothing any more.
    (p.sum() * manager.rank()).backward();
    EXPECT_EQ(calls, 2);
  });
}

// Runs its body's backward inside its own backward, as reentrant checkpointing does.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               torch::Tensor weight) {
    // the leaf itself: its gradient is accumulated by the inner backward
    context->saved_data["weight"] = weight;
    context->save_for_backward({x});
    at::NoGradGuard no_grad;
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    auto weight = context->saved_data["weight"].toTensor();
    torch::Tensor y;
    {
      at::AutoGradMode grad(true);
      y = x * weight;
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

TEST(Reducer, NestedBackward) {
  for (int ranks = 1; ranks <= 3; ++ranks)
    for (const auto& options : all_options())
      run_threads(ranks, [&](DistributedManager& manager) {
        const double r = manager.rank(), mean_r = (ranks - 1) / 2.0;
        auto inner = leaf(torch::full({2}, 3.0, torch::kDouble)),
             outer = leaf(torch::full({2}, 2.0, torch::kDouble));
        GradientReducer reducer(
            {{outer, "outer", manager.world()}, {inner, "inner", manager.world()}}, options);
        Checkpoint::apply(outer * (r + 1), inner).sum().backward();
        expect_equal(inner.grad(), torch::full({2}, 2 * (mean_r + 1), torch::kDouble));
        expect_equal(outer.grad(), torch::full({2}, 3 * (mean_r + 1), torch::kDouble));
      });
}

enum class Throws { never, in_function, in_recomputation, in_nested_backward };

// As Checkpoint, of a body that autograd does not see into, and that may throw.
struct Recomputed : torch::autograd::Function<Recomputed> {
  struct Body {
    torch::Tensor weight;
    Throws throws;
  };
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               const Body& body) {
    context->saved_data["weight"] = body.weight;
    context->saved_data["throws"] = static_cast<int>(body.throws);
    context->save_for_backward({x});
    at::NoGradGuard no_grad;
    return x * body.weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto throws = static_cast<Throws>(context->saved_data["throws"].toInt());
    if (throws == Throws::in_function) throw std::runtime_error("a function");
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad(true);
    auto same = x * 1;
    if (throws == Throws::in_recomputation) throw std::runtime_error("a recomputation");
    // called when the weight's gradient has been accumulated
    if (throws == Throws::in_nested_backward)
      same.register_hook([](const torch::Tensor&) -> torch::Tensor {
        throw std::runtime_error("a nested backward");
      });
    (same * context->saved_data["weight"].toTensor()).backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

TEST(Reducer, GoesOnAfterAFunctionOrARecomputationThatFailed) {
  for (const auto& options : all_options())
    run_threads(2, [&](DistributedManager& manager) {
      const double r = manager.rank();
      auto outer = leaf(torch::full({2}, 2.0, torch::kDouble)),
           inner = leaf(torch::full({2}, 3.0, torch::kDouble)),
           other = leaf(torch::ones({5}, torch::kDouble));
      GradientReducer reducer({{outer, "outer", manager.world()},
                               {inner, "inner", manager.world()},
                               {other, "other", manager.world()}},
                              options);
      // The gradient of what is used last is accumulated first.
      const auto loss = [&](Throws throws, bool other_first) {
        torch::Tensor sum = torch::zeros({}, torch::kDouble);
        if (!other_first) sum = sum + (other * (r + 2)).sum();
        sum = sum + Recomputed::apply(outer * (r + 1), Recomputed::Body{inner, throws}).sum();
        return other_first ? sum + (other * (r + 2)).sum() : sum;
      };
      for (const bool set_to_none : {true, false}) {
        for (const bool other_first : {true, false}) {
          for (const auto throws :
               {Throws::in_function, Throws::in_recomputation, Throws::in_nested_backward}) {
            EXPECT_THROW(loss(throws, other_first).backward(), std::runtime_error);
            for (auto& p : {outer, inner, other}) {
              if (set_to_none) p.mutable_grad().reset();
              if (p.grad().defined()) p.grad().zero_();
            }
            loss(Throws::never, other_first).backward();
            expect_equal(outer.grad(), torch::full_like(outer, 3 * 1.5));
            expect_equal(inner.grad(), torch::full_like(inner, 2 * 1.5));
            expect_equal(other.grad(), torch::full_like(other, 2.5));
            for (auto& p : {outer, inner, other}) p.mutable_grad().reset();
          }
        }
      }
    });
}

struct Maybe : torch::autograd::Function<Maybe> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               bool gives) {
    context->saved_data["gives"] = gives;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const bool gives = context->saved_data["gives"].toBool();
    return {gives ? gradients[0] : torch::Tensor(), torch::Tensor()};
  }
};

// A backward that has no gradient for a parameter, on all ranks or on one.
TEST(Reducer, AnUndefinedGradientAddsNothing) {
  for (const auto& options : all_options()) {
    for (const auto& op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::premultiplied(0.3)}) {
      run_threads(2, [&](DistributedManager& manager) {
        const auto p = leaf(torch::ones({2}, torch::kDouble));
        GradientReducer reducer({{p, "p", manager.world(), op}}, options);
        const double scale = op.kind == ReduceOp::Kind::sum   ? 1
                             : op.kind == ReduceOp::Kind::avg ? 0.5
                                                              : 0.3;
        double expected = 0;
        // Bits: the ranks that have a gradient.
        for (const int ranks : {3, 0, 3, 1, 0, 2, 3}) {
          const bool gives = (ranks >> manager.rank() & 1) != 0;
          (Maybe::apply(p, gives).sum() * (manager.rank() + 1.0)).backward();
          for (int r = 0; r < 2; ++r) expected += (ranks >> r & 1) * (r + 1) * scale;
          expect_equal(p.grad(), torch::full_like(p, expected));
        }
      });
    }
  }
}

TEST(Reducer, RefusesWhatItCannotReduce) {
  const auto p = leaf(torch::ones({2}));
  EXPECT_THROW(GradientReducer({{torch::ones({2}), "p", Group()}}), InvalidArgument);
  EXPECT_THROW(GradientReducer({{p * 2, "p", Group()}}), InvalidArgument);
  EXPECT_THROW(GradientReducer({{p, "p", Group()}, {p, "q", Group()}}), InvalidArgument);
  EXPECT_THROW(GradientReducer({{p, "p", Group()}}, {.bucket_bytes = 0}), InvalidArgument);
  auto table = leaf(torch::ones({4, 2}));
  GradientReducer reducer({{table, "table", Group()}});
  EXPECT_THROW(
      torch::nn::functional::embedding(torch::tensor({1}), table,
                                       torch::nn::functional::EmbeddingFuncOptions().sparse(true))
          .sum()
          .backward(),
      std::exception);
}

TEST(Reducer, RanksThatDifferAllGetAnError) {
  run_threads(3, [](DistributedManager& manager) {
    auto p = leaf(torch::ones({manager.rank() == 2 ? 3 : 2}));
    try {
      GradientReducer reducer({{p, "weight", manager.world()}});
      ADD_FAILURE() << "rank " << manager.rank() << " saw nothing";
    } catch (const MismatchError& e) {
      EXPECT_NE(std::string(e.what()).find("weight"), std::string::npos);
      EXPECT_NE(std::string(e.what()).find("[3]"), std::string::npos) << e.what();
    }
  });
}

}  // namespace
}  // namespace tessera
