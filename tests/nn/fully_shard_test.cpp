// fully_shard: parameters gathered unit by unit, ahead of use, equal to one process.

#include "tessera/nn/fully_shard.h"

#include <unistd.h>

#include <cstdio>
#include <numeric>

#include "fully_shard_case.h"
#include "tessera/checkpoint/file.h"
#include "tessera/nn/detail/flat_plan.h"

namespace tessera::test::fully_shard_test {

TEST(FlatPlan, CutsBetweenRows) {
  Draw draw(5);
  for (int round = 0; round < 2000; ++round) {
    const int ranks = draw.between(1, 6);
    std::vector<detail::FlatRows> rows;
    for (int i = draw.between(1, 6); i > 0; --i)
      rows.push_back({draw.between(1, 40), draw.of<std::int64_t>({1, 1, 3, 4, 8, 16, 7})});
    const detail::FlatPlan plan = plan_flat(rows, ranks);
    ASSERT_EQ(plan.cuts.size(), static_cast<std::size_t>(ranks + 1));
    ASSERT_EQ(plan.cuts[0], 0);
    std::int64_t total = 0, end = 0, widest = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto [n, width] = rows[i];
      total += n * width;
      widest = std::max(widest, width);
      ASSERT_GE(plan.offset[i], end);
      end = plan.offset[i] + n * width;
      ASSERT_EQ(std::accumulate(plan.rows[i].begin(), plan.rows[i].end(), std::int64_t{0}), n);
      // Where each rank's rows begin is where its interval does, or the parameter.
      std::int64_t row = 0;
      for (int r = 0; r < ranks; ++r) {
        const std::int64_t kept = plan.rows[i][r], at = plan.offset[i] + row * width;
        ASSERT_GE(kept, 0);
        if (kept > 0) {
          ASSERT_GE(at, plan.cuts[r]);
          ASSERT_LE(at + kept * width, plan.cuts[r + 1]);
        }
        row += kept;
      }
    }
    ASSERT_LE(end, plan.numel());
    ASSERT_LE(plan.numel(), total + std::max<std::int64_t>(total / 16, ranks));
    for (const std::int64_t size : plan.sizes())
      EXPECT_LE(size, total / ranks + std::max<std::int64_t>(total / 16 / ranks, 1) + widest);
  }
  // A transformer's block: no padding, equal intervals.
  const auto plan = detail::plan_flat({{96, 32}, {96, 1}, {32, 32}, {32, 1}}, 4);
  EXPECT_EQ(plan.sizes(), (Sizes(4, plan.numel() / 4)));
}

TEST(FullyShard, TrainsLikeOneProcess) {
  for (const auto& axes : meshes()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh(test::mapped(axes));
      Draw draw(17);
      for (int round = 0; round < 6; ++round) {
        const NetImpl::Shape shape{draw.between(1, 6), draw.between(4, 9), draw.between(1, 5),
                                   draw.between(1, 4), draw.chance(50)};
        Net net = net_of(shape), expected = net_of(shape);
        const std::int64_t coalesced[] = {0, 600, 1500, 64 << 10};
        FullyShardOptions options{.reshard_after_forward = draw.chance(60),
                                  .prefetch = draw.below(3),
                                  .coalesce_bytes = coalesced[draw.below(4)]};
        if (draw.chance(50)) options.axes = {"x"};
        if (draw.chance(40)) options.units = {"blocks.*", "first"};
        if (draw.chance(30)) options.reducer.bucket_bytes = options.reducer.first_bucket_bytes = 64;
        fully_shard(*net, mesh, options);
        expect_same(*net, *expected, "at first");
        // Where a gradient is all round-off, Adam makes a step of it unless eps is large.
        const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-3);
        torch::optim::AdamW opt(once(*net), adam), expected_opt(once(*expected), adam);
        for (int step = 0; step < 5; ++step) {
          const std::string where = concat("round ", round, " on ", ranks, " step ", step);
          const bool twice = draw.chance(25), skipped = draw.chance(20);
          net->twice = expected->twice = twice ? 0 : -1;
          net->skip = expected->skip = skipped ? draw.below(shape.blocks) : -1;
          expected_opt.zero_grad();
          opt.zero_grad();
          const int parts = draw.between(1, 3);
          for (int part = 0; part < parts; ++part) {
            const at::Tensor x = randn({draw.between(1, 6), shape.in}, at::kDouble);
            const at::Tensor wanted = loss_of(expected->forward(x));
            wanted.backward();
            const std::optional<NoSync> scope =
                part + 1 < parts && step % 2 == 1 ? std::optional(no_sync(*net)) : std::nullopt;
            const at::Tensor loss = loss_of(net->forward(sharded(draw, x, mesh)));
            EXPECT_LT(difference(loss, wanted), 1e-10) << where;
            loss.backward();
          }
          expect_same(*net, *expected, where);
          const double norm = clip_gradients(net->parameters(), mesh.all(), {.max_norm = 0.3});
          EXPECT_NEAR(norm, clip_plainly(once(*expected), 0.3), 1e-9 * (1 + norm));
          expected_opt.step();
          opt.step();
          if (draw.chance(50)) {
            const at::NoGradGuard no_grad;
            const at::Tensor x = randn({3, shape.in}, at::kDouble);
            for (int again = draw.between(1, 2); again > 0; --again)
              EXPECT_LT(difference(net->forward(sharded(draw, x, mesh)), expected->forward(x)),
                        1e-10)
                  << where;
          }
        }
        expect_same(*net, *expected, concat("round ", round, " on ", ranks));
      }
    });
  }
}

