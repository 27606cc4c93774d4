// Extremes, orders, scans and transforms that keep a field as it is sharded (placements.h).

#include <limits>

#include "placements.h"

namespace tessera::test::placements_reductions_test {

TEST(Placements, ExtremesAlongASharedDim) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(40 + ranks);
      for (int i = 0; i < 80; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const Shape shape{draw.between(1, 7), draw.between(1, 4)};
        test::seed(i);
        // ties, infinities and NaNs among them
        at::Tensor value = randint(4, shape).to(draw.chance(50) ? at::kDouble : at::kLong);
        if (at::isFloatingType(value.scalar_type())) {
          value = value.masked_fill(value.eq(3), std::numeric_limits<double>::quiet_NaN());
          if (draw.chance(50))
            value = value.masked_fill(value.eq(0), -std::numeric_limits<double>::infinity());
        }
        const ShardSpec lies = draw.spec(mesh, shape, false);
        const at::Tensor x = leaf(value, lies, false);
        const int dim = draw.below(2);
        const bool keep = draw.chance(50);
        set_policies(manager, {.redistribution = Policy::error});
        const auto largest = at::max(x, dim, keep), smallest = at::min(x, dim, keep);
        const at::Tensor where_largest = at::argmax(x, dim, keep),
                         where_smallest = at::argmin(x, dim, keep);
        set_policies(manager, {.redistribution = Policy::allow});
        const std::string where = concat(i, " on ", lies, " dim ", dim);
        const auto p_largest = at::max(value, dim, keep), p_smallest = at::min(value, dim, keep);
        const auto same = [&](const at::Tensor& got, const at::Tensor& expected, const char* what) {
          const at::Tensor all = whole(got);
          ASSERT_EQ(all.sizes(), expected.sizes()) << what << " " << where;
          ASSERT_TRUE(at::allclose(all.to(at::kDouble), expected.to(at::kDouble), 0, 0, true))
              << what << " " << where << "\n"
              << all << "\n"
              << expected;
        };
        same(std::get<0>(largest), std::get<0>(p_largest), "max");
        same(std::get<1>(largest), std::get<1>(p_largest), "where max");
        same(std::get<0>(smallest), std::get<0>(p_smallest), "min");
        same(std::get<1>(smallest), std::get<1>(p_smallest), "where min");
        same(where_largest, at::argmax(value, dim, keep), "argmax");
        same(where_smallest, at::argmin(value, dim, keep), "argmin");
        set_policies(manager, {.redistribution = Policy::error});
        const at::Tensor of_all = at::argmax(x, std::nullopt, keep),
                         least_of_all = at::argmin(x, std::nullopt, keep);
        set_policies(manager, {.redistribution = Policy::allow});
        same(of_all, at::argmax(value, std::nullopt, keep), "argmax of all");
        same(least_of_all, at::argmin(value, std::nullopt, keep), "argmin of all");
        if (at::isFloatingType(value.scalar_type())) {
          set_policies(manager, {.redistribution = Policy::error});
          const at::Tensor sum = at::logsumexp(x, dim, keep);
          set_policies(manager, {.redistribution = Policy::allow});
          ASSERT_TRUE(at::allclose(whole(sum), at::logsumexp(value, dim, keep), 1e-12, 1e-12, true))
              << "logsumexp " << where;
        }
      }
    });
  }
}

TEST(Placements, TopKAlongASharedDim) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(140 + ranks);
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const Shape shape{draw.between(1, 9), draw.between(1, 4)};
        const int dim = draw.below(2);
        const std::int64_t k = draw.below(static_cast<int>(shape[dim]) + 1);
        const bool largest = draw.chance(50);
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble);
        const ShardSpec lies = draw.spec(mesh, shape, false);
        const at::Tensor x = leaf(value, lies);
        set_policies(manager, {.redistribution = Policy::error});
        const auto got = at::topk(x, k, dim, largest);
        set_policies(manager, {.redistribution = Policy::allow});
        const at::Tensor plain = value.clone().requires_grad_(true);
        const auto expected = at::topk(plain, k, dim, largest);
        const std::string where = concat(i, " on ", lies, " dim ", dim, " k ", k);
        ASSERT_TRUE(whole(std::get<0>(got)).equal(std::get<0>(expected))) << where;
        ASSERT_TRUE(whole(std::get<1>(got)).equal(std::get<1>(expected))) << where;
        if (k == 0) continue;
        const at::Tensor along = randn(std::get<0>(expected).sizes(), at::kDouble);
        (std::get<0>(expected) * along).sum().backward();
        (std::get<0>(got) * along).sum().backward();
        ASSERT_LT(difference(x.grad(), plain.grad(), 1), 1e-14) << where;
      }
    });
  }
}

