// Operators that keep a field as it is sharded: values and gradients of one process, nothing
// redistributed (the policy is `error`), and the output's placement is that of the input.

#include <limits>

#include "support.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test {

namespace {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<at::Tensor>;
using OfValues = std::function<at::Tensor(const Values&)>;

/// A field sharded in some dims at random, and others replicated: forward and backward of `f`,
/// which takes and returns fields of one shape.
void keeps_its_cut(const char* what, int ranks, int seeds,
                   const std::function<std::pair<OfValues, std::vector<Shape>>(Draw&)>& make,
                   bool same_shape = true) {
  on_threads(ranks, [&](DistributedManager& manager) {
    Draw draw(900 + ranks);
    for (int i = 0; i < seeds; ++i) {
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const auto [f, shapes] = make(draw);
      const ShardSpec lies = draw.spec(mesh, shapes[0], false);
      test::seed(i);
      Values plain, sharded;
      for (std::size_t k = 0; k < shapes.size(); ++k) {
        const at::Tensor value = randn(shapes[k], at::kDouble);
        plain.push_back(value.clone().requires_grad_(true));
        sharded.push_back(leaf(value, k == 0 ? lies : ShardSpec::replicated(mesh, shapes[k])));
      }
      const std::string where = concat(what, " ", i, " on ", lies);
      set_policies(manager, {.redistribution = Policy::error});
      const at::Tensor expected = f(plain), got = f(sharded);
      if (same_shape) {
        ASSERT_EQ(spec(got), lies) << where;
      }
      ASSERT_LT(difference(got, expected, 1), 1e-12) << where;
      const at::Tensor along = randn(expected.sizes(), at::kDouble);
      (expected * along).sum().backward();
      // weights that lie as the field does: a replicated gradient may stay one
      (got * (same_shape ? distribute_tensor(along, lies) : along)).sum().backward();
      set_policies(manager, {.redistribution = Policy::allow});
      for (std::size_t k = 0; k < shapes.size(); ++k)
        ASSERT_LT(difference(sharded[k].grad(), plain[k].grad(), 1), 1e-11)
            << where << " input " << k;
      if (same_shape) {
        ASSERT_EQ(spec(sharded[0].grad()), lies) << where;
      }
    }
  });
}

}  // namespace

TEST(Placements, LayerNormOverSharedDims) {
  for (const int ranks : {1, 2, 3, 4}) {
    keeps_its_cut("layer_norm", ranks, 30,
                  [](Draw& draw) -> std::pair<OfValues, std::vector<Shape>> {
                    const Shape shape{draw.between(1, 3), draw.between(1, 5), draw.between(1, 7)};
                    const int normalized = draw.between(1, 3);
                    const Shape inner(shape.end() - normalized, shape.end());
                    const bool affine = draw.chance(70);
                    std::vector<Shape> shapes{shape};
                    if (affine) shapes.insert(shapes.end(), 2, inner);
                    return {[inner, affine](const Values& v) {
                              return affine ? at::layer_norm(v[0], inner, v[1], v[2])
                                            : at::layer_norm(v[0], inner);
                            },
                            shapes};
                  });
  }
}

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

// A number for each channel, all of them on one rank, keeps lying as the channels do.
TEST(Placements, NumbersOfChannelsAreBroadcastWhereTheyLie) {
  on_threads(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = randn({2, 4, 3}, at::kDouble), slope = randn({4}, at::kDouble);
    const at::Tensor x = leaf(value, ShardSpec(mesh, {2, 4, 3}, {Shard(1)}, {{1, {0, 4, 0}}})),
                     s = leaf(slope, ShardSpec(mesh, {4}, {Shard(0)}, {{0, {0, 4, 0}}}));
    EXPECT_LT(difference(x * s.view({1, 4, 1}), value * slope.view({1, 4, 1})), 1e-12);
    EXPECT_LT(difference(at::prelu(x, s), at::prelu(value, slope)), 1e-12);
  });
}

