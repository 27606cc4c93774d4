// One way to hold back all that reduces gradients, and sums beside means.
#include "tessera/gradient/sync.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/threads.h"
#include "tessera/gradient/reducer.h"
#include "tessera/gradient/step_weight.h"

namespace tessera {
namespace {

torch::Tensor number(double value) { return torch::full({2}, value, torch::kDouble); }
torch::Tensor parameter(double value = 1) { return number(value).requires_grad_(); }
bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.defined() && torch::allclose(a, b, 1e-12, 1e-12);
}

std::vector<ReducerOptions> sum_options() {
  std::vector<ReducerOptions> all;
  for (const bool overlap : {true, false})
    for (const bool view : {true, false})
      for (const std::int64_t bytes : {1l, 1l << 20}) all.push_back({bytes, bytes, overlap, view});
  return all;
}

// What was reduced counts once, whichever ranks add to it afterwards.
TEST(SummedGradients, AccumulateOntoWhatIsReduced) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const auto& options : sum_options()) {
      run_threads(ranks, [&](DistributedManager& manager) {
        const int r = manager.rank();
        const double all = ranks * (ranks + 1) / 2.0;  // sum of r + 1
        const Group world = manager.world();
        const auto a = parameter(), b = parameter(), unused = parameter();
        const GradientReducer reducer({{a, "a", world, ReduceOp::sum},
                                       {b, "b", world, ReduceOp::sum},
                                       {unused, "unused", world, ReduceOp::sum}},
                                      options);
        const auto loss = [&](double k) { return a.sum() * (k * (r + 1)); };
        double expected = 0, expected_b = 0;
        for (int step = 0; step < 4; ++step) {
          const int user = step % ranks;  // one rank alone uses b, another one each time
          auto l = loss(step + 1);
          if (r == user) l = l + b.sum() * 5;
          l.backward();
          expected += (step + 1) * all;
          expected_b += 5;
          EXPECT_TRUE(same(a.grad(), number(expected))) << a.grad() << ranks << " step " << step;
          EXPECT_TRUE(same(b.grad(), number(expected_b))) << b.grad() << ranks << " step " << step;
          EXPECT_FALSE(unused.grad().defined());
        }
        {
          const NoSync scope({a});
          loss(1).backward();
          loss(2).backward();
        }
        loss(3).backward();
        EXPECT_TRUE(same(a.grad(), number(expected + 6 * all))) << a.grad();
        EXPECT_TRUE(same(b.grad(), number(expected_b))) << "nobody used it";
        reduce_gradients({a, b});
        EXPECT_TRUE(same(a.grad(), number(expected + 6 * all))) << "everything is reduced";
        for (const bool to_none : {true, false}) {
          for (const auto& p : {a, b}) {
            if (to_none)
              p.mutable_grad().reset();
            else if (p.grad().defined())
              p.grad().detach_().zero_();
          }
          loss(1).backward();
          EXPECT_TRUE(same(a.grad(), number(all)));
          if (!to_none) {
            EXPECT_TRUE(same(b.grad(), number(0)) || !b.grad().defined());
          }
        }
        // autograd::grad() accumulates nothing, and changes nothing.
        const auto alone = torch::autograd::grad({loss(2)}, {a})[0];
        EXPECT_TRUE(same(alone, number(2.0 * (r + 1))));
        EXPECT_TRUE(same(a.grad(), number(all)));
      });
    }
  }
}

