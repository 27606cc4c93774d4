// Joins, views, slices and writes that keep a field as it is sharded (placements.h).

#include "placements.h"

namespace tessera::test::placements_views_test {

TEST(Placements, JoinsAlongShardedDims) {
  for (const int ranks : {1, 2, 3, 4}) {
    keeps_its_cut(
        "cat", ranks, 60,
        [](Draw& draw) -> std::pair<OfValues, std::vector<Shape>> {
          const Shape shape{draw.between(1, 5), draw.between(1, 7), draw.between(1, 3)};
          const int d = draw.below(3), joined = draw.between(1, 3), first = draw.below(joined + 1);
          std::vector<Shape> shapes{shape};
          for (int i = 0; i < joined; ++i) {
            shapes.push_back(shape);
            shapes.back()[d] = draw.below(4);
          }
          // The sharded one somewhere among those that are not, and once more at the end.
          return {[d, first](const Values& v) {
                    Values all(v.begin() + 1, v.end());
                    all.insert(all.begin() + first, v[0]);
                    all.push_back(v[0] * v[0]);
                    return at::cat(all, d);
                  },
                  shapes};
        },
        false);
  }
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = randn({7, 4}, at::kDouble), token = randn({1, 4}, at::kDouble);
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)}, {{0, {4, 0, 3}}});
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    const CommTraceScope trace(manager);
    const at::Tensor y = at::cat({token, x, token, token}, 0);
    EXPECT_EQ(trace->events().size(), 0u) << "a class token moves nothing";
    EXPECT_EQ(spec(y).sizes().at(0), (Sizes{5, 0, 5}));
    const at::Tensor z = at::cat({x, x}, 0);
    EXPECT_EQ(spec(z).sizes().at(0), (Sizes{8, 0, 6})) << "balanced as its inputs are";
    EXPECT_EQ(difference(y, at::cat({token, value, token, token}, 0)), 0);
    EXPECT_EQ(difference(z, at::cat({value, value}, 0)), 0);
  });
}

TEST(Placements, AMergeLooksAtTheFirstOfItsDimsAndNotAtTheNext) {
  on_threads(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({4, 1, 6}, at::kDouble);
    const at::Tensor y = distribute_tensor(value, mesh, {Shard(2)}).reshape({24});
    EXPECT_TRUE(spec(y).is_sharded(0)) << spec(y);
    EXPECT_EQ(difference(y, value.reshape({24})), 0);
  });
}

TEST(Placements, SummandsStaySummandsWhereTheyAreMovedAndCut) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({4, 3, 5}, at::kDouble);
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)}).sum(0), whole = value.sum(0);
    ASSERT_TRUE(spec(x).has_partial());
    set_policies(manager, {.redistribution = Policy::error});
    const auto all = [](const at::Tensor& t) {
      return Values{t.tril(), t.triu(1), t.flip({0}), t.roll({1}, {1})};
    };
    const Values got = all(x), expected = all(whole);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(spec(got[i]).has_partial()) << i;
      EXPECT_LT(difference(got[i], expected[i]), 1e-12) << i;
    }
  });
}

// One sample over several ranks: the one that has it keeps it where its dim is merged with others,
// and where it is split off again.
TEST(Placements, ADimOfOneElementIsMergedAndSplitOffWhereItLies) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      Draw draw(70 + ranks);
      for (int i = 0; i < 30; ++i) {
        const int batch = ranks == 4 && draw.chance(60) ? 2 : draw.chance(70) ? ranks : 1;
        const auto mesh = manager.mesh({{"batch", batch}, {"rest", ranks / batch}});
        const Shape shape{1, draw.between(1, 6), draw.between(1, 4)};
        Sizes one(batch, 0);
        one[draw.below(batch)] = 1;
        const int rest = draw.below(3);
        ShardSizes sizes{{0, one}};
        std::vector<Placement> placements{Shard(0), Replicate()};
        if (rest > 0) {
          placements[1] = Shard(rest);
          sizes.emplace(rest, draw.sizes(shape[rest], ranks / batch));
        }
        const ShardSpec lies(mesh, shape, placements, sizes);
        const std::string where = concat("round ", i, " ", lies);
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble);
        const at::Tensor x = leaf(value, lies), plain = value.clone().requires_grad_();
        const auto apart = [&](const at::Tensor& t) {
          const at::Tensor rows = t.reshape({shape[1], shape[2]}).sin();
          return std::pair(rows, rows.reshape(shape) + t);
        };
        const CommTraceScope trace(manager);
        const auto [rows, y] = apart(x);
        const auto [wanted_rows, wanted] = apart(plain);
        EXPECT_EQ(to_local(rows).numel(), to_local(x).numel()) << where;
        EXPECT_EQ(to_local(y).numel(), to_local(x).numel()) << where;
        y.square().sum().backward();
        wanted.square().sum().backward();
        EXPECT_TRUE(trace->summary().empty()) << where << "\n" << trace->table();
        EXPECT_LT(difference(rows.detach(), wanted_rows.detach()), 1e-12) << where;
        EXPECT_LT(difference(y.detach(), wanted.detach()), 1e-12) << where;
        EXPECT_LT(difference(x.grad(), plain.grad()), 1e-12) << where;
        EXPECT_EQ(to_local(x.grad()).numel(), to_local(x).numel()) << where;
      }
    });
  }
}