TEST(Placements, GroupNormOverChannelsAndSpace) {
  for (const int ranks : {1, 2, 3, 4}) {
    keeps_its_cut("group_norm", ranks, 30,
                  [](Draw& draw) -> std::pair<OfValues, std::vector<Shape>> {
                    const int groups = draw.between(1, 3);
                    const std::int64_t channels = groups * draw.between(1, 3);
                    Shape shape{draw.between(1, 3), channels};
                    for (int d = draw.below(3); d > 0; --d) shape.push_back(draw.between(1, 6));
                    // plain libtorch refuses groups of one element
                    if (shape.size() == 2) shape.push_back(4);
                    const bool affine = draw.chance(70);
                    std::vector<Shape> shapes{shape};
                    if (affine) shapes.insert(shapes.end(), 2, Shape{channels});
                    return {[groups, affine](const Values& v) {
                              return affine ? at::group_norm(v[0], groups, v[1], v[2])
                                            : at::group_norm(v[0], groups);
                            },
                            shapes};
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

TEST(Placements, RowsOfATableMeetABatchOnTheirAxis) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      Draw draw(70 + ranks);
      for (int i = 0; i < 20; ++i) {
        const std::int64_t rows = 40 + draw.below(20), batch = draw.between(1, 9);
        test::seed(i);
        const at::Tensor value = randn({rows, 3}, at::kDouble), at = randint(rows, {batch, 2});
        const at::Tensor table =
            leaf(value, ShardSpec(mesh, {rows, 3}, {Shard(0)}, {{0, draw.sizes(rows, ranks)}}));
        const ShardSpec of_batch(mesh, {batch, 2}, {Shard(0)}, {{0, draw.sizes(batch, ranks)}});
        const at::Tensor plain = value.clone().requires_grad_(true);
        set_policies(manager, {.redistribution = Policy::error});
        const at::Tensor got = at::embedding(table, leaf(at, of_batch, false));
        EXPECT_EQ(spec(got).placements()[0], Shard(0));
        set_policies(manager, {.redistribution = Policy::allow});
        const at::Tensor expected = at::embedding(plain, at);
        ASSERT_LT(difference(got, expected), 1e-15);
        const at::Tensor along = randn({batch, 2, 3}, at::kDouble);
        (expected * along).sum().backward();
        (got * along).sum().backward();
        ASSERT_LT(difference(table.grad(), plain.grad(), 1), 1e-13);
      }
    });
  }
}

TEST(Placements, BagsOfEmbeddings) {
  for (const int ranks : {1, 2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(170 + ranks);
      set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::int64_t rows = draw.between(2, 7), count = draw.between(1, 8);
        test::seed(i);
        const at::Tensor value = randn({rows, 3}, at::kDouble), at = randint(rows, {count});
        const at::Tensor offsets =
            at::cat({at::zeros({1}, at::kLong), std::get<0>(randint(count + 1, {2}).sort())});
        const int mode = draw.below(3);
        const auto padding = draw.chance(40)
                                 ? std::optional<std::int64_t>(draw.below(static_cast<int>(rows)))
                                 : std::nullopt;
        const auto bags = [&](const at::Tensor& table, const at::Tensor& which) {
          return std::get<0>(
              at::embedding_bag(table, which, offsets, false, mode, false, {}, false, padding));
        };
        const at::Tensor plain = value.clone().requires_grad_(true);
        const at::Tensor table = leaf(value, draw.spec(mesh, {rows, 3}, false));
        const at::Tensor expected = bags(plain, at),
                         got = bags(table, leaf(at, draw.spec(mesh, {count}, false), false));
        ASSERT_LT(difference(got, expected, 1), 1e-14) << i << " mode " << mode;
        const at::Tensor along = randn(expected.sizes(), at::kDouble);
        (expected * along).sum().backward();
        (got * along).sum().backward();
        ASSERT_LT(difference(table.grad(), plain.grad(), 1), 1e-14) << i << " mode " << mode;
      }
    });
  }
}