TEST(SummedGradients, WeightedByHandInAnyDtypeAndAfterAFailure) {
  for (const auto& options : sum_options()) {
    run_threads(3, [&](DistributedManager& manager) {
      const int r = manager.rank();
      const double weights[] = {0.3, 0, 0.1};  // a rank may count for nothing
      const auto w = parameter();
      const auto half = torch::ones({2}, torch::kHalf).requires_grad_();
      const GradientReducer reducer(
          {{w, "w", manager.world(), ReduceOp::premultiplied(weights[r])},
           {half, "half", manager.world(), ReduceOp::premultiplied(weights[r])}},
          options);
      const double once = 0.3 * 1 + 0.1 * 3;
      for (int k = 1; k <= 3; ++k) {
        (w.sum() * (r + 1) + half.sum() * (r + 1)).backward();
        EXPECT_TRUE(same(w.grad(), number(k * once))) << w.grad();
        EXPECT_TRUE(torch::allclose(half.grad().to(torch::kDouble), number(k * once), 1e-3, 1e-3));
      }
      // An exception after w was accumulated: the rank that had begun anew has lost nothing.
      auto x = w * 1;
      auto fails = half * 1;
      fails.register_hook(
          [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("a hook"); });
      EXPECT_THROW((fails.sum() + x.sum().to(torch::kHalf)).backward(), std::runtime_error);
      for (const auto& p : {w, half}) p.mutable_grad().reset();
      (w.sum() * (r + 1)).backward();
      EXPECT_TRUE(same(w.grad(), number(once))) << w.grad();
    });
  }
}

// A mean over the ranks of a host, and then over hosts, whatever gradient comes first.
TEST(SeveralReducers, OfOneParameterWorkOneAfterTheOther) {
  run_threads(4, [](DistributedManager& manager) {
    const int r = manager.rank();
    const auto mesh = manager.mesh({{"host", 2}, {"device", 2}});
    for (const bool plain_first : {true, false}) {
      const auto w = parameter(), v = parameter();
      const GradientReducer inner({{w, "w", mesh.group("device"), ReduceOp::sum}});
      const GradientReducer outer({{v, "v", mesh.group("host")}, {w, "w", mesh.group("host")}});
      for (int k = 1; k <= 2; ++k) {
        // Gradients come in the reverse of the order of use.
        auto l = plain_first ? w.sum() * r + v.sum() * r : v.sum() * r + w.sum() * r;
        l.backward();
        EXPECT_TRUE(same(w.grad(), number(k * 3.0))) << w.grad();  // (0+1 + 2+3) / 2
        EXPECT_TRUE(same(v.grad(), number(k * (r % 2 + 1.0)))) << v.grad();
      }
      const auto all = gradient_syncs({v, w});  // v has the later one alone
      EXPECT_EQ(all.size(), 2u);
      EXPECT_EQ(all, gradient_syncs({w, v}));
    }
    const auto w = parameter();
    const GradientReducer one({{w, "w", mesh.group("device"), ReduceOp::sum}});
    EXPECT_THROW(GradientReducer({{w, "w", manager.world(), ReduceOp::sum}}), GradientError);
    EXPECT_THROW(GradientReducer({{w, "w", manager.world()}}), GradientError);
    // A mean of equal values changes nothing.
    const auto u = parameter();
    const GradientReducer a({{u, "u", manager.world()}}), b({{u, "u", manager.world()}});
    (u.sum() * r).backward();
    EXPECT_TRUE(same(u.grad(), number(1.5)));
  });
}

