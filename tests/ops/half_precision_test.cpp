// Half precision: what plain libtorch sums in a wider type is summed in a wider type here too, so
// that large sums, squares and counts do not overflow on the way.

#include <ATen/autocast_mode.h>

#include "support.h"

namespace tessera::test::half_precision_test {

namespace {

using Function = std::function<at::Tensor(const at::Tensor&)>;

// On two ranks, sharded in dim 0: finite where plain libtorch is, and equal to the type's rounding.
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

// Switches autocast on for this rank.
struct Autocast {
  explicit Autocast(at::ScalarType type) : before(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_dtype(at::kCPU, type);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, before);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  const at::ScalarType before;
};

}  // namespace

TEST(HalfPrecision, Means) {
  as_plain("mean", at::ones({400, 400}, at::kHalf), [](const at::Tensor& x) { return x.mean(); });
  as_plain("mean over the second dim", at::full({4, 70000}, 2, at::kHalf),
           [](const at::Tensor& x) { return x.mean(1); });
}

// The sum of the product's 160,000 elements, 1,600,000, is beyond float16.
TEST(HalfPrecision, MeansOfProductsUnderAutocast) {
  as_plain("mean of a product", at::ones({400, 10}), [](const at::Tensor& x) {
    const Autocast cast(at::kHalf);
    const at::Tensor product = x.matmul(x.t());
    EXPECT_EQ(product.scalar_type(), at::kHalf);
    return product.mean();
  });
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

// Of what is made of norms: squares that are beyond float16, and squares that are 0 in it.
TEST(HalfPrecision, OperatorsThatAreMadeOfNorms) {
  namespace F = torch::nn::functional;
  for (const double size : {20., 1e-4}) {
    const at::Tensor x = at::full({400, 400}, size, at::kHalf);
    const double tolerance = size > 1 ? 4e-3 : 2e-2;
    as_plain("norm", x.narrow(0, 0, 40), [](const at::Tensor& t) { return t.norm(); }, tolerance);
    as_plain("norm of columns", x, [](const at::Tensor& t) { return t.norm(2, 0); }, tolerance);
    as_plain(
        "dist", x.narrow(0, 0, 40),
        [](const at::Tensor& t) { return at::dist(t, at::zeros_like(t)); }, tolerance);
    for (const int dim : {0, 1}) {
      as_plain(
          "normalize", x,
          [dim](const at::Tensor& t) {
            return F::normalize(t, F::NormalizeFuncOptions().dim(dim));
          },
          tolerance);
      as_plain(
          "cosine_similarity", x,
          [dim](const at::Tensor& t) { return at::cosine_similarity(t, t * 0.5, dim); }, tolerance);
    }
  }
}

// A layer all of whose values are of half precision, forward and backward: the backward pass is
// given the statistics in the dtype in which libtorch's kernels make them.
TEST(HalfPrecision, NormsAreTrained) {
  using Norm = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>;
  const std::vector<std::pair<const char*, Norm>> norms = {
      {"batch_norm",
       [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
         return at::batch_norm(x, w, b, {}, {}, true, 0.1, 1e-5, false);
       }},
      {"group_norm", [](const at::Tensor& x, const at::Tensor& w,
                        const at::Tensor& b) { return at::group_norm(x, 2, w, b); }},
      {"layer_norm",
       [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
         return at::layer_norm(x, {6, 6}, at::outer(w, b), at::outer(b, w));
       }},
  };
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    test::seed(7);
    const at::Tensor value = randn({4, 6, 6}), weight = rand({6}) + 1, bias = randn({6}),
                     other = randn({4, 6, 6});
    for (const auto type : {at::kBFloat16, at::kHalf}) {
      for (const auto of_weight : {type, at::kFloat}) {
        for (const auto& [name, norm] : norms) {
          const auto run = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
                               const at::Tensor& times) {
            (norm(x, w, b) * times).sum().backward();
            return std::vector<at::Tensor>{x.grad(), w.grad(), b.grad()};
          };
          const auto plain = [](const at::Tensor& t, at::ScalarType as) {
            return t.to(as).clone().requires_grad_(true);
          };
          const auto expected = run(plain(value, type), plain(weight, of_weight),
                                    plain(bias, of_weight), other.to(type));
          // Also where a rank has nothing.
          for (const auto& [dim, sizes] : std::vector<std::pair<int, Sizes>>{
                   {0, {2, 2}}, {0, {4, 0}}, {1, {3, 3}}, {2, {3, 3}}, {2, {0, 6}}}) {
            for (const int of_other : {0, 2}) {
              const auto got = run(
                  leaf(value.to(type), ShardSpec(mesh, {4, 6, 6}, {Shard(dim)}, {{dim, sizes}})),
                  leaf(weight.to(of_weight), ShardSpec::replicated(mesh, {6})),
                  leaf(bias.to(of_weight), ShardSpec::replicated(mesh, {6})),
                  leaf(other.to(type), ShardSpec(mesh, {4, 6, 6}, {Shard(of_other)}), false));
              for (int i = 0; i < 3; ++i)
                EXPECT_LT(difference(got[i], expected[i]), type == at::kHalf ? 1e-2 : 6e-2)
                    << name << " cut in " << dim << " and " << of_other << ", gradient " << i;
            }
          }
        }
      }
    }
    // Plain libtorch refuses them, whatever the input's layout.
    for (const int dim : {0, 1, 2}) {
      const at::Tensor x =
          leaf(value.to(at::kHalf), ShardSpec(mesh, {4, 6, 6}, {Shard(dim)}), false);
      EXPECT_ANY_THROW(at::group_norm(x, 2, weight.to(at::kDouble), bias.to(at::kDouble)));
      EXPECT_ANY_THROW(at::group_norm(x.to(at::kFloat), 2, weight.to(at::kDouble), bias));
      EXPECT_TRUE(x.sum().isfinite().item<bool>());
    }
  });
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
  as_plain("interpolate by areas", at::full({64, 64}, 100, at::kHalf), [](const at::Tensor& t) {
    namespace F = torch::nn::functional;
    return F::interpolate(
        t.unsqueeze(0).unsqueeze(0),
        F::InterpolateFuncOptions().size(std::vector<std::int64_t>{2, 3}).mode(torch::kArea));
  });
}