TEST(Placements, AChannelsLastPoolingEndsInAView) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::error});
    const std::vector<Sizes> sizes = {{2, 0}, {5, 1}, {1, 3}, {2, 3}};
    for (const int dim : {0, 1, 2, 3}) {
      const at::Tensor value =
          randn({2, 6, 4, 5}, at::kDouble).contiguous(at::MemoryFormat::ChannelsLast);
      const ShardSpec lies(mesh, {2, 6, 4, 5}, {Shard(dim)}, {{dim, sizes[dim]}});
      const at::Tensor x = leaf(value, lies), plain = value.detach().clone().requires_grad_(true);
      const at::Tensor got = at::adaptive_avg_pool2d(x * x, {1, 1}),
                       expected = at::adaptive_avg_pool2d(plain * plain, {1, 1});
      // Samples and channels stay where they are; of space each rank has its share of the mean.
      const Shape pooled{2, 6, 1, 1};
      EXPECT_EQ(spec(got), dim < 2 ? ShardSpec(mesh, pooled, {Shard(dim)}, {{dim, sizes[dim]}})
                                   : ShardSpec(mesh, pooled, {Partial()}));
      EXPECT_LT(difference(got, expected), 1e-14) << "sharded in dim " << dim;
      EXPECT_EQ(got.strides(), expected.strides());
      got.square().sum().backward();
      expected.square().sum().backward();
      EXPECT_EQ(spec(x.grad()), lies);
      EXPECT_LT(difference(x.grad(), plain.grad()), 1e-14) << "sharded in dim " << dim;
    }
  });
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

// float8 and wide unsigned integers cannot be summed up, so that no result of theirs is Partial.
TEST(Placements, RowsOfDtypesWithoutSums) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor rows = at::tensor({3, 1, 3}, at::kLong);
    for (const auto type : {at::kUInt16, at::kUInt64, at::kFloat8_e4m3fn}) {
      const at::Tensor value = at::arange(8, at::kFloat).view({4, 2}).to(type),
                       x = distribute_tensor(value.clone(), mesh, {Shard(0)});
      for (const at::Tensor& got : {x.index_select(0, rows), x.index({rows})}) {
        const at::Tensor expected = at::arange(8, at::kFloat).view({4, 2}).index_select(0, rows);
        EXPECT_EQ(difference(full_tensor(got).to(at::kFloat), expected), 0) << toString(type);
      }
    }
  });
}

// A summand of zero times infinity is NaN, the sum times infinity is not.
TEST(Placements, PartialTensorsTimesInfinities) {
  constexpr double inf = std::numeric_limits<double>::infinity(),
                   nan = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor value = at::tensor({1.0, -2.0, 0.0, 3.0, 4.0, -5.0}, at::kDouble).view({2, 3}),
                   factor = at::tensor({inf, 2.0, inf, -inf, nan, 0.5}, at::kDouble).view({2, 3}),
                   square = at::tensor({inf, 0.0, 1.0, 2.0, -inf, 1.0, 1.0, 1.0, 1.0}, at::kDouble)
                                .view({3, 3}),
                   bias = at::tensor({1.0, 2.0, 3.0}, at::kDouble);
  using Two =
      std::function<at::Tensor(const at::Tensor&, const std::function<at::Tensor(at::Tensor)>&)>;
  const std::vector<std::pair<const char*, Two>> all{
      {"mul", [&](const at::Tensor& x, const auto& put) { return x * put(factor); }},
      {"mul, the other way round",
       [&](const at::Tensor& x, const auto& put) { return put(factor) * x; }},
      {"mul_",
       [&](const at::Tensor& x, const auto& put) {
         at::Tensor y = x + x;
         y.mul_(put(factor));
         return y;
       }},
      {"mm", [&](const at::Tensor& x, const auto& put) { return x.mm(put(square)); }},
      {"linear",
       [&](const at::Tensor& x, const auto& put) { return at::linear(x, put(square), put(bias)); }},
      {"finite ones", [&](const at::Tensor& x, const auto& put) { return x * put(value); }},
  };
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      for (const ReduceOp::Kind op : {ReduceOp::Kind::sum, ReduceOp::Kind::avg}) {
        for (const auto& [name, f] : all) {
          // The shares of the last rank: all of it for a sum; each rank holds another.
          at::Tensor share =
              value / ranks + (manager.rank() == 0 ? 1.0 : 0.0) - (manager.rank() == 1 ? 1.0 : 0.0);
          if (op == ReduceOp::Kind::avg) share = share * ranks;
          const at::Tensor x = from_local(share, mesh, {Partial(op)}).detach();
          const auto put = [&](const at::Tensor& t) {
            return distribute_tensor(t.clone(), mesh, {Replicate()});
          };
          const at::Tensor got = f(x, put), again = f(x, put),
                           expected = f(value, [](const at::Tensor& t) { return t; });
          EXPECT_LT(difference(got, expected), 1e-12) << name << " " << Partial(op);
          EXPECT_LT(difference(again, expected), 1e-12) << name << ", once more";
          EXPECT_LT(difference(x, value, 1), 1e-12) << name << " leaves its input";
        }
      }
    });
  }
}