// What one rank alone still has of what was made before would make calls that the others do not.
TEST(SeveralReducers, OneThatOneRankAloneKeepsIsToldOnEveryRank) {
  for (const int keeper : {0, 1, 2}) {
    run_threads(3, [&](DistributedManager& manager) {
      const Group world = manager.world();
      const auto v = parameter(), w = parameter();
      const std::vector<ReducedParameter> means{{v, "v", world}, {w, "w", world}};
      auto old = std::make_unique<GradientReducer>(std::vector<ReducedParameter>{{w, "w", world}});
      w.sum().backward();
      if (manager.rank() != keeper) old.reset();
      for (const auto op : {ReduceOp::avg, ReduceOp::sum}) {
        try {
          const GradientReducer made({{v, "v", world, op}, {w, "w", world, op}});
          ADD_FAILURE() << "rank " << manager.rank() << " saw nothing";
        } catch (const MismatchError& e) {
          EXPECT_NE(std::string(e.what()).find("parameter 'w'"), std::string::npos) << e.what();
          EXPECT_NE(std::string(e.what()).find("earlier reducer"), std::string::npos) << e.what();
        }
      }
      old.reset();
      w.mutable_grad().reset();
      const auto reduces = [&] {
        for (const auto& p : {v, w}) p.mutable_grad().reset();
        (v.sum() * manager.rank() + w.sum() * (manager.rank() + 1)).backward();
        EXPECT_TRUE(same(v.grad(), number(1))) << v.grad();
        EXPECT_TRUE(same(w.grad(), number(2))) << w.grad();
      };
      auto one = std::make_unique<GradientReducer>(means);
      reduces();
      // Dropped by all: what is left compares once more, and then no longer.
      auto two = std::make_unique<GradientReducer>(means);
      reduces();
      one.reset();
      reduces();
      {
        const CommTraceScope trace(manager);
        reduces();
        for (const auto& call : trace->events()) EXPECT_EQ(call.operation, "all_reduce");
      }
      // Dropped by all but one.
      const GradientReducer three(means);
      reduces();
      if (manager.rank() != keeper) two.reset();
      EXPECT_THROW((v.sum() + w.sum()).backward(), MismatchError);
    });
  }
}

// What a rank refuses by itself is heard in all groups of its reducer, and in theirs.
TEST(SeveralReducers, WhatOneRankRefusesIsToldOnEveryRank) {
  run_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"host", 2}, {"device", 2}});
    const bool odd = manager.rank() == 1;
    const auto w = parameter(), v = parameter();
    const auto made = [&](const at::Tensor& first, const at::Tensor& second,
                          const ReducerOptions& options = {}) {
      const GradientReducer reducer(
          {{first, "w", mesh.group("device")}, {second, "v", mesh.group("host")}}, options);
    };
    EXPECT_THROW(made(odd ? w * 1 : w, v), MismatchError);
    EXPECT_THROW(made(w, odd ? w : v), MismatchError);
    EXPECT_THROW(made(w, v, {.bucket_bytes = odd ? 0 : 1}), MismatchError);
    EXPECT_THROW(made(w, v, {.gradient_as_bucket_view = odd}), MismatchError);
    EXPECT_THROW(made(w, v, {.learn_order = odd}), MismatchError);
    EXPECT_THROW(made(w, v, {.learn_order = true}), InvalidArgument);
    {
      const GradientReducer inner({{w, "w", mesh.group("device"), ReduceOp::sum}});
      EXPECT_THROW(made(w, v), GradientError);
    }
    EXPECT_NO_THROW(made(w, v));
  });
}

