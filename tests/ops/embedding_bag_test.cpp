// Bags of embeddings: which indices count, what is refused, and where gradients go.

#include <limits>

#include "support.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::embedding_bag_test {

namespace {

struct Bags {
  std::vector<std::int64_t> indices, offsets;
  std::int64_t mode = 0;
  bool include_last = false;
  std::optional<std::int64_t> padding = std::nullopt;
};

enum : std::int64_t { kSum, kMean, kMax };

at::Tensor bag(const at::Tensor& weight, const at::Tensor& indices, const Bags& b) {
  return std::get<0>(at::embedding_bag(weight, indices, at::tensor(b.offsets, at::kLong), false,
                                       b.mode, false, std::nullopt, b.include_last, b.padding));
}

// Forward and backward, wherever weight and indices lie, against `plain`, run on one process.
void as_plain(const char* what, const at::Tensor& weight, const Bags& b, const Bags& plain,
              double tolerance = 1e-13) {
  const at::Tensor full = weight.detach().clone().requires_grad_(true);
  const at::Tensor expected = bag(full, at::tensor(plain.indices, at::kLong), plain);
  test::seed(1);
  const at::Tensor of = randn(expected.sizes(), at::kDouble).to(weight.scalar_type());
  (expected * of).nan_to_num(0, 0, 0).sum().backward();
  on_threads(2, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    for (const Placement& p : {Shard(0), Shard(1), Replicate()}) {
      for (const Placement& q : {Replicate(), Shard(0)}) {
        const at::Tensor w = leaf(weight, ShardSpec(mesh, weight.sizes().vec(), {p}));
        const at::Tensor i = distribute_tensor(at::tensor(b.indices, at::kLong), mesh, {q});
        const at::Tensor got = bag(w, i, b);
        EXPECT_LT(difference(got, expected), tolerance) << what << p << q;
        (got * of).nan_to_num(0, 0, 0).sum().backward();
        EXPECT_LT(difference(w.grad(), full.grad()), tolerance) << what << p << q;
      }
    }
  });
}
void as_plain(const char* what, const at::Tensor& weight, const Bags& b, double tolerance = 1e-13) {
  as_plain(what, weight, b, b, tolerance);
}

}  // namespace

TEST(EmbeddingBag, CountsBeyondHalfPrecision) {
  const Bags b{std::vector<std::int64_t>(999, 1), {0, 600}, kMean};
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const auto type : {at::kBFloat16, at::kHalf}) {
      const at::Tensor w = distribute_tensor(at::ones({3, 2}, type), mesh, {Shard(1)});
      const at::Tensor indices = at::tensor(b.indices, at::kLong);
      EXPECT_EQ(difference(bag(w, indices, b), at::ones({2, 2}, type)), 0);
      Bags sum = b;
      sum.mode = kSum;
      EXPECT_LT(difference(bag(w, indices, sum), bag(at::ones({3, 2}, type), indices, sum)), 4e-3);
    }
  });
}

TEST(EmbeddingBag, SkipsThePaddingRow) {
  test::seed(2);
  at::Tensor w = randn({5, 4}, at::kDouble);
  w[4].fill_(std::numeric_limits<double>::quiet_NaN());
  for (const std::int64_t mode : {kSum, kMean, kMax}) {
    Bags b{{0, 4, 2, 4, 4, 1, 3}, {0, 3, 5}, mode};
    for (const std::int64_t padding : {4, -1}) {
      b.padding = padding;
      as_plain("padding", w, b);
    }
  }
}

TEST(EmbeddingBag, LeavesOutWhatFollowsTheLastOffset) {
  test::seed(3);
  const at::Tensor w = randn({5, 4}, at::kDouble);
  for (const std::int64_t mode : {kSum, kMean, kMax}) {
    as_plain("cut", w, {{0, 1, 2, 3, 4, 4}, {0, 2, 4}, mode, true},
             {{0, 1, 2, 3}, {0, 2, 4}, mode, true});
    as_plain("not cut", w, {{0, 1, 2, 3}, {0, 2, 4}, mode, true});
    as_plain("an empty bag", w, {{0, 1, 2, 3}, {0, 2, 2}, mode});
  }
}

TEST(EmbeddingBag, GivesTheGradientOfAMaximumToTheFirst) {
  as_plain("ties", at::zeros({3, 2}, at::kDouble), {{0, 1, 2, 2, 1}, {0, 3}, kMax});
}

TEST(EmbeddingBag, RefusesWrongArgumentsOnEveryRank) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor w = distribute_tensor(at::ones({5, 2}), mesh, {Shard(0)});
    const std::vector<std::int64_t> indices = {0, 1, 2, 3};
    for (const Bags& wrong : {Bags{indices, {0, 9}}, Bags{indices, {1, 3}},
                              Bags{indices, {0, 3, 2}}, Bags{indices, {}, kSum, true},
                              Bags{indices, {0, 9}, kSum, true}, Bags{indices, {0}, kSum, false, 5},
                              Bags{indices, {0}, kSum, false, -6}, Bags{indices, {0}, kMax + 1}})
      EXPECT_THROW(bag(w, at::tensor(indices, at::kLong), wrong), c10::Error)
          << list(wrong.offsets);
    EXPECT_EQ(bag(w, at::tensor(indices, at::kLong), {indices, {0}}).sum().item<float>(), 8);
  });
}

}  // namespace tessera::test::embedding_bag_test