TEST(FullyShard, TiedWeightsAreOneParameter) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const NetImpl::Shape shape{.in = 4, .width = 5, .blocks = 2, .tied = true};
    Net net = net_of(shape), expected = net_of(shape);
    fully_shard(*net, mesh);
    EXPECT_TRUE(net->last.is_same(net->first->weight));
    torch::optim::SGD opt(once(*net), 0.1), other(once(*expected), 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = randn({4, 4}, at::kDouble);
      opt.zero_grad();
      other.zero_grad();
      loss_of(net->forward(distribute_tensor(x, mesh, {Shard(0)}))).backward();
      loss_of(expected->forward(x)).backward();
      opt.step();
      other.step();
    }
    expect_same(*net, *expected, "tied");
  });
}

TEST(FullyShard, FrozenIgnoredAndUnusedParameters) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const NetImpl::Shape shape{.blocks = 4};
    Net net = net_of(shape), expected = net_of(shape);
    for (Net* n : {&net, &expected}) {
      (*n)->skip = 2;  // used by no rank
      for (auto& p : (*n)->blocks->ptr(1)->parameters()) p.set_requires_grad(false);
    }
    fully_shard(*net, mesh, {.ignore = {"bias"}});
    EXPECT_FALSE(is_sharded(net->bias));
    EXPECT_TRUE(spec(net->scale).is_replicated()) << "has no rows";
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({2, 5}, at::kDouble);
      // One rank has no sample: it contributes zeros.
      loss_of(net->forward(distribute_tensor(x, mesh, {Shard(0)}, {{0, {1, 0, 1}}}))).backward();
      loss_of(expected->forward(x)).backward();
      EXPECT_LT(difference(net->bias.grad(), expected->bias.grad()), 1e-11);
      EXPECT_FALSE(net->blocks->ptr(1)->parameters()[1].grad().defined());
      EXPECT_FALSE(net->blocks->ptr(2)->parameters()[1].grad().defined());
      for (const auto& item : expected->named_parameters()) {
        if (item.key() != "bias" && item.value().grad().defined()) {
          EXPECT_LT(difference(net->named_parameters()[item.key()].grad(), item.value().grad()),
                    1e-11)
              << item.key();
        }
      }
    }
  });
}

TEST(FullyShard, TheFactorIsThatOfOneProcessOnAnyMesh) {
  // Plain, hybrid, and an axis of one rank over which nothing is sharded: equal gradients.
  for (const auto& axes : meshes()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped(axes));
      Net net = net_of({}), expected = net_of({});
      fully_shard(*net, mesh, {.axes = {"x"}});
      const at::Tensor x = randn({7, 5}, at::kDouble);
      Draw draw(3);
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        loss_of(net->forward(sharded(draw, x, mesh))).backward();
      }
      loss_of(expected->forward(x)).backward();
      expect_same(*net, *expected, list(std::vector<int>{ranks}));
    });
  }
}

