#include "support.h"

namespace tessera::test {

namespace {

const std::vector<int> kRanks = {1, 2, 3, 4};

std::vector<std::int64_t> shape(Draw& draw) {
  std::vector<std::int64_t> s;
  for (int i = draw.between(1, 3); i > 0; --i) s.push_back(draw.between(0, 6));
  return s;
}

}  // namespace

TEST(Spec, LocalShardsTileTheGlobalTensor) {
  for (const int ranks : kRanks) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(ranks);
      for (int i = 0; i < 50; ++i) {
        const auto mesh = manager.mesh(draw.axes(ranks));
        const auto s = shape(draw);
        const ShardSpec spec = draw.spec(mesh, s, false);
        const at::Tensor count = at::zeros(s, at::kDouble);
        at::Tensor mine = count;
        for (std::size_t d = 0; d < s.size(); ++d)
          mine = mine.narrow(static_cast<std::int64_t>(d), spec.local_offset()[d],
                             spec.local_shape()[d]);
        mine.add_(1);
        mesh.all().all_reduce(count);
        double copies = 1;
        for (int a = 0; a < spec.mesh_dims(); ++a)
          copies *= spec.placements()[a].is_replicate() ? mesh.mesh().size(a) : 1;
        EXPECT_TRUE(count.eq(copies).all().item<bool>()) << spec;
      }
    });
  }
}

TEST(Spec, EqualSpecsAreOneObject) {
  on_threads(2, [](DistributedManager& manager) {
    const ShardSpec a(manager.mesh({{"x", 2}}), {5, 3}, {Shard(0)}, {{0, {4, 1}}});
    const ShardSpec b(manager.mesh({{"x", 2}}), {5, 3}, {Shard(-2)}, {{-2, {4, 1}}});
    const ShardSpec c(manager.mesh({{"x", 2}}), {5, 3}, {Shard(0)}, {{0, {3, 2}}});
    EXPECT_EQ(a.data().get(), b.data().get());
    EXPECT_FALSE(a == c);
  });
}

TEST(Spec, SaysWhatIsWrong) {
  on_threads(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(1)}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(0), Shard(0)}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(0)}, {{0, {3}}}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(0)}, {{0, {2, 2}}}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Replicate()}, {{0, {4}}}), InvalidArgument);
  });
}

TEST(Spec, ChecksPlacementsThatAreReplaced) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const ShardSpec rows(mesh, {4, 6}, {Shard(0)}, {{0, {3, 1}}});
    EXPECT_EQ(rows.with_placement(0, Shard(-1)), ShardSpec(mesh, {4, 6}, {Shard(1)}));
    EXPECT_EQ(rows.with_placements({Shard(-2)}), rows);
    EXPECT_THROW(rows.with_placement(0, Shard(2)), InvalidArgument);
    EXPECT_THROW(rows.with_placement(0, Shard(-3)), InvalidArgument);
    EXPECT_THROW(rows.with_placements({}), InvalidArgument);
    EXPECT_THROW(rows.with_placements({Shard(0), Replicate()}), InvalidArgument);
    EXPECT_THROW(rows.with_placements({Partial(ReduceOp::Kind::premultiplied)}), InvalidArgument);
  });
}

TEST(FromLocal, ReportsOnEveryRankWhatIsWrongOnOne) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const bool wrong = manager.rank() == 1;
    const auto refused = [&](const at::Tensor& local, const std::vector<Placement>& placements,
                             const ShardSizes& sizes = {}) {
      EXPECT_THROW(from_local(local, mesh, placements, sizes), Error);
      EXPECT_EQ(from_local(at::ones({2}), mesh, {Shard(0)}).sum().item<float>(), 4);
    };
    const at::Tensor right = at::ones({2, 3});
    const ShardSizes good{{0, {2, 2}}};
    refused(right, {Shard(0)}, wrong ? ShardSizes{{0, {2, 2, 0}}} : good);
    refused(wrong ? distribute_tensor(right, mesh, {Replicate()}) : right, {Shard(0)}, good);
    refused(wrong ? right.to_sparse() : right, {Shard(0)});
    refused(wrong ? at::Tensor() : right, {Shard(0)});
    refused(right, wrong ? std::vector<Placement>{Shard(0), Shard(1)} : std::vector{Shard(0)});
    refused(right, {Shard(0), Shard(1)}, {{0, {2, 2}}, {1, {3, 3}}});
    refused(right, {});
  });
}

