// Half precision: what plain libtorch sums in a wider type is summed in a wider type here too, so
// that large sums, squares and counts do not overflow on the way.

#include "support.h"

namespace tessera::test {

namespace {

using Function = std::function<at::Tensor(const at::Tensor&)>;

// On two ranks, cut in dim 0: finite where plain libtorch is, and equal to the type's rounding.
void as_plain(const char* what, const at::Tensor& value, const Function& f,
              double tolerance = 4e-3) {
  const at::Tensor expected = f(value);
  ASSERT_TRUE(expected.isfinite().all().item<bool>()) << what << ": plain libtorch overflows";
  on_threads(2, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    for (const int dim : {0, 1}) {
      const at::Tensor got =
          f(leaf(value, ShardSpec(mesh, value.sizes().vec(), {Shard(dim)}), false));
      EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << what;
      EXPECT_LT(difference(got, expected, 1e-6), tolerance) << what << " cut in dim " << dim;
    }
  });
}

}  // namespace

TEST(HalfPrecision, Means) {
  as_plain("mean", at::ones({400, 400}, at::kHalf), [](const at::Tensor& x) { return x.mean(); });
  as_plain("mean over the second dim", at::full({4, 70000}, 2, at::kHalf),
           [](const at::Tensor& x) { return x.mean(1); });
}

TEST(HalfPrecision, Losses) {
  const at::Tensor x = at::full({300, 300}, 2, at::kHalf);
  as_plain("mse_loss", x, [](const at::Tensor& t) { return at::mse_loss(t, at::zeros_like(t)); });
  as_plain("l1_loss", x, [](const at::Tensor& t) { return at::l1_loss(t, at::zeros_like(t)); });
  as_plain("smooth_l1_loss", x,
           [](const at::Tensor& t) { return at::smooth_l1_loss(t, at::zeros_like(t)); });
  as_plain("binary_cross_entropy_with_logits", x, [](const at::Tensor& t) {
    return at::binary_cross_entropy_with_logits(t, at::zeros_like(t));
  });
}

TEST(HalfPrecision, Norms) {
  as_plain("norm of 400", at::full({400, 400}, 1, at::kHalf),
           [](const at::Tensor& t) { return at::linalg_vector_norm(t); });
  as_plain(
      "norm of little", at::full({4, 4}, 1e-4, at::kHalf),
      [](const at::Tensor& t) { return at::linalg_vector_norm(t); }, 2e-2);
  as_plain("order 3", at::full({40, 40}, 10, at::kHalf),
           [](const at::Tensor& t) { return at::linalg_vector_norm(t, 3); });
}

TEST(HalfPrecision, Variance) {
  test::seed(5);
  const at::Tensor x = randn({200, 40}, at::kFloat);
  as_plain("wide spread", (x * 100).to(at::kHalf), [](const at::Tensor& t) { return t.var(); });
  as_plain(
      "far from zero", (x + 1000).to(at::kHalf), [](const at::Tensor& t) { return t.var(0); },
      2e-2);
  as_plain(
      "float32 beyond its square", x * 1e18, [](const at::Tensor& t) { return t.std(); }, 1e-5);
}

TEST(HalfPrecision, Pooling) {
  as_plain("avg_pool2d", at::full({64, 64}, 100, at::kHalf), [](const at::Tensor& t) {
    return at::avg_pool2d(t.unsqueeze(0).unsqueeze(0), {32, 32});
  });
  as_plain("adaptive_avg_pool2d", at::full({64, 64}, 100, at::kHalf), [](const at::Tensor& t) {
    return at::adaptive_avg_pool2d(t.unsqueeze(0).unsqueeze(0), {2, 3});
  });
}

TEST(HalfPrecision, NormOfAnotherTypeWithAnEmptyPart) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x =
        leaf(at::ones({4}), ShardSpec(mesh, {4}, {Shard(0)}, {{0, {4, 0}}}), false);
    const at::Tensor norm = at::linalg_vector_norm(x, 2, std::nullopt, false, at::kDouble);
    EXPECT_EQ(norm.scalar_type(), at::kDouble);
    EXPECT_EQ(to_local(norm).scalar_type(), at::kDouble) << "rank " << manager.rank();
    EXPECT_EQ(whole(norm).item<double>(), 2);
  });
}

TEST(Terms, OfPartialValues) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const double inf = std::numeric_limits<double>::infinity();
    // terms of zero among them: rank 1 has nothing of row 0
    const at::Tensor value = at::tensor({1.0, -2.0, 0.0, 4.0}).view({4, 1}).to(at::kDouble);
    const at::Tensor x = leaf(value, ShardSpec(mesh, {4, 1}, {Shard(0)}), false);
    const at::Tensor index = at::arange(4, at::kLong);
    const auto partial = [&] {
      return x.index_select(0, distribute_tensor(index, mesh, {Replicate()}));
    };
    ASSERT_TRUE(spec(partial()).has_partial());
    const auto same = [](const at::Tensor& got, const at::Tensor& expected, const char* what) {
      EXPECT_TRUE(at::allclose(whole(got), expected, 0, 0, true)) << what << "\n" << whole(got);
    };
    same(partial() * inf, value * inf, "times infinity");
    same(partial() / 0, value / 0, "divided by zero");
    same(partial() * 3, value * 3, "times three");
    same(partial() /
             leaf(at::zeros({4, 1}, at::kDouble), ShardSpec::replicated(mesh, {4, 1}), false),
         value / at::zeros({4, 1}, at::kDouble), "divided by a tensor of zeros");
    // a mean of 2 is made of terms of 1.25 and 0.75
    const at::Tensor y =
        leaf(at::tensor({2.5, 1.5}).to(at::kDouble), ShardSpec(mesh, {2}, {Shard(0)}), false);
    EXPECT_EQ(whole(y.mean().sum(at::kLong)).item<std::int64_t>(), 2);
  });
}

}  // namespace tessera::test