// Of a sum of a Partial tensor and a product whose factors are sharded along the same axis only one
// rank sees an infinity: that decides nothing.
TEST(Placements, PartialTensorsPlusProductsOfInfinities) {
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      const at::Tensor value = at::tensor({1.0, -2.0, 3.0, 4.0}, at::kDouble).view({1, 2, 2});
      at::Tensor a = at::ones({1, 2, 6}, at::kDouble);
      const at::Tensor b = at::ones({1, 6, 2}, at::kDouble);
      a[0][0][5] = std::numeric_limits<double>::infinity();
      const at::Tensor x = from_local(value / ranks + (manager.rank() == 0 ? 1.0 : 0.0) -
                                          (manager.rank() == 1 ? 1.0 : 0.0),
                                      mesh, {Partial()})
                               .detach();
      const auto put = [&](const at::Tensor& t, int dim) {
        return distribute_tensor(t.clone(), mesh, {Shard(dim)});
      };
      EXPECT_LT(difference(at::baddbmm(x, put(a, 2), put(b, 1), 0.5, 2.0),
                           at::baddbmm(value, a, b, 0.5, 2.0)),
                1e-12);
      EXPECT_LT(difference(at::addmm(x.select(0, 0), put(a[0], 1), put(b[0], 0)),
                           at::addmm(value[0], a[0], b[0])),
                1e-12);
    });
  }
}

namespace {

std::int64_t most_bytes(const CommTrace& trace) {
  std::int64_t most = 0;
  for (const auto& e : trace.events()) most = std::max(most, e.bytes);
  return most;
}

}  // namespace