TEST(Placements, RollAndFlip) {
  for (const int ranks : {1, 2, 3, 4}) {
    keeps_its_cut(
        "roll or flip", ranks, 60, [](Draw& draw) -> std::pair<OfValues, std::vector<Shape>> {
          const Shape shape{draw.between(1, 7), draw.between(1, 5), draw.between(1, 3)};
          const Shape dims = draw.chance(50) ? Shape{0, 1} : Shape{draw.below(3)};
          Shape by;
          for (std::size_t i = 0; i < dims.size(); ++i) by.push_back(draw.between(0, 20) - 10);
          if (draw.chance(50))
            return {[dims](const Values& v) { return at::flip(v[0], dims) * 1; }, {shape}};
          return {[dims, by](const Values& v) { return at::roll(v[0], by, dims); }, {shape}};
        });
  }
}

// x [samples, height, width, channels] -> windows of `w` x `w`, shifted by half a window, and back.
// As window attention does it, with a function of each window in between.
at::Tensor through_windows(const at::Tensor& x, std::int64_t w) {
  const auto n = x.size(0), h = x.size(1), width = x.size(2), c = x.size(3);
  at::Tensor y = x.roll({-w / 2, -w / 2}, {1, 2});
  y = y.view({n, h / w, w, width / w, w, c}).permute({0, 1, 3, 2, 4, 5}).reshape({-1, w * w, c});
  y = y.matmul(y.transpose(1, 2)).softmax(-1).matmul(y);
  y = y.view({n, h / w, width / w, w, w, c}).permute({0, 1, 3, 2, 4, 5}).reshape({n, h, width, c});
  return y.roll({w / 2, w / 2}, {1, 2});
}

TEST(Placements, WindowsThatAreShiftedStaySharded) {
  struct Case {
    const char* what;
    std::int64_t samples, height;
    Sizes rows;
    int dim;  // of the result, which must be sharded
  };
  for (const Case& one : {Case{"one sample, windows within shards", 1, 12, {4, 8, 0}, 1},
                          Case{"one sample, windows across shards", 1, 12, {5, 5, 2}, 1},
                          Case{"several samples", 4, 12, {4, 4, 4}, 0}}) {
    on_threads(3, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", 3}});
      set_policies(manager, {.redistribution = Policy::allow});
      test::seed(3);
      const at::Tensor value = randn({one.samples, one.height, 8, 2}, at::kDouble);
      const ShardSpec lies(mesh, value.sizes().vec(), {Shard(1)}, {{1, one.rows}});
      const at::Tensor plain = value.clone().requires_grad_(true), x = leaf(value, lies);
      const at::Tensor expected = through_windows(plain, 4);
      at::Tensor got;
      {
        const CommTraceScope trace(manager);
        got = through_windows(x, 4);
        for (const CommSummary& s : trace->summary())
          EXPECT_NE(s.operation, "all_gather") << one.what << "\n" << trace->table();
      }
      EXPECT_EQ(spec(got).placements()[0], Shard(one.dim)) << one.what;
      EXPECT_LT(difference(got, expected), 1e-12) << one.what;
      const at::Tensor along = randn(value.sizes(), at::kDouble);
      (expected * along).sum().backward();
      (got * distribute_tensor(along, spec(got))).sum().backward();
      EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11) << one.what;
    });
  }
  // Nothing but the shift moves anything.
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    set_policies(manager, {.redistribution = Policy::error});
    const at::Tensor x =
        distribute_tensor(randn({1, 12, 8, 2}, at::kDouble), mesh, {Shard(1)}, {{1, {4, 8, 0}}});
    const CommTraceScope trace(manager);
    const at::Tensor y = x.view({1, 3, 4, 2, 4, 2}).permute({0, 1, 3, 2, 4, 5}).reshape({6, 16, 2});
    EXPECT_EQ(spec(y).sizes().at(0), (Sizes{2, 4, 0}));
    EXPECT_TRUE(trace->events().empty()) << trace->table();
  });
}

