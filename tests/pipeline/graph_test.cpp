// The graph of one stage: both halves of a backward give what one gives, compute each product
// once, and free what the second half does not need.

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "pipeline_support.h"
#include "tessera/pipeline/detail/stage_graph.h"

namespace tessera {
namespace {

using detail::StageGraph;
using test::DrawnStage;

struct Twin {
  explicit Twin(std::uint64_t seed, int in = 2, int plain = 2)
      : stage(std::make_shared<DrawnStage>(in, plain, 0, false, false)) {
    test::fill(*stage, seed);
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : stage->parameters()) all.push_back(p.grad());
    return all;
  }
  std::shared_ptr<DrawnStage> stage;
};

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << i;
    if (got[i].defined()) {
      EXPECT_LE(test::difference(got[i], expected[i]), 1e-13) << i;
    }
  }
}

TEST(StageGraph, HalvesEqualTheWhole) {
  test::Draw draw(1);
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Twin whole(seed), halves(seed);
    test::seed(seed);
    const std::vector<at::Tensor> values{test::randn({3, test::kWidth}, at::kDouble),
                                         test::randn({3, test::kWidth}, at::kDouble)};
    const std::vector<bool> wants{draw.chance(70), draw.chance(70)};
    std::vector<at::Tensor> given{test::randn({3, test::kWidth}, at::kDouble),
                                  test::randn({3, test::kWidth}, at::kDouble)};
    if (draw.chance(30)) given[draw.below(2)] = at::Tensor();
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      StageGraph one, two;
      one.leave(whole.stage->forward(one.enter(values, wants)));
      const auto expected = one.backward(given);
      two.leave(halves.stage->forward(two.enter(values, wants)));
      const auto before = halves.gradients();
      const auto got = two.input_gradients(given);
      expect_equal(got, expected);
      if (micro_batch == 0) {
        for (const at::Tensor& g : halves.gradients()) EXPECT_FALSE(g.defined());
      }
      two.weight_gradients();
      expect_equal(halves.gradients(), whole.gradients());
    }
  }
}

int products(const std::function<void()>& body) {
  static thread_local int counted = 0;
  counted = 0;
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& f) {
                                   const std::string name = f.name();
                                   counted += name == "aten::mm" || name == "aten::addmm" ? 1 : 0;
                                   return std::unique_ptr<at::ObserverContext>();
                                 }).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return counted;
}

TEST(StageGraph, NoProductIsComputedTwice) {
  const Twin twin(1);
  const std::vector<at::Tensor> values{test::randn({3, test::kWidth}, at::kDouble),
                                       test::randn({3, test::kWidth}, at::kDouble)};
  const std::vector<at::Tensor> given(2, at::ones({3, test::kWidth}, at::kDouble));
  StageGraph one, two;
  one.leave(twin.stage->forward(one.enter(values, {true, true})));
  const int whole = products([&] { one.backward(given); });
  two.leave(twin.stage->forward(two.enter(values, {true, true})));
  const int inputs = products([&] { two.input_gradients(given); });
  const int weights = products([&] { two.weight_gradients(); });
  // 5 products with weights, each with a gradient on either side.
  EXPECT_EQ(whole, 10);
  EXPECT_EQ(inputs, 5);
  EXPECT_EQ(weights, 5);
}

TEST(StageGraph, FreesWhatTheSecondHalfDoesNotNeed) {
  torch::nn::Linear linear(4, 4), next(4, 4);
  StageGraph graph;
  const at::Tensor x = at::rand({2, 4});
  std::weak_ptr<int> unneeded, needed;
  const auto watch = [](const at::Tensor& t, std::weak_ptr<int>& weak) {
    auto alive = std::make_shared<int>(0);
    weak = alive;
    return at::from_blob(
        t.data_ptr(), t.sizes(), [alive, t](void*) mutable { alive.reset(); }, t.options());
  };
  struct Watched : torch::autograd::Function<Watched> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor&,
                              const at::Tensor& t) {
      return t;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list g) {
      return {g[0], at::Tensor()};
    }
  };
  {
    at::Tensor h = linear(graph.enter({x}, {true})[0]);
    h = Watched::apply(h, watch(h.detach().clone(), unneeded));
    at::Tensor sine = h.sin();  // saves h
    sine = Watched::apply(sine, watch(sine.detach().clone(), needed));
    graph.leave({next(sine)});  // saves sine for its weight
  }
  EXPECT_FALSE(unneeded.expired());
  const auto got = graph.input_gradients({at::ones({2, 4})});
  EXPECT_TRUE(got[0].defined());
  EXPECT_TRUE(unneeded.expired());
  EXPECT_FALSE(needed.expired());
  graph.weight_gradients();
  EXPECT_TRUE(needed.expired());
}

// A Function of the user's that takes a parameter computes both gradients in one call.
struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& by) {
    ctx->save_for_backward({x, by});
    return x * by;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list g) {
    ++calls;
    const auto saved = ctx->get_saved_variables();
    return {g[0] * saved[1], (g[0] * saved[0]).sum(0)};
  }
  static thread_local int calls;
};
thread_local int Scaled::calls = 0;

TEST(StageGraph, OwnFunctionsAndHooksRunOnce) {
  for (const bool hook : {false, true}) {
    const at::Tensor by = at::rand({4}).requires_grad_(), x = at::rand({3, 4});
    int hooked = 0;
    StageGraph graph;
    {
      const at::Tensor entered = graph.enter({x}, {true})[0];
      at::Tensor y = hook ? entered * by : Scaled::apply(entered, by);
      if (hook) {
        y.register_hook([&](const at::Tensor& g) {
          ++hooked;
          return g * 2;
        });
      }
      graph.leave({y});
    }
    Scaled::calls = 0;
    const auto got = graph.input_gradients({at::ones({3, 4})});
    graph.weight_gradients();
    EXPECT_EQ(hook ? hooked : Scaled::calls, 1);
    const double factor = hook ? 2 : 1;
    EXPECT_TRUE(at::allclose(got[0], (by.detach() * factor).expand({3, 4})));
    EXPECT_TRUE(at::allclose(by.grad(), x.sum(0) * factor));
  }
}

}  // namespace
}  // namespace tessera