// A rank that forgets what it has agreed on with some ranks knows what it has with others.
TEST(FromLocal, AgreesWithEachMeshOnItsOwn) {
  on_threads(3, [](DistributedManager& manager) {
    const auto world = manager.mesh({{"x", 3}});
    const at::Tensor one = at::ones({1});
    const ShardSizes of_world{{0, {1, 1, 1}}};
    from_local(one, world, {Shard(0)}, of_world);
    if (manager.rank() < 2) {
      const auto pair = manager.mesh(Mesh({{"x", 2}}, {0, 1}));
      for (std::int64_t n = 1; n < 4200; ++n)
        from_local(at::empty({manager.rank() == 0 ? n : 1}), pair, {Shard(0)}, {{0, {n, 1}}});
    }
    EXPECT_EQ(from_local(one, world, {Shard(0)}, of_world).sum().item<float>(), 3);
  });
}

TEST(Redistribute, AnyPlacementToAnyOtherKeepsTheValue) {
  for (const int ranks : kRanks) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(100 + ranks);
      for (int i = 0; i < 120; ++i) {
        const auto mesh = manager.mesh(draw.axes(ranks));
        const auto s = shape(draw);
        test::seed(i);
        const at::Tensor value = randn(s, at::kDouble);
        const ShardSpec from = draw.spec(mesh, s), to = draw.spec(mesh, s);
        const at::Tensor x = leaf(value, from);
        ASSERT_LT(difference(x, value), 1e-14) << from;
        const at::Tensor y = redistribute(x, to);
        ASSERT_EQ(spec(y), to);
        ASSERT_EQ(to_local(y).sizes(), at::IntArrayRef(to.local_shape()));
        ASSERT_LT(difference(y, value), 1e-14) << from << " to " << to;
        // The gradient of a weighted sum is the weight, wherever it lies.
        const at::Tensor weight = randn(s, at::kDouble);
        (full_tensor(y) * weight).sum().backward();
        ASSERT_LT(difference(x.grad(), weight), 1e-14) << from << " to " << to;
      }
    });
  }
}

TEST(FromLocal, GathersSizesAndReportsDisagreement) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const int r = manager.rank();
    const at::Tensor x = from_local(at::full({2 * r, 4}, r, at::kDouble), mesh, {Shard(0)});
    EXPECT_EQ(spec(x).dim(0).partition.sizes(), (Sizes{0, 2, 4}));
    EXPECT_EQ(x.sizes(), at::IntArrayRef({6, 4}));
    EXPECT_EQ(full_tensor(x).sum().item<double>(), (2 * 1 + 4 * 2) * 4);
    EXPECT_THROW(from_local(at::zeros({2, r == 1 ? 3 : 4}), mesh, {Shard(0)}), InvalidArgument);
    EXPECT_THROW(from_local(at::zeros({2, r}), mesh, {Replicate()}), InvalidArgument);
    EXPECT_THROW(from_local(at::zeros({2}, r ? at::kFloat : at::kDouble), mesh, {Shard(0)}),
                 InvalidArgument);
  });
}

TEST(FromBlob, SharesTheSolversMemoryAndReturnsItOnce) {
  on_threads(2, [](DistributedManager& manager) {
    std::vector<float> field(3, 1.0f);
    int returned = 0;
    {
      const ShardSpec s(manager.mesh({{"x", 2}}), {6}, {Shard(0)});
      const at::Tensor x = from_blob(field.data(), s, at::kFloat, [&](void*) { ++returned; });
      const at::NoGradGuard no_grad;
      x.mul_(5);
      EXPECT_EQ(field[2], 5.0f);
      EXPECT_EQ(returned, 0);
    }
    EXPECT_EQ(returned, 1);
  });
}

TEST(Scatter, FromAnyRank) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    for (int root = 0; root < 4; ++root) {
      const at::Tensor value = at::arange(15, at::kDouble).reshape({5, 3}) + root;
      const at::Tensor x = scatter(manager.rank() == root ? value : at::Tensor(), mesh,
                                   {Shard(1), Partial()}, {{1, {3, 0}}}, root);
      EXPECT_EQ(difference(x, value), 0);
    }
  });
}

TEST(Factories, FillTheirShards) {
  on_threads(3, [](DistributedManager& manager) {
    const ShardSpec s(manager.mesh({{"x", 3}}), {7}, {Shard(0)}, {{0, {5, 0, 2}}});
    EXPECT_EQ(difference(arange(s), at::arange(7)), 0);
    EXPECT_EQ(difference(full(s, 2.5, at::kDouble), at::full({7}, 2.5, at::kDouble)), 0);
    EXPECT_EQ(difference(zeros(s), at::zeros({7})), 0);
    EXPECT_TRUE(ones(s, at::TensorOptions(at::kFloat).requires_grad(true)).is_leaf());
    const ShardSpec p(manager.mesh({{"x", 3}}), {7}, {Partial()});
    EXPECT_THROW(ones(p), InvalidArgument);
  });
}

}  // namespace tessera::test
