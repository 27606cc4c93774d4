// Making sharded tensors, and leaving them: gradients' placements, requests, other meshes, and
// pictures.

#include <regex>

#include "support.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::test::leave_test {

TEST(Gradient, PlacementsAreInferredOrChosen) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({5, 4}, at::kDouble), weight = randn({5, 4}, at::kDouble);
    const ShardSpec rows(mesh, {5, 4}, {Shard(0)}, {{0, {4, 1}}});
    {
      const at::Tensor x = leaf(value, rows);
      (full_tensor(x) * weight).sum().backward();
      EXPECT_EQ(spec(x.grad()), rows) << "of full_tensor: the tensor's own";
      EXPECT_EQ(difference(x.grad(), weight), 0);
    }
    {
      // Each rank's loss is a summand: the gradient is that of their sum.
      const at::Tensor x = leaf(value, rows);
      (full_tensor(x, std::vector<Placement>{Partial()}) * weight * (manager.rank() + 1))
          .sum()
          .backward();
      EXPECT_LT(difference(x.grad(), weight * 3), 1e-14);
      EXPECT_THROW(full_tensor(x, std::vector<Placement>{Shard(0)}), InvalidArgument);
    }
    {
      const at::Tensor x = leaf(value, rows);
      redistribute(x, {Replicate()}, {}, std::vector<Placement>{Replicate()})
          .mul(distribute_tensor(weight, mesh, {Replicate()}))
          .sum()
          .backward();
      EXPECT_TRUE(spec(x.grad()).is_replicated()) << "as chosen";
      EXPECT_EQ(difference(x.grad(), weight), 0);
    }
    {
      const at::Tensor x = leaf(value, ShardSpec::replicated(mesh, {5, 4}));
      const at::Tensor mine = to_local(x, std::vector<Placement>{Partial()});
      (mine * weight * (manager.rank() + 1)).sum().backward();
      EXPECT_LT(difference(x.grad(), weight * 3), 1e-14)
          << "to_local of a replicated value used differently by each rank";
    }
    {
      const at::Tensor x = leaf(value, rows);
      const at::Tensor g =
          torch::autograd::grad({full_tensor(x).pow(3).sum()}, {x}, {}, true, true)[0];
      g.sum().backward();
      EXPECT_LT(difference(x.grad(), value * 6), 1e-13) << "twice";
    }
  });
}

TEST(Redistribute, ResultsHaveMemoryOfTheirOwn) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Replicate()});
    redistribute(x, {Shard(0)}).mul_(5);
    EXPECT_EQ(difference(x, at::ones({4})), 0);
  });
}

TEST(FullTensor, HasMemoryOfItsOwnWhateverThePlacement) {
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      std::vector<ShardSpec> specs{{mesh, {4}, {Replicate()}}, {mesh, {4}, {Shard(0)}}};
      // The first rank has everything.
      if (ranks == 2) specs.push_back({mesh, {4}, {Shard(0)}, {{0, {4, 0}}}});
      for (const ShardSpec& spec : specs) {
        const at::Tensor x = leaf(at::ones({4}, at::kDouble), spec);
        full_tensor(x.detach()).mul_(5);
        EXPECT_EQ(difference(x.detach(), at::ones({4}, at::kDouble)), 0) << spec;
        // What backward needs of the value is the value that it was.
        const at::Tensor y = full_tensor(x);
        const at::Tensor loss = (y * y).sum();
        {
          const at::NoGradGuard no_grad;
          x.add_(1);
        }
        loss.backward();
        EXPECT_EQ(difference(x.grad(), at::full({4}, 2.0, at::kDouble)), 0) << spec;
      }
    });
  }
}

