// Softmax and losses over classes that are spread over ranks: values and gradients of one process,
// and no rank ever gets all classes.

#include "support.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test::softmax_and_losses_test {

namespace {

struct Case {
  std::vector<std::int64_t> shape;  // of the scores
  bool weighted;
  double smoothing;
  int reduction;
};

at::Tensor loss(const Case& c, const at::Tensor& scores, const at::Tensor& target,
                const at::Tensor& weight) {
  return at::cross_entropy_loss(scores, target,
                                c.weighted ? std::optional<at::Tensor>(weight) : std::nullopt,
                                c.reduction, 1, c.smoothing);
}

}  // namespace

TEST(Classes, CrossEntropyIsThatOfOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(80 + ranks);
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        Case c{{draw.between(1, 5), draw.between(2, 7)},
               draw.chance(50),
               draw.chance(40) ? 0.1 : 0.0,
               draw.between(0, 2)};
        if (draw.chance(25)) c.shape = {draw.between(1, 3), draw.between(2, 5), 2, 3};
        if (draw.chance(15)) c.shape = {draw.between(2, 6)};
        test::seed(i);
        const at::Tensor value = randn(c.shape, at::kDouble);
        const int dim = c.shape.size() > 1 ? 1 : 0;
        std::vector<std::int64_t> targets = c.shape;
        targets.erase(targets.begin() + dim);
        at::Tensor target = randint(c.shape[dim], targets);
        if (target.numel() > 0) target.view({-1})[0] = c.shape[dim] > 2 ? 0 : 0;
        const at::Tensor weight = test::rand({c.shape[dim]}, at::kDouble).add(0.5);
        const at::Tensor plain = value.clone().requires_grad_(true);
        const at::Tensor expected = loss(c, plain, target, weight);
        const at::Tensor along = randn(expected.sizes(), at::kDouble);
        (expected * along).sum().backward();
        const ShardSpec lies = draw.spec(mesh, c.shape);
        const at::Tensor x = leaf(value, lies);
        const at::Tensor got = loss(
            c, x, draw.chance(50) ? target : leaf(target, draw.spec(mesh, targets, false)), weight);
        const std::string where = concat(lies, " weighted ", c.weighted, " smoothing ", c.smoothing,
                                         " reduction ", c.reduction);
        ASSERT_LT(difference(got, expected), 1e-12) << where;
        (got * along).sum().backward();
        ASSERT_LT(difference(x.grad(), plain.grad()), 1e-12) << where;
      }
    });
  }
}

TEST(Classes, SoftmaxIsThatOfOneProcess) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(180 + ranks);
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::vector<std::int64_t> shape = {draw.between(1, 4), draw.between(1, 6),
                                                 draw.between(1, 3)};
        const int dim = draw.below(3);
        const bool logarithm = draw.chance(50);
        const auto f = [&](const at::Tensor& t) {
          return logarithm ? at::log_softmax(t, dim) : at::softmax(t, dim);
        };
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble).mul(20),
                         along = randn(shape, at::kDouble);
        const at::Tensor plain = value.clone().requires_grad_(true);
        (f(plain) * along).sum().backward();
        const at::Tensor x = leaf(value, draw.spec(mesh, shape));
        const at::Tensor got = f(x);
        ASSERT_LT(difference(got, f(plain)), 1e-12);
        const auto g = torch::autograd::grad({(got * along).sum()}, {x}, {}, true, true)[0];
        // Beside the numbers that cancel in it, which are of order one.
        ASSERT_LT((whole(g) - plain.grad()).abs().max().item<double>(), 1e-11);
        const auto again = torch::autograd::grad({(g * g).sum()}, {x})[0];
        const at::Tensor p2 = value.clone().requires_grad_(true);
        const auto pg = torch::autograd::grad({(f(p2) * along).sum()}, {p2}, {}, true, true)[0];
        ASSERT_LT((whole(again) - torch::autograd::grad({(pg * pg).sum()}, {p2})[0])
                      .abs()
                      .max()
                      .item<double>(),
                  1e-10);
      }
    });
  }
}

TEST(Classes, MovesRowsNotClasses) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 4}});
    const std::int64_t rows = 8, classes = 4096;
    const at::Tensor x =
        leaf(randn({rows, classes}, at::kDouble),
             ShardSpec(mesh, {rows, classes}, {Shard(1)}, {{1, {4000, 0, 90, 6}}}));
    const at::Tensor target = distribute_tensor(randint(classes, {rows}), mesh, {Replicate()});
    set_policies(manager, {.plain_values = Policy::allow});
    const CommTraceScope trace(manager);
    at::cross_entropy_loss(x, target, {}, at::Reduction::Mean, -100, 0.1).backward();
    std::int64_t bytes = 0;
    for (const auto& e : trace->events()) {
      EXPECT_EQ(e.operation, "all_reduce");
      bytes += e.bytes;
    }
    EXPECT_LE(bytes, rows * 8 * 8) << "a few numbers a row";
    EXPECT_EQ(spec(x.grad()), spec(x));
    EXPECT_THROW(at::nll_loss(x, distribute_tensor(at::full({rows}, classes), mesh, {Replicate()})),
                 c10::IndexError);
  });
}

}  // namespace tessera::test::softmax_and_losses_test
