#include "support.h"
#include "tessera/tensor/blob.h"

namespace tessera::test::redistribute_test {

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
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(ranks);
      for (int i = 0; i < 50; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
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
  on_ranks(2, [](DistributedManager& manager) {
    const ShardSpec a(manager.mesh({{"x", 2}}), {5, 3}, {Shard(0)}, {{0, {4, 1}}});
    const ShardSpec b(manager.mesh({{"x", 2}}), {5, 3}, {Shard(-2)}, {{-2, {4, 1}}});
    const ShardSpec c(manager.mesh({{"x", 2}}), {5, 3}, {Shard(0)}, {{0, {3, 2}}});
    EXPECT_EQ(a.data().get(), b.data().get());
    EXPECT_FALSE(a == c);
  });
}

TEST(Spec, SaysWhatIsWrong) {
  on_ranks(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(1)}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(0), Shard(0)}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(0)}, {{0, {3}}}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Shard(0)}, {{0, {2, 2}}}), InvalidArgument);
    EXPECT_THROW(ShardSpec(mesh, {4}, {Replicate()}, {{0, {4}}}), InvalidArgument);
  });
}

TEST(Spec, ChecksPlacementsThatAreReplaced) {
  on_ranks(2, [](DistributedManager& manager) {
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
  on_ranks(2, [](DistributedManager& manager) {
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
  on_ranks(3, [](DistributedManager& manager) {
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
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(100 + ranks);
      for (int i = 0; i < 120; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const auto s = shape(draw);
        test::seed(i);
        const at::ScalarType type = i % 4 == 0 ? at::kFloat : at::kDouble;
        const double off = type == at::kFloat ? 1e-6 : 1e-14;
        const at::Tensor value = randn(s, type);
        const ShardSpec from = draw.spec(mesh, s), to = draw.spec(mesh, s);
        const at::Tensor x = leaf(value, from);
        ASSERT_LT(difference(x, value), off) << from;
        const at::Tensor y = redistribute(x, to);
        ASSERT_EQ(spec(y), to);
        ASSERT_EQ(to_local(y).sizes(), at::IntArrayRef(to.local_shape()));
        ASSERT_LT(difference(y, value), off) << from << " to " << to;
        // The gradient of a weighted sum is the weight, wherever it lies.
        const at::Tensor weight = randn(s, type);
        (full_tensor(y) * weight).sum().backward();
        ASSERT_LT(difference(x.grad(), weight), off) << from << " to " << to;
      }
    });
  }
}

TEST(FromLocal, GathersSizesAndReportsDisagreement) {
  on_ranks(3, [](DistributedManager& manager) {
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
  on_ranks(2, [](DistributedManager& manager) {
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

// A block of a solver: ghost cells around the cells that are its own, in either order of the dims.
struct Block {
  Block(const ShardSpec& spec, MemoryOrder order, int ghosts)
      : memory{.order = order}, local(spec.local_shape()) {
    std::int64_t all = 1;
    for (std::size_t d = 0; d < local.size(); ++d) {
      const std::int64_t low = ghosts > 0 ? static_cast<std::int64_t>(d) + ghosts : 0;
      memory.before.push_back(low);
      memory.allocated.push_back(local[d] + 2 * low);
      all *= memory.allocated[d];
    }
    if (ghosts == 0) memory.allocated.clear();
    cells.assign(static_cast<std::size_t>(all), -7.0);
  }
  // Of the cell at these indices of the local.
  double& at(std::int64_t i, std::int64_t j) {
    const Sizes block = memory.allocated.empty() ? local : memory.allocated;
    i += memory.before[0];
    j += memory.before[1];
    return cells[static_cast<std::size_t>(
        memory.order == MemoryOrder::row_major ? i * block[1] + j : j * block[0] + i)];
  }
  BlobMemory memory;
  Sizes local;
  std::vector<double> cells;
};

TEST(FromBlob, SharesBlocksWithGhostCellsInEitherOrder) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      Draw draw(5);
      for (int round = 0; round < 12; ++round) {
        const int dim = round % 2;
        const MemoryOrder order =
            draw.chance(50) ? MemoryOrder::row_major : MemoryOrder::column_major;
        const ShardSpec s(mesh, {5, 6}, {Shard(dim)}, {{dim, draw.sizes(dim == 0 ? 5 : 6, ranks)}});
        const at::Tensor value = randn({5, 6}, at::kDouble);
        const auto offset = s.local_offset();
        Block block(s, order, draw.below(3));
        const auto each = [&](const std::function<void(double&, double)>& visit) {
          for (std::int64_t i = 0; i < block.local[0]; ++i)
            for (std::int64_t j = 0; j < block.local[1]; ++j)
              visit(block.at(i, j), value[i + offset[0]][j + offset[1]].item<double>());
        };
        each([](double& cell, double v) { cell = v; });
        const at::Tensor x = from_blob(block.cells.data(), s, block.memory, at::kDouble);
        SCOPED_TRACE(concat("round ", round, ", ", s));
        EXPECT_EQ(difference(x, value), 0);
        const at::Tensor image = x.view({1, 1, 5, 6}), plain = value.view({1, 1, 5, 6});
        const at::Tensor kernel = randn({2, 1, 3, 3}, at::kDouble).requires_grad_(true);
        const at::Tensor seen = at::conv2d(image, kernel, {}, 1, 1);
        EXPECT_LT(difference(seen, at::conv2d(plain, kernel.detach(), {}, 1, 1)), 1e-13);
        seen.square().sum().backward();
        const at::Tensor beside = kernel.detach().clone().requires_grad_(true);
        at::conv2d(plain, beside, {}, 1, 1).square().sum().backward();
        EXPECT_LT(difference(kernel.grad(), beside.grad()), 1e-13);
        EXPECT_EQ(difference(x.reshape({30}), value.reshape({30})), 0);
        EXPECT_EQ(difference(x.t().contiguous() + 1, value.t() + 1), 0);
        const auto part = [&](const at::Tensor& t) { return t.narrow(1 - dim, 1, 3).sum(0); };
        EXPECT_LT(difference(part(x), part(value)), 1e-14);
        // What either writes the other sees, and no ghost cell is touched.
        at::Tensor(x).mul_(2).select(1 - dim, 0).add_(1);
        at::Tensor after = value * 2;
        after.select(1 - dim, 0).add_(1);
        each([](double& cell, double) { cell += 3; });
        EXPECT_LT(difference(x, after + 3), 1e-15);
        const auto ghosts = std::ranges::count(block.cells, -7.0);
        EXPECT_EQ(ghosts, static_cast<std::ptrdiff_t>(block.cells.size()) - s.local_numel());
      }
    });
  }
}

TEST(FromBlob, TakesStridesAndRefusesWhatDoesNotFit) {
  on_ranks(2, [](DistributedManager& manager) {
    const ShardSpec s(manager.mesh({{"x", 2}}), {6, 2}, {Shard(0)});
    // Of three components the second and the third, behind each other.
    std::vector<float> cells(9);
    for (int i = 0; i < 9; ++i) cells[i] = static_cast<float>(i);
    int returned = 0;
    {
      const at::Tensor x = from_blob(cells.data(), s, {.before = {0, 1}, .strides = {3, 1}},
                                     at::kFloat, [&](void* p) { returned += p == cells.data(); });
      EXPECT_TRUE(to_local(x).equal(at::tensor({1.f, 2.f, 4.f, 5.f, 7.f, 8.f}).view({3, 2})));
    }
    EXPECT_EQ(returned, 1);
    const auto refused = [&](const BlobMemory& memory) {
      EXPECT_THROW(from_blob(cells.data(), s, memory, at::kFloat), InvalidArgument);
    };
    refused({.allocated = {4}});
    refused({.allocated = {4, 2}, .before = {2, 0}});
    refused({.allocated = {4, 2}, .before = {-1, 0}});
    refused({.strides = {0, 1}});
    refused({.strides = {3, 0}});
    EXPECT_THROW(from_blob(nullptr, s, BlobMemory{}, at::kFloat), InvalidArgument);
  });
}

TEST(FromLocal, SaysOnceThatItCopiesMemoryOfTheProgram) {
  struct Counting final : c10::WarningHandler {
    void process(const c10::Warning& w) override {
      if (w.msg().find("from_local: a local") != std::string::npos) ++count;
    }
    int count = 0;
  };
  on_ranks(2, [](DistributedManager& manager) {
    Counting counting;
    const c10::WarningUtils::WarningHandlerGuard guard(&counting);
    const ShardSpec s(manager.mesh({{"x", 2}}), {4, 3}, {Shard(0)});
    std::vector<double> cells(20, 1.0);
    const at::Tensor block = at::from_blob(cells.data(), {4, 5}, at::kDouble);
    from_local(at::zeros({3, 2}, at::kDouble).t(), s);
    from_local(block.narrow(1, 1, 3).narrow(0, 1, 2).clone(), s);
    EXPECT_EQ(counting.count, 0) << "of libtorch's own memory nothing is said";
    for (int i = 0; i < 3; ++i) from_local(block.narrow(1, 1, 3).narrow(0, 1, 2), s);
    EXPECT_EQ(counting.count, 1);
  });
}

TEST(Scatter, FromAnyRank) {
  on_ranks(4, [](DistributedManager& manager) {
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
  on_ranks(3, [](DistributedManager& manager) {
    const ShardSpec s(manager.mesh({{"x", 3}}), {7}, {Shard(0)}, {{0, {5, 0, 2}}});
    EXPECT_EQ(difference(arange(s), at::arange(7)), 0);
    EXPECT_EQ(difference(full(s, 2.5, at::kDouble), at::full({7}, 2.5, at::kDouble)), 0);
    EXPECT_EQ(difference(zeros(s), at::zeros({7})), 0);
    EXPECT_TRUE(ones(s, at::TensorOptions(at::kFloat).requires_grad(true)).is_leaf());
    const ShardSpec p(manager.mesh({{"x", 3}}), {7}, {Partial()});
    EXPECT_THROW(ones(p), InvalidArgument);
  });
}

}  // namespace tessera::test::redistribute_test