TEST(SeveralReducers, AGradientOfAnotherShapeIsRefused) {
  run_threads(2, [](DistributedManager& manager) {
    const auto w = parameter(), v = parameter(), u = parameter();
    GradientReducer reducer(
        {{w, "w", manager.world()}, {v, "v", manager.world()}, {u, "u", manager.world()}});
    (w.sum() + v.sum() + u.sum()).backward();
    const NoSync scope({w});
    (w.sum() + v.sum() + u.sum()).backward();
    v.set_data(torch::ones({5}, torch::kDouble));  // a parameter that changed since
    v.mutable_grad() = torch::full({5}, 7.0, torch::kDouble);
    try {
      reducer.reduce();
      ADD_FAILURE() << "a slot of two numbers took five";
    } catch (const GradientError& e) {
      EXPECT_NE(std::string(e.what()).find("'v'"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("[5]"), std::string::npos) << e.what();
    }
    EXPECT_TRUE(same(w.grad(), number(2))) << "neighbours keep what they had";
    EXPECT_TRUE(same(u.grad(), number(2)));
  });
}

// A wrapper that Tessera has never seen.
struct Own : GradientSync {
  bool syncing() const override { return on; }
  void set_syncing(bool now) override {
    if (broken) throw std::runtime_error("cannot");
    on = now;
    ++switched;
  }
  void reduce() override { ++reduced; }
  std::optional<double> scale(const at::Tensor&) const override { return 0.5; }
  bool on = true, broken = false;
  int switched = 0, reduced = 0;
};

TEST(NoSync, FindsAllThatReduceAParameterAndRestoresWhatWas) {
  run_threads(2, [](DistributedManager& manager) {
    const auto w = parameter(), v = parameter();
    const auto own = std::make_shared<Own>();
    const GradientReducer reducer({{w, "w", manager.world()}});
    attach_gradient_sync({w, v}, own);
    EXPECT_EQ(gradient_syncs({v, w, v}).size(), 2u);
    {
      const NoSync scope({v, w});
      EXPECT_FALSE(reducer.syncing());
      EXPECT_FALSE(own->on);
      {
        const NoSync again({w});
        EXPECT_EQ(own->switched, 1) << "the outermost scope switches";
      }
      EXPECT_FALSE(reducer.syncing());
      EXPECT_FALSE(own->on);
      // Scopes that do not end in the reverse order.
      auto first = std::make_unique<NoSync>(std::vector{w});
      const NoSync second({w});
      first.reset();
      EXPECT_FALSE(reducer.syncing());
    }
    EXPECT_TRUE(reducer.syncing());
    EXPECT_TRUE(own->on);
    // What was off before is off afterwards.
    own->on = false;
    {
      const NoSync scope({w});
    }
    EXPECT_FALSE(own->on);
    own->on = true;
    // Left by an exception; a scope that is moved ends once.
    EXPECT_THROW(
        {
          NoSync scope({w});
          const NoSync moved = std::move(scope);
          throw std::runtime_error("in the scope");
        },
        std::runtime_error);
    EXPECT_TRUE(reducer.syncing());
    EXPECT_TRUE(own->on);
    // One that cannot be held back: the others are released.
    own->broken = true;
    EXPECT_THROW(NoSync({w}), std::runtime_error);
    EXPECT_TRUE(reducer.syncing());
    own->broken = false;
    (w.sum() * manager.rank()).backward();
    EXPECT_TRUE(same(w.grad(), number(0.5)));
    reduce_gradients({w, v});
    EXPECT_EQ(own->reduced, 1);
    EXPECT_THROW(attach_gradient_sync({torch::ones({2})}, own), InvalidArgument);
    EXPECT_THROW(attach_gradient_sync({w}, nullptr), InvalidArgument);
  });
  const auto w = parameter();
  {
    attach_gradient_sync({w}, std::make_shared<Own>());
  }
  EXPECT_TRUE(gradient_syncs({w}).empty()) << "held weakly";
  w.sum().backward();
}

// One step of parameters that come together in several ways.
TEST(StepWeight, KnowsHowEachGradientCameTogether) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_threads(ranks, [&](DistributedManager& manager) {
      const Group world = manager.world();
      const int r = manager.rank();
      const auto mean = parameter(), sum = parameter(), hand = parameter(), by_own = parameter();
      const GradientReducer reducer({{mean, "mean", world},
                                     {sum, "sum", world, ReduceOp::sum},
                                     {hand, "hand", world, ReduceOp::premultiplied(2)}});
      const auto own = std::make_shared<Own>();
      attach_gradient_sync({by_own}, own);
      StepWeight step(world);
      double total = 0, expected = 0;
      for (int q = 0; q < ranks; ++q) {
        const double n = q == 1 ? 0 : q + 1;  // a rank without samples
        total += n, expected += n * (q + 1);
      }
      const double n = r == 1 ? 0 : r + 1;
      step.weigh((mean + sum + by_own).sum() * (r + 1), n).backward();
      world.all_reduce(by_own.mutable_grad(), ReduceOp::sum);
      by_own.mutable_grad().mul_(0.5);
      step.finish({mean, sum, by_own});
      for (const auto& p : {mean, sum, by_own})
        EXPECT_TRUE(same(p.grad(), number(expected / total))) << p.grad() << ranks;

      // What is weighted by hand has a denominator already.
      if (ranks > 1) {
        step.weigh(hand.sum(), 1).backward();
        EXPECT_THROW(step.finish({hand}), GradientError);
      }

      // Nobody has said how this one comes together.
      const auto unknown = parameter();
      step.weigh((unknown + mean).sum(), 2).backward();
      const auto before = mean.grad().clone();
      if (ranks == 1) {
        step.finish({mean, unknown});
      } else {
        EXPECT_THROW(step.finish({mean, unknown}), GradientError);
        EXPECT_TRUE(mean.grad().equal(before));
        StepWeight said(world, StepWeight::Reduced::summed);
        unknown.mutable_grad().reset();
        said.weigh(unknown.sum(), 2).backward();
        world.all_reduce(unknown.mutable_grad(), ReduceOp::sum);
        said.finish({unknown});
        EXPECT_TRUE(same(unknown.grad(), number(1)));
      }
    });
  }
}