TEST(FullyShard, TwoMeshesAndNestedCallsInOneModel) {
  on_threads(4, [](DistributedManager& manager) {
    const auto flat = manager.mesh({{"x", 4}}), grid = manager.mesh({{"a", 2}, {"b", 2}});
    // A model of two parts, each on a mesh of its own over the same ranks.
    Net one = net_of({.blocks = 2}, 3), two = net_of({.blocks = 3}, 4);
    Net first = net_of({.blocks = 2}, 3), second = net_of({.blocks = 3}, 4);
    fully_shard(*one, flat);
    // A call for a part of it first: the second takes the rest.
    fully_shard(*two->blocks, grid, {.units = {"*"}, .axes = {"b"}});
    fully_shard(*two, grid);
    EXPECT_EQ(placements(two->blocks->ptr(0)->parameters()[2])[0], Replicate());
    EXPECT_EQ(placements(two->last)[0], Shard(0));
    for (int step = 0; step < 3; ++step) {
      for (Net* n : {&one, &two, &first, &second}) (*n)->zero_grad();
      const at::Tensor x = randn({6, 5}, at::kDouble);
      const at::Tensor wanted = second->forward(first->forward(x)).square().mean();
      wanted.backward();
      const at::Tensor middle = one->forward(distribute_tensor(x, flat, {Shard(0)}));
      const at::Tensor there = from_local(
          to_local(middle),
          ShardSpec(grid, {6, 5}, {Shard(0), Shard(0)}, {{0, spec(middle).sizes().at(0)}}));
      const at::Tensor loss = two->forward(there).square().mean();
      EXPECT_LT(difference(loss, wanted), 1e-11);
      loss.backward();
      expect_same(*one, *first, concat("first, step ", step));
      expect_same(*two, *second, concat("second, step ", step));
    }
  });
}

TEST(FullyShard, SavesAndLoadsOnAnyMesh) {
  const std::string path =
      concat(::testing::TempDir(), "tessera_fully_shard_", ::getpid(), ".safetensors");
  const NetImpl::Shape shape{.tied = true};
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of(shape);
    fully_shard(*net, mesh);
    save(*net, mesh, path);
  });
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"r", 2}, {"x", 2}});
    Net net = net_of(shape, 5), expected = net_of(shape);
    fully_shard(*net, mesh, {.units = {"blocks.1"}, .axes = {"x"}});
    const at::Tensor x = randn({6, 5}, at::kDouble);
    const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0), Shard(0)});
    net->forward(mine);
    load(*net, mesh, path);
    EXPECT_LT(difference(net->forward(mine), expected->forward(x)), 1e-11);
    expect_same(*net, *expected, "loaded", false);
  });
  std::remove(path.c_str());
}

TEST(FullyShard, RefusesWhatCannotBe) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({});
    EXPECT_THROW(fully_shard(*net, mesh, {.units = {"blocks.9"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.axes = {"y"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.ignore = {"nothing"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.prefetch = -1}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.coalesce_bytes = -1}), InvalidArgument);
    // Ranks that ask for different things are told, all of them.
    EXPECT_THROW(fully_shard(*net, mesh, {.prefetch = manager.rank()}), MismatchError);
    EXPECT_THROW(fully_shard(*net, mesh, {.coalesce_bytes = manager.rank()}), MismatchError);
    FullyShardOptions differs;
    differs.reducer.learn_order = manager.rank() == 0;
    EXPECT_THROW(fully_shard(*net, mesh, differs), MismatchError);
    EXPECT_FALSE(is_sharded(net->last)) << "nothing has changed";
    net->forward(randn({2, 5}, at::kDouble)).sum().backward();
    EXPECT_THROW(fully_shard(*net, mesh), ShardingError);
    net->zero_grad();
    fully_shard(*net, mesh);
    fully_shard(*net, mesh);  // nothing is left to do
  });
}

TEST(FullyShard, RanksThatUseOtherParametersAreTold) {
  // What one rank alone leaves out: an error on all, and no hang, whether calls are compared or
  // sizes alone.
  for (const bool compared : {false, true})
    EXPECT_THROW(run_threads(2,
                             [compared](DistributedManager& manager) {
                               at::set_num_threads(1);
                               const auto mesh = manager.mesh({{"x", 2}});
                               if (compared) {
                                 manager.world().set_check_level(CheckLevel::collective);
                                 mesh.all().set_check_level(CheckLevel::collective);
                               }
                               Net net = net_of({});
                               fully_shard(*net, mesh);
                               net->skip = manager.rank() == 0 ? 1 : -1;
                               const at::Tensor x = distribute_tensor(at::ones({4, 5}, at::kDouble),
                                                                      mesh, {Shard(0)});
                               loss_of(net->forward(x)).backward();
                             },
                             {.timeout = std::chrono::seconds(20)}),
                 Error);
}

}  // namespace tessera::test::fully_shard_test