TEST(Redistribute, Asynchronous) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(40 + ranks);
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::vector<std::int64_t> shape = {draw.between(0, 5), draw.between(1, 4)};
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble), weight = randn(shape, at::kDouble);
        const ShardSpec from = draw.spec(mesh, shape), to = draw.spec(mesh, shape),
                        third = draw.spec(mesh, shape);
        const at::Tensor x = leaf(value, from);
        Pending<at::Tensor> a = start_redistribute(x, to), b = start_redistribute(x, third);
        const at::Tensor y = a.wait(), z = b.wait();
        EXPECT_TRUE(a.done());
        ASSERT_EQ(spec(y), to);
        ASSERT_LT(difference(y, value), 1e-14);
        ASSERT_LT(difference(z, value), 1e-14);
        EXPECT_TRUE(a.wait().is_same(y)) << "waited for again";
        (full_tensor(y) * weight).sum().backward();
        ASSERT_LT(difference(x.grad(), weight), 1e-14);
      }
    });
  }
}

TEST(Redistribute, SaysWhatItWillDo) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    const auto calls = explain_redistribution(ShardSpec(mesh, {4, 8}, {Partial(), Shard(1)}),
                                              ShardSpec(mesh, {4, 8}, {Shard(0), Replicate()}));
    ASSERT_EQ(calls.size(), 2u);
    EXPECT_EQ(calls[0].operation, "reduce_scatter");
    EXPECT_EQ(calls[0].axes, std::vector<std::string>{"a"});
    EXPECT_EQ(calls[0].received, 8);
    EXPECT_EQ(calls[1].operation, "all_gather");
    EXPECT_EQ(calls[1].axes, std::vector<std::string>{"b"});
    EXPECT_EQ(calls[1].received, 8);
  });
}

TEST(OtherMesh, SameRanksOtherOrderDifferentiable) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(60 + ranks);
      std::vector<int> order(ranks);
      for (int r = 0; r < ranks; ++r) order[r] = ranks - 1 - r;
      const auto from = manager.mesh(draw.mesh(ranks));
      const auto to = manager.mesh(Mesh({{"y", ranks}}, order));
      for (int i = 0; i < 30; ++i) {
        const std::vector<std::int64_t> shape = {draw.between(0, 6), draw.between(1, 5)};
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble), weight = randn(shape, at::kDouble);
        const ShardSpec there = draw.spec(to, shape, false);
        const at::Tensor x = leaf(value, draw.spec(from, shape));
        const at::Tensor y = redistribute(x, from, to, there.placements(), there.sizes());
        ASSERT_EQ(spec(y), there);
        ASSERT_LT(difference(y, value), 1e-14);
        (full_tensor(y) * weight).sum().backward();
        ASSERT_LT(difference(x.grad(), weight), 1e-14);
      }
    });
  }
}

TEST(OtherMesh, OtherRanks) {
  on_threads(4, [](DistributedManager& manager) {
    Draw draw(9);
    const auto from = manager.mesh(Mesh({{"x", 2}}, {2, 0}));
    for (const auto& members :
         {std::vector<int>{1, 3}, std::vector<int>{0, 1, 3}, std::vector<int>{3}}) {
      const auto to = manager.mesh(Mesh({{"y", static_cast<int>(members.size())}}, members));
      if (!from.contains_me() && !to.contains_me()) continue;
      for (int i = 0; i < 20; ++i) {
        const std::vector<std::int64_t> shape = {draw.between(0, 6), draw.between(1, 5)};
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble);
        const Sizes a = draw.sizes(shape[0], 2),
                    b = draw.sizes(shape[1], static_cast<int>(members.size()));
        const at::Tensor x = from.contains_me()
                                 ? distribute_tensor(value, from, {Shard(0)}, {{0, a}})
                                 : at::Tensor();
        const at::Tensor y = redistribute(x, from, to, {Shard(1)}, {{1, b}});
        ASSERT_EQ(y.defined(), to.contains_me());
        if (y.defined()) {
          ASSERT_EQ(difference(y, value), 0);
        }
      }
      const at::Tensor x =
          from.contains_me() ? leaf(at::ones({4}), ShardSpec(from, {4}, {Shard(0)})) : at::Tensor();
      EXPECT_THROW(redistribute(x, from, to, {Replicate()}), ShardingError) << "on every rank";
      EXPECT_THROW(redistribute(at::ones({4}), from, to, {Replicate()}), InvalidArgument)
          << "on every rank";
    }
  });
}

