// Products, sums and rows of tables that keep a field as it is sharded (placements.h).

#include <limits>

#include "placements.h"

namespace tessera::test::placements_products_test {

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

}  // namespace tessera::test::placements_products_test