TEST(Placements, WritesToViewsThatWereMovedReachTheirBase) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor plain = at::arange(24, at::kDouble).view({6, 4});
    // Boundaries within rows of the result, and a later dim of those that are merged.
    for (const auto& [dim, sizes] :
         std::vector<std::pair<int, Sizes>>{{0, {1, 4, 1}}, {1, {2, 0, 2}}}) {
      const at::Tensor x = distribute_tensor(plain.clone(), mesh, {Shard(dim)}, {{dim, sizes}});
      const at::Tensor expected = plain.clone();
      x.view({3, 8}).mul_(2);
      expected.view({3, 8}).mul_(2);
      x.view({24}).narrow(0, 3, 9).add_(1);
      expected.view({24}).narrow(0, 3, 9).add_(1);
      EXPECT_EQ(difference(x, expected), 0) << "dim " << dim;
    }
  });
}

// Of a sharded dim one row is brought to all, not the field; what is written to it arrives.
TEST(Placements, ARowOfASharedDimIsBroughtAlone) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(210 + ranks);
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const Shape shape{draw.between(2, 7), draw.between(2, 5), 2};
        const int dim = draw.below(2);
        const std::int64_t at = draw.below(static_cast<int>(2 * shape[dim])) - shape[dim],
                           row = 8 * shape[0] * shape[1] * shape[2] / shape[dim];
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble),
                         along = randn(value.sizes(), at::kDouble);
        const ShardSpec lies = draw.spec(mesh, shape, false);
        const std::string where = concat(i, " on ", lies, " dim ", dim, " at ", at);
        const auto scaled = [&](const at::Tensor& x) {
          at::Tensor y = x * 2;
          y.select(dim, at).mul_(x.select(dim, 0) + 1);
          return y;
        };
        const at::Tensor plain = value.clone().requires_grad_(true), x = leaf(value, lies);
        (scaled(plain) * along).sum().backward();
        at::Tensor got;
        {
          const CommTraceScope trace(manager);
          got = scaled(x);
          (got * distribute_tensor(along, lies)).sum().backward();
          ASSERT_LE(most_bytes(*trace), row) << where << "\n" << trace->table();
        }
        ASSERT_EQ(spec(got), lies) << where;
        ASSERT_LT(difference(got, scaled(value), 1), 1e-12) << where;
        ASSERT_LT(difference(x.grad(), plain.grad(), 1), 1e-12) << where;
        EXPECT_ANY_THROW(x.select(dim, shape[dim])) << where;
      }
    });
  }
}

// The gradients of an edge and of the interior of an even field meet where they lie.
TEST(Placements, GradientsOfSlicesLieAsEvenShardsDo) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      Draw draw(240 + ranks);
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh({{"x", ranks}});
        const std::int64_t n = draw.between(1, 14), from = draw.below(static_cast<int>(n)),
                           to = from + draw.between(1, static_cast<int>(n - from)),
                           step = draw.between(1, 3);
        const ShardSpec lies(mesh, {2, n}, {Shard(1)});
        test::seed(i);
        const at::Tensor value = randn({2, n}, at::kDouble);
        const at::Tensor plain = value.clone().requires_grad_(true), x = leaf(value, lies);
        const auto f = [&](const at::Tensor& t) {
          return t.slice(1, from, to, step).square().sum() + t.narrow(1, 0, 1).pow(3).sum() +
                 t.narrow(1, n - 1, 1).exp().sum() + t.square().sum();
        };
        f(plain).backward();
        const CommTraceScope trace(manager);
        f(x).backward();
        const std::string where = concat(i, ": ", n, " from ", from, " to ", to, " by ", step);
        ASSERT_EQ(trace->events().size(), 0u) << where << "\n" << trace->table();
        ASSERT_EQ(spec(x.grad()), lies) << where;
        ASSERT_LT(difference(x.grad(), plain.grad(), 1), 1e-12) << where;
      }
    });
  }
}