TEST(Factories, RandomNumbersDoNotDependOnThePlacement) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (const bool normal : {false, true}) {
      manual_seed(manager, 5);
      const at::Tensor a =
          normal ? randn(ShardSpec(mesh, {7, 2}, {Shard(0)}, {{0, {5, 0, 2}}}))
                 : tessera::rand(ShardSpec(mesh, {7, 2}, {Shard(0)}, {{0, {5, 0, 2}}}));
      manual_seed(manager, 5);
      const at::Tensor b = normal ? randn(ShardSpec::replicated(mesh, {7, 2}))
                                  : tessera::rand(ShardSpec::replicated(mesh, {7, 2}));
      EXPECT_EQ(difference(a, full_tensor(b)), 0);
      EXPECT_GT(full_tensor(a).std().item<double>(), 0.1);
    }
    const ShardSpec seven(mesh, {7}, {Shard(0)}, {{0, {5, 0, 2}}});
    EXPECT_LT(
        difference(arange(seven, 2.0, 0.5, at::kDouble), at::arange(2.0, 5.5, 0.5, at::kDouble)),
        1e-15);
    EXPECT_EQ(difference(arange(seven, 3, -2), at::arange(3, -11, -2)), 0);
    EXPECT_TRUE(tessera::rand(seven, at::TensorOptions(at::kFloat).requires_grad(true)).is_leaf());
  });
}

TEST(Pictures, TextAndSvg) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    EXPECT_EQ(visualize_sharding(
                  ShardSpec(mesh, {4, 7}, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {5, 2}}})),
              "[4, 7] data=Shard(0)[3, 1] domain=Shard(1)[5, 2]\n"
              "dim 0 | dim 1 0..4 | dim 1 5..6\n"
              "0..2  | 0          | 1\n"
              "3..3  | 2          | 3\n");
    EXPECT_EQ(visualize_sharding(ShardSpec(mesh, {4}, {Partial(), Shard(0)}, {{0, {4, 0}}})),
              "[4] data=Partial(sum) domain=Shard(0)[4, 0]\n"
              "dim 0 |\n"
              "0..3  | 0,2\n"
              "ranks along data hold values to reduce: Partial(sum). Nothing on rank 1,3.\n");
    const std::string svg = visualize_sharding_svg(
        ShardSpec(mesh, {4, 7}, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {5, 2}}}));
    EXPECT_EQ(svg.find("<svg "), 0u);
    std::size_t cells = 0;
    for (std::size_t at = svg.find("hsl("); at != std::string::npos; at = svg.find("hsl(", at + 1))
      ++cells;
    EXPECT_EQ(cells, 4u);
    // Nothing stands outside of the picture.
    const std::string wide =
        visualize_sharding_svg(ShardSpec(mesh, {4, 400}, {Shard(0), Shard(1)}));
    std::cmatch size, box;
    ASSERT_TRUE(std::regex_search(wide.c_str(), size, std::regex("width=\"([0-9.]+)\"")));
    const std::regex rect("<rect x=\"([-0-9.]+)\" y=\"[-0-9.]+\" width=\"([0-9.]+)\"");
    int boxes = 0;
    const char* at = wide.c_str();
    for (; std::regex_search(at, box, rect); at = box.suffix().first, ++boxes)
      EXPECT_LE(std::stod(box[1]) + std::stod(box[2]), std::stod(size[1])) << wide;
    EXPECT_GE(boxes, 4);
    EXPECT_NO_THROW(visualize_sharding_svg(ShardSpec(mesh, {}, {Replicate(), Replicate()})));
    EXPECT_NO_THROW(visualize_sharding(ShardSpec(mesh, {0, 2, 3}, {Shard(0), Shard(2)})));
  });
}

}  // namespace tessera::test::leave_test