// The limit that docs/operators/matmul.md states: summands are rounded before they are added.
TEST(HalfPrecision, SummandsOfPartialProductsAreOfTheTypeOfTheResult) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    // 90,000, rank 0's summand, is beyond float16; the sum, 30,000, is not.
    const at::Tensor a = at::full({2, 2}, 300), b = at::tensor({300.F, -200.F}).view({2, 1});
    const auto product = [&](at::ScalarType type) {
      return distribute_tensor(a.to(type), mesh, {Shard(1)})
          .matmul(distribute_tensor(b.to(type), mesh, {Shard(0)}));
    };
    for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat}) {
      const at::Tensor got = product(type), expected = a.to(type).matmul(b.to(type));
      ASSERT_EQ(spec(got).placements()[0], Partial()) << type;
      ASSERT_EQ(expected.max().item<float>(), type == at::kBFloat16 ? 29952 : 30000);
      if (type == at::kHalf) {
        EXPECT_TRUE(whole(got).isposinf().all().item<bool>()) << whole(got);
      } else {
        EXPECT_LT(difference(got, expected), 1e-2) << type;
      }
    }
  });
}

TEST(HalfPrecision, NormOfAnotherTypeWithAnEmptyShard) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x =
        leaf(at::ones({4}), ShardSpec(mesh, {4}, {Shard(0)}, {{0, {4, 0}}}), false);
    const at::Tensor norm = at::linalg_vector_norm(x, 2, std::nullopt, false, at::kDouble);
    EXPECT_EQ(norm.scalar_type(), at::kDouble);
    EXPECT_EQ(to_local(norm).scalar_type(), at::kDouble) << "rank " << manager.rank();
    EXPECT_EQ(whole(norm).item<double>(), 2);
    // of a list, as optimizers clip it: the second is empty on the other rank
    const at::Tensor y = leaf(at::full({9}, 2.0, at::kFloat),
                              ShardSpec(mesh, {9}, {Shard(0)}, {{0, {0, 9}}}), false);
    const auto norms = at::_foreach_norm({x, y}, 2, at::kDouble);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(norms[i].scalar_type(), at::kDouble) << i;
      EXPECT_EQ(to_local(norms[i]).scalar_type(), at::kDouble) << "rank " << manager.rank();
      EXPECT_EQ(whole(norms[i]).item<double>(), i == 0 ? 2 : 6);
    }
  });
}