// Norms written by hand, and a field times what its mean gives: forward and backward reduce
// statistics, never the field.
TEST(Placements, MeansOverSharedDimsReduceNoField) {
  const auto by_hand = [](const at::Tensor& x) {
    const at::Tensor centred = x - x.mean({1, 2, 3}, true);
    return centred * (centred * centred).mean({1, 2, 3}, true).add(1e-5).rsqrt();
  };
  const auto excited = [](const at::Tensor& x) {
    return x * (x.mean(Sizes{2, 3}).tanh() + x.sum(Sizes{2, 3})).sigmoid().view({2, 4, 1, 1});
  };
  const auto of_all = [](const at::Tensor& x) { return x / (x * x).mean() + x.mean(); };
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions{by_hand, excited,
                                                                            of_all};
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"y", 2}, {"x", 2}});
    const ShardSpec lies(mesh, {2, 4, 9, 8}, {Shard(2), Shard(3)}, {{2, {9, 0}}, {3, {5, 3}}});
    set_policies(manager, {.redistribution = Policy::error});
    for (std::size_t i = 0; i < functions.size(); ++i) {
      test::seed(static_cast<int>(i));
      const at::Tensor value = randn({2, 4, 9, 8}, at::kDouble),
                       along = randn(value.sizes(), at::kDouble);
      const at::Tensor plain = value.clone().requires_grad_(true), x = leaf(value, lies);
      const at::Tensor weights = distribute_tensor(along, lies);
      (functions[i](plain) * along).sum().backward();
      at::Tensor got;
      {
        const CommTraceScope trace(manager);
        got = functions[i](x);
        (got * weights).sum().backward();
        EXPECT_LE(most_bytes(*trace), 2 * 4 * 8) << i << "\n" << trace->table();
      }
      EXPECT_EQ(spec(got), lies) << i;
      EXPECT_EQ(spec(x.grad()), lies) << i;
      EXPECT_LT(difference(got, functions[i](value)), 1e-12) << i;
      EXPECT_LT(difference(x.grad(), plain.grad(), 1), 1e-11) << i;
    }
    // A half precision's sum may exceed its range.
    const at::Tensor large = at::full({2, 4, 9, 8}, 3e4, at::kHalf);
    EXPECT_EQ(difference(leaf(large, lies).mean(), large.mean()), 0);
  });
}

TEST(Placements, ProductsByLettersKeepEveryDim) {
  for (const int ranks : {1, 2, 3, 4}) {
    keeps_its_cut(
        "einsum", ranks, 60,
        [](Draw& draw) -> std::pair<OfValues, std::vector<Shape>> {
          const std::int64_t b = draw.between(1, 3), c = draw.between(1, 4), h = draw.between(1, 5),
                             w = draw.between(1, 4), k = draw.between(1, 3);
          const Shape x{b, c, h, w};
          const auto product = [&](const char* letters, std::vector<Shape> others) {
            others.insert(others.begin(), x);
            return std::pair<OfValues, std::vector<Shape>>(
                [letters](const Values& v) { return at::einsum(letters, v); }, others);
          };
          switch (draw.below(8)) {
            case 0:
              return product("bchw,ck->bkhw", {{c, k}});
            case 1:
              return product("bchw,bc->bhw", {{b, c}});
            case 2:
              return product("bchw,kchw->bk", {{k, c, h, w}});
            case 3:
              return product("...chw,ck->...khw", {{c, k}});
            case 4:
              return product("bchw, cd, dk -> bkhw", {{c, 2}, {2, k}});
            case 5:
              return product("BcHw,c", {{c}});
            case 6:
              return product("bchw,b...w->hc", {{b, k, 1}});
            default:
              return {[](const Values& v) { return at::tensordot(v[0], v[1], {-3, 0}, {1, 0}); },
                      {x, {b, c, k}}};
          }
        },
        false);
  }
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = randn({2, 3, 7, 4}, at::kDouble), w = randn({5, 3}, at::kDouble);
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(2)}, {{2, {4, 0, 3}}});
    set_policies(manager, {.plain_values = Policy::allow});
    const CommTraceScope trace(manager);
    const at::Tensor y = at::einsum("bchw,oc->bohw", {x, w}), z = at::tensordot(x, w, {1}, {1});
    EXPECT_EQ(trace->events().size(), 0u) << trace->table();
    EXPECT_EQ(spec(y).sizes().at(2), (Sizes{4, 0, 3}));
    EXPECT_EQ(spec(z).sizes().at(1), (Sizes{4, 0, 3}));
    EXPECT_LT(difference(y, at::einsum("bchw,oc->bohw", {value, w})), 1e-12);
    EXPECT_LT(difference(z, at::tensordot(value, w, {1}, {1})), 1e-12);
    EXPECT_ANY_THROW(at::einsum("bchw,oc->bohw", {x, randn({5, 2}, at::kDouble)}));
  });
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

}  // namespace tessera::test
