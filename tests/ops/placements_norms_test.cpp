// Norms and pooling that keep a field as it is sharded (placements.h).

#include "placements.h"

namespace tessera::test::placements_norms_test {

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

}  // namespace tessera::test::placements_norms_test