TEST(Placements, SortsAndScansAlongAShardedDimShardAnother) {
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> all{
      {"sort", [](const at::Tensor& x) { return std::get<0>(x.sort(0)); }},
      {"argsort",
       [](const at::Tensor& x) { return x.argsort(std::int64_t{0}, true).to(at::kDouble); }},
      {"stable sort",
       [](const at::Tensor& x) { return std::get<1>(at::sort(x, true, 0, true)).to(at::kDouble); }},
      {"median", [](const at::Tensor& x) { return std::get<0>(x.median(0)); }},
      {"place of the median",
       [](const at::Tensor& x) { return std::get<1>(x.median(0)).to(at::kDouble); }},
      {"mode", [](const at::Tensor& x) { return std::get<0>(x.mode(0, true)); }},
      {"kthvalue", [](const at::Tensor& x) { return std::get<0>(x.kthvalue(2, 0)); }},
      {"cumsum", [](const at::Tensor& x) { return x.cumsum(0); }},
      {"cumprod", [](const at::Tensor& x) { return x.cumprod(-3); }},
      {"cummax", [](const at::Tensor& x) { return std::get<0>(x.cummax(0)); }},
  };
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      set_policies(manager, {.redistribution = Policy::allow});
      const Sizes rows = ranks == 2 ? Sizes{1, 4} : Sizes{0, 2, 3};
      for (const auto& [name, f] : all) {
        test::seed(7);
        const at::Tensor value = at::round(randn({5, 2, 4}, at::kDouble) * 2);  // with ties
        const at::Tensor plain = value.clone().requires_grad_(true),
                         x = leaf(value, ShardSpec(mesh, {5, 2, 4}, {Shard(0)}, {{0, rows}}));
        const CommTraceScope trace(manager);
        const at::Tensor expected = f(plain), got = f(x);
        for (const CommSummary& s : trace->summary())
          EXPECT_NE(s.operation, "all_gather") << name << "\n" << trace->table();
        EXPECT_TRUE(spec(got).is_sharded(spec(got).dims() - 1)) << name;
        EXPECT_LT(difference(got, expected), 1e-12) << name;
        if (!expected.requires_grad()) continue;
        test::seed(8);
        const at::Tensor along = randn(expected.sizes(), at::kDouble);
        (expected * along).sum().backward();
        (got * distribute_tensor(along, spec(got))).sum().backward();
        EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11) << name;
      }
      // Nothing else to shard: gathered, as before.
      const at::Tensor line = randn({5}, at::kDouble);
      EXPECT_EQ(difference(std::get<0>(distribute_tensor(line, mesh, {Shard(0)}).sort()),
                           std::get<0>(line.sort())),
                0);
    });
  }
}

// What backward writes into zeros of another size lies as the gradient does.
TEST(Placements, TransformsAndSelectionsAlongOtherDimsGoBackWhereTheyLie) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions{
      [](const at::Tensor& x) { return at::view_as_real(at::fft_rfft(x, std::nullopt, 2)); },
      [](const at::Tensor& x) {
        return x.index({at::indexing::Slice(), at::indexing::Slice(), at::tensor({3, 3, 0})});
      },
      [](const at::Tensor& x) { return x.new_zeros({3, 5, 1}) + x.narrow(2, 1, 1).sum(0, true); }};
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const ShardSpec lies(mesh, {2, 5, 4}, {Shard(1)}, {{1, {3, 0, 2}}});
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const at::Tensor value = randn({2, 5, 4}, at::kDouble);
      const at::Tensor plain = value.clone().requires_grad_(true), x = leaf(value, lies);
      const at::Tensor expected = functions[i](plain), along = randn(expected.sizes(), at::kDouble);
      (expected * along).sum().backward();
      const CommTraceScope trace(manager);
      const at::Tensor got = functions[i](x);
      (got * distribute_tensor(along, spec(got))).sum().backward();
      EXPECT_EQ(trace->events().size(), 0u) << i << "\n" << trace->table();
      EXPECT_EQ(spec(x.grad()), lies) << i;
      EXPECT_LT(difference(got, expected), 1e-12) << i;
      EXPECT_LT(difference(x.grad(), plain.grad()), 1e-12) << i;
    }
    EXPECT_TRUE(
        spec(leaf(randn({2, 5, 4}, at::kDouble), lies).new_zeros({2, 6, 4})).is_replicated());
  });
}

TEST(Placements, ClassesPlacesAndComparisonsOfShards) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
      Draw draw(280 + ranks);
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const Shape shape{draw.between(1, 6), draw.between(1, 5)};
        test::seed(i);
        const at::Tensor classes = randint(4, shape), value = randn(shape, at::kDouble),
                         edges = std::get<0>(randn({5}, at::kDouble).sort()),
                         of_rows = std::get<0>(randn({shape[0], 3}, at::kDouble).sort());
        const ShardSpec lies = draw.spec(mesh, shape, false);
        const at::Tensor c = leaf(classes, lies, false), x = leaf(value, lies, false);
        const CommTraceScope trace(manager);
        const at::Tensor hot = at::one_hot(c, 4), places = at::searchsorted(edges, x),
                         by_row = at::searchsorted(of_rows, x, false, true);
        const bool same = at::equal(x, x * 1), other = at::equal(x, x + 1);
        ASSERT_LE(most_bytes(*trace), 8) << trace->table();
        const std::string where = concat(i, " on ", lies);
        ASSERT_EQ(spec(places), lies) << where;
        ASSERT_EQ(spec(by_row), lies) << where;
        for (int d = 0; d < 2; ++d) ASSERT_EQ(spec(hot).dim(d), lies.dim(d)) << where;
        ASSERT_TRUE(whole(hot).equal(at::one_hot(classes, 4))) << where;
        ASSERT_TRUE(whole(at::one_hot(c)).equal(at::one_hot(classes))) << where;
        ASSERT_TRUE(whole(places).equal(at::searchsorted(edges, value))) << where;
        ASSERT_TRUE(whole(by_row).equal(at::searchsorted(of_rows, value, false, true))) << where;
        ASSERT_TRUE(same && !other && !at::equal(x, at::zeros({1}, at::kDouble))) << where;
        EXPECT_ANY_THROW(at::one_hot(c - 4, 4)) << where;
        EXPECT_ANY_THROW(at::one_hot(c + 4, 4)) << where;
      }
    });
  }
}

}  // namespace tessera::test::placements_reductions_test