TEST(Partial, ValuesOfDtypes) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const double inf = std::numeric_limits<double>::infinity();
    // summands of zero among them: rank 1 has nothing of row 0
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
    same(partial().mul_(inf), value * inf, "times infinity in place");
    same(partial().div_(0.), value / 0, "divided by zero in place");
    same(partial().mul_(3), value * 3, "times three in place");
    const auto number = [&](double n) {
      return distribute_tensor(at::scalar_tensor(n, at::kDouble), mesh, {Replicate()});
    };
    same(partial() * number(inf), value * inf, "times a tensor that is infinite");
    same(number(inf) * partial(), value * inf, "an infinite tensor times it");
    same(partial().mul_(number(inf)), value * inf, "times a tensor that is infinite, in place");
    same(number(3) * partial(), value * 3, "three times");
    {
      const at::Tensor y = partial(), alias = y.detach(), rows = y.narrow(0, 0, 2);
      y.mul_(inf);
      same(alias, value * inf, "an alias of the target");
      same(rows, (value * inf).narrow(0, 0, 2), "a view of the target");
    }
    same(partial() /
             leaf(at::zeros({4, 1}, at::kDouble), ShardSpec::replicated(mesh, {4, 1}), false),
         value / at::zeros({4, 1}, at::kDouble), "divided by a tensor of zeros");
    // A sum of booleans is "any".
    const at::Tensor truth = at::tensor({1, 0, 1, 1, 1, 0}, at::kInt).view({2, 3}).to(at::kBool);
    const auto any = [&] {
      return from_local(truth[manager.rank()].clone(), mesh, {Partial(ReduceOp::Kind::sum)});
    };
    const at::Tensor together = whole(any()), numbers = at::ones({3}, at::kDouble);
    const at::Tensor beside = distribute_tensor(numbers, mesh, {Replicate()});
    same(at::cat({any(), beside}), at::cat({together, numbers}), "cat of booleans and floats");
    same(at::stack({any(), beside}), at::stack({together, numbers}),
         "stack of booleans and floats");
    same(any().mean(at::kDouble), together.mean(at::kDouble), "mean of booleans");
    same(any().sum(), together.sum(), "number of those that are true");
    same(any().sum(0, true), together.sum(0, true), "number of those that are true, in dim 0");
    same(any() * -3, together * -3, "booleans times a number");
    same(any() * at::full({3}, -3), together * at::full({3}, -3), "booleans times a tensor");
    same(any() / 2, together / 2, "booleans divided by a number");
    // a mean of 2 is the sum of 1.25 and 0.75
    const at::Tensor y =
        leaf(at::tensor({2.5, 1.5}).to(at::kDouble), ShardSpec(mesh, {2}, {Shard(0)}), false);
    EXPECT_EQ(whole(y.mean().sum(at::kLong)).item<std::int64_t>(), 2);
  });
}

// Autocast does not know linalg_pinv, but casts the products that it is made of.
TEST(HalfPrecision, InsideOfOperatorsUnderAutocast) {
  // The inverse; backward has left the gradient at `x`.
  const auto inverse = [](const at::Tensor& x, bool hermitian) {
    const Autocast cast(at::kBFloat16);
    const at::Tensor y = at::linalg_pinv(x, 1e-6, hermitian);
    y.sum().backward();
    return y.detach();
  };
  test::seed(5);
  const at::Tensor value = randn({3, 4, 4}) + 4 * at::eye(4), symmetric = value + value.mT(),
                   none = value.narrow(0, 0, 0);
  for (const auto& [x, hermitian] :
       std::vector<std::pair<at::Tensor, bool>>{{value, false}, {symmetric, true}, {none, false}}) {
    const at::Tensor plain = x.clone().requires_grad_(), expected = inverse(plain, hermitian);
    ASSERT_TRUE(x.numel() == 0 || expected.scalar_type() == at::kBFloat16);
    on_threads(2, [&, x = x, hermitian = hermitian](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh({{"x", 2}});
      const std::vector<std::int64_t> shape = x.sizes().vec();
      // The last one: one rank has no matrix.
      for (const ShardSpec& spec : {ShardSpec(mesh, shape, {Replicate()}),
                                    ShardSpec(mesh, shape, {Shard(1)}, {{1, {3, 1}}}),
                                    ShardSpec(mesh, shape, {Shard(0)}, {{0, {shape[0], 0}}})}) {
        const at::Tensor sharded = leaf(x, spec), got = inverse(sharded, hermitian);
        ASSERT_TRUE(is_sharded(got)) << spec;
        EXPECT_LT(difference(got, expected, 1), 4e-2) << spec;
        EXPECT_LT(difference(sharded.grad(), plain.grad(), 1), 4e-2) << spec;
      }
    });
  }
}

}  // namespace tessera::test::half_precision_test