// A wrapper that says over which ranks it sums.
struct OverRanks : Own {
  OverRanks(std::optional<double> by, std::vector<int> over) : by(by), over(std::move(over)) {}
  std::optional<double> scale(const at::Tensor&) const override { return by; }
  std::vector<int> ranks(const at::Tensor&) const override { return over; }
  std::optional<double> by;
  std::vector<int> over;
};

TEST(GradientSum, JoinsWhatReducesAParameterOneAfterTheOther) {
  using Reductions = std::vector<std::pair<std::optional<double>, std::vector<int>>>;
  const auto sum_of = [](const Reductions& reductions) {
    const auto w = parameter();
    std::vector<std::shared_ptr<OverRanks>> syncs;
    for (const auto& [by, over] : reductions) {
      syncs.push_back(std::make_shared<OverRanks>(by, over));
      attach_gradient_sync({w}, syncs.back());
    }
    return gradient_sum(w);
  };
  const auto none = sum_of({}), mean = sum_of({{0.5, {0, 1}}}), sum = sum_of({{1.0, {3, 1}}});
  EXPECT_EQ(none->reducers, 0);
  EXPECT_TRUE(mean->is_mean());
  EXPECT_FALSE(sum->is_mean());
  EXPECT_TRUE(sum->covers({1, 3}));
  EXPECT_TRUE(sum->covers({1}));
  EXPECT_FALSE(sum->covers({1, 2}));
  // Within hosts, and then over hosts: this rank does not see all of the four.
  const auto two = sum_of({{1.0, {0, 1}}, {0.5, {0, 2}}});
  EXPECT_EQ(two->scale, 0.5);
  EXPECT_EQ(two->count, 4);
  EXPECT_TRUE(two->covers({0, 1, 2, 3}));
  EXPECT_FALSE(two->covers({0, 1, 2, 3, 4}));
  // A mean of equal values, and a mean of means.
  EXPECT_EQ(sum_of({{0.25, {0, 1, 2, 3}}, {0.25, {0, 1, 2, 3}}})->scale, 0.25);
  EXPECT_EQ(sum_of({{0.25, {0, 1, 2, 3}}, {0.5, {0, 1}}})->scale, 0.25);
  EXPECT_EQ(sum_of({{0.5, {0, 1}}, {0.25, {0, 1, 2, 3}}})->scale, 0.25);
  EXPECT_EQ(sum_of({{0.5, {0, 1}}, {0.25, {0, 1, 2, 3}}})->count, 4);
  EXPECT_FALSE(sum_of({{1.0, {0, 1}}, {0.5, {0, 1}}}));
  EXPECT_FALSE(sum_of({{1.0 / 3, {0, 1, 2}}, {1.0 / 3, {0, 1, 3}}}));
  // What does not say.
  EXPECT_FALSE(sum_of({{1.0, {0, 1}}, {std::nullopt, {0, 2}}}));
  const auto unnamed = sum_of({{1.0, {0, 1}}, {0.5, {}}});
  EXPECT_EQ(unnamed->scale, 0.5);
  EXPECT_EQ(unnamed->count, 0);
  EXPECT_TRUE(unnamed->covers({7, 8}));
}