// Slices that are a row or two apart: neighbours exchange rows, forward and backward.
TEST(Placements, DifferencesOfSlicesExchangeRows) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions{
      [](const at::Tensor& x) { return at::diff(x, 1, 1); },
      [](const at::Tensor& x) { return at::diff(x, 2, 1); },
      [](const at::Tensor& x) { return x.slice(1, 2) - x.slice(1, 0, -2); },
      [](const at::Tensor& x) { return x.slice(1, 1, std::nullopt, 2) * x.slice(1, 0, -1, 2); },
      [](const at::Tensor& x) { return at::trapezoid(x, at::arange(18, at::kDouble).pow(2), 1); },
      [](const at::Tensor& x) { return x.unflatten(1, {9, 2}).mean(2); }};
  on_threads(3, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"x", 3}});
    for (const Sizes& sizes : {Sizes{6, 6, 6}, Sizes{9, 2, 7}, Sizes{7, 0, 11}}) {
      const ShardSpec lies(mesh, {2, 18}, {Shard(1)}, {{1, sizes}});
      for (std::size_t i = 0; i < functions.size(); ++i) {
        test::seed(static_cast<int>(i));
        const at::Tensor value = randn({2, 18}, at::kDouble);
        const at::Tensor plain = value.clone().requires_grad_(true), x = leaf(value, lies);
        const at::Tensor expected = functions[i](plain), along = randn(expected.sizes());
        (expected * along).sum().backward();
        const CommTraceScope trace(manager);
        const at::Tensor got = functions[i](x);
        (got * distribute_tensor(along, spec(got).has_partial()
                                            ? ShardSpec::replicated(mesh, along.sizes().vec())
                                            : spec(got)))
            .sum()
            .backward();
        const std::string where = concat(i, " on ", lies);
        EXPECT_LE(most_bytes(*trace), 2 * 2 * 2 * 8) << where << "\n" << trace->table();
        EXPECT_TRUE(spec(got).has_partial() || spec(got).is_sharded(1)) << where;
        EXPECT_LT(difference(got, expected), 1e-12) << where;
        EXPECT_LT(difference(x.grad(), plain.grad()), 1e-12) << where;
      }
    }
    // Where half of a shard moves it is refused.
    const at::Tensor value = randn({2, 18}, at::kDouble);
    const auto put = [&](const Sizes& sizes) {
      return distribute_tensor(value, mesh, {Shard(1)}, {{1, sizes}});
    };
    EXPECT_EQ(spec(put({6, 6, 6}) + put({3, 7, 8})).sizes().at(1), (Sizes{6, 6, 6}));
    EXPECT_THROW(put({6, 6, 6}) + put({2, 8, 8}), ImplicitRedistributionError);
  });
}

// Rows that are merged behind fewer samples than there are ranks: some ranks get samples, and no
// rank gets the field.
TEST(Placements, RowsMergedBehindFewSamplesAreNotGathered) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 4}});
    const at::Tensor value = randn({2, 8, 4, 3}, at::kDouble),
                     along = randn({8, 8, 3}, at::kDouble);
    const at::Tensor plain = value.clone().requires_grad_(true);
    const at::Tensor x =
        leaf(value, ShardSpec(mesh, {2, 8, 4, 3}, {Shard(1)}, {{1, {4, 0, 2, 2}}}));
    const auto windows = [](const at::Tensor& t) {
      return t.view({2, 2, 4, 2, 2, 3}).permute({0, 1, 3, 2, 4, 5}).reshape({8, 8, 3});
    };
    (windows(plain) * along).sum().backward();
    set_policies(manager, {.redistribution = Policy::allow});
    const CommTraceScope trace(manager);
    const at::Tensor got = windows(x);
    (got * distribute_tensor(along, spec(got))).sum().backward();
    for (const auto& e : trace->events()) EXPECT_NE(e.operation, "all_gather") << trace->table();
    EXPECT_EQ(spec(got).sizes().at(0), (Sizes{4, 4, 0, 0}));
    EXPECT_EQ(difference(got, windows(value)), 0);
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-12);
  });
}

}  // namespace tessera::test::placements_views_test