// A step that counts other samples than a gradient holds.
TEST(StepWeight, OtherRanksThanAGradientsAreRefused) {
  run_threads(4, [](DistributedManager& manager) {
    const Group world = manager.world();
    const auto mesh = manager.mesh({{"host", 2}, {"device", 2}});
    const double r = manager.rank();
    const auto gradient = [&](const at::Tensor& p, const Group& over) {
      StepWeight step(over);
      p.mutable_grad().reset();
      step.weigh(p.sum() * r, 1 + r).backward();
      step.finish({p});
      return p.grad();
    };
    const double expected = (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10.0;
    for (const ReduceOp op : {ReduceOp::avg, ReduceOp::sum}) {
      const auto w = parameter();
      const GradientReducer inner({{w, "w", mesh.group("device"), op}});
      try {
        gradient(w, world);
        ADD_FAILURE() << "the samples of the other host are counted, and their gradients missing";
      } catch (const GradientError& e) {
        EXPECT_NE(std::string(e.what()).find("2 ranks"), std::string::npos) << e.what();
      }
      EXPECT_THROW(gradient(w, mesh.group("host")), GradientError);
      const double first = r < 2 ? 0 : 2, n = first + 1, m = first + 2;
      EXPECT_TRUE(
          same(gradient(w, mesh.group("device")), number((first * n + (first + 1) * m) / (n + m))));
      const GradientReducer outer({{w, "w", mesh.group("host"), op}});
      EXPECT_TRUE(same(gradient(w, world), number(expected))) << w.grad();
    }
    // A mean over ranks whose samples the step does not count.
    const auto v = parameter();
    const GradientReducer mean({{v, "v", world}});
    EXPECT_THROW(gradient(v, mesh.group("device")), GradientError);
    EXPECT_TRUE(same(gradient(v, world), number(expected)));
    const GradientReducer again({{v, "v", world}});
    EXPECT_TRUE(same(gradient(v, world), number(expected))) << "a mean of equal values";
  });
}

TEST(MeanLoss, FollowsHowGradientsComeTogetherOrIsRefused) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    run_threads(ranks, [&](DistributedManager& manager) {
      const Group world = manager.world();
      const int r = manager.rank();
      const auto w = parameter(), averaged = parameter();
      const GradientReducer reducer(
          {{w, "w", world, ReduceOp::sum}, {averaged, "averaged", world}});
      double total = 0, expected = 0;
      for (int q = 0; q < ranks; ++q) total += q, expected += q * (q + 1);
      mean_loss(w.sum() * (r + 1), r, world, ReduceOp::sum).backward();
      mean_loss(averaged.sum() * (r + 1), r, world).backward();
      EXPECT_TRUE(same(w.grad(), number(expected / total))) << w.grad();
      EXPECT_TRUE(same(averaged.grad(), number(expected / total)));
      for (const auto& p : {w, averaged}) p.mutable_grad().reset();
      EXPECT_THROW(mean_loss(w.sum() * (r + 1), r, world).backward(), GradientError);
      for (const auto& p : {w, averaged}) p.mutable_grad().reset();
      // Two losses of one backward, each of which is scaled as its parameters need it.
      (mean_loss(w.sum() * (r + 1), r, world, ReduceOp::sum) +
       mean_loss(averaged.sum() * (r + 1), r, world))
          .backward();
      EXPECT_TRUE(same(w.grad(), number(expected / total))) << w.grad();
      EXPECT_TRUE(same(averaged.grad(), number(expected / total)));
      EXPECT_THROW(mean_loss(w.sum(), 1, world, ReduceOp::premultiplied(2)), InvalidArgument);
      EXPECT_THROW(mean_loss(w.sum(), 1, world, ReduceOp::max), InvalidArgument);
    });
  }
}

}  // namespace
}  // namespace tessera
