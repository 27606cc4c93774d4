// fully_shard: units that stay sharded over a smaller group after forward.

#include "fully_shard_case.h"

namespace tessera::test::fully_shard_group_test {

namespace {

// Calls of one operation, by the size of their group on the mesh {a, b}.
struct ByGroup {
  int all = 0, b = 0, other = 0;
};

ByGroup gathers_of(const CommTrace& trace, const DeviceMesh& mesh) {
  ByGroup found;
  for (const CommEvent& e : trace.events()) {
    if (e.operation != "all_gather") continue;
    ++(e.group == mesh.all().name()        ? found.all
       : e.group == mesh.group("b").name() ? found.b
                                           : found.other);
  }
  return found;
}

}  // namespace

TEST(FullyShardSmallerGroup, TrainsLikeOneProcess) {
  struct Where {
    std::vector<Axis> axes;
    std::vector<std::string> shard, keep;
  };
  const std::vector<Where> all{
      {{{"a", 2}, {"b", 2}}, {}, {"b"}},
      {{{"a", 2}, {"b", 2}}, {}, {"a"}},
      {{{"a", 1}, {"b", 3}}, {}, {"a"}},
      {{{"a", 1}, {"b", 3}}, {}, {"b"}},
      {{{"r", 2}, {"a", 2}, {"b", 1}}, {"a", "b"}, {"b"}},
      {{{"a", 1}}, {}, {"a"}},
  };
  for (const Where& where : all) {
    int ranks = 1;
    for (const Axis& a : where.axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh(test::mapped(where.axes));
      Draw draw(29);
      for (int round = 0; round < 2; ++round) {
        const NetImpl::Shape shape{draw.between(1, 6), draw.between(4, 9), draw.between(1, 5),
                                   draw.between(1, 4), draw.chance(50)};
        Net net = net_of(shape), expected = net_of(shape);
        FullyShardOptions options{
            .axes = where.shard, .reshard_axes = where.keep, .prefetch = draw.below(3)};
        if (draw.chance(40)) options.units = {"blocks.*", "first"};
        fully_shard(*net, mesh, options);
        for (int step = 0; step < 4; ++step) {
          const std::string text =
              concat("round ", round, " on ", mesh.mesh().to_string(), " step ", step);
          net->twice = expected->twice = draw.chance(25) ? 0 : -1;
          net->skip = expected->skip = draw.chance(20) ? draw.below(shape.blocks) : -1;
          net->zero_grad();
          expected->zero_grad();
          const at::Tensor x = randn({draw.between(1, 6), shape.in}, at::kDouble);
          const at::Tensor mine = sharded(draw, x, mesh);
          const at::Tensor wanted = loss_of(expected->forward(x)),
                           loss = loss_of(net->forward(mine));
          EXPECT_LT(difference(loss, wanted), 1e-10) << text;
          loss.backward();
          wanted.backward();
          expect_same(*net, *expected, text);
          // A forward that no backward follows, then another value.
          if (draw.chance(50)) loss_of(net->forward(mine));
          const at::NoGradGuard no_grad;
          for (const auto& p : once(*net)) p.mul_(0.9);
          for (const auto& p : once(*expected)) p.mul_(0.9);
          if (draw.chance(50)) {
            EXPECT_LT(difference(net->forward(mine), expected->forward(x)), 1e-10) << text;
          }
        }
      }
    });
  }
}

TEST(FullyShardSmallerGroup, BackwardGathersOverItAlone) {
  on_threads(4, [](DistributedManager& manager) {
    constexpr int kBlocks = 4;
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    Net net = net_of({.blocks = kBlocks});
    fully_shard(*net, mesh, {.units = {"blocks.*"}, .reshard_axes = {"b"}, .coalesce_bytes = 0});
    const at::Tensor x = distribute_tensor(randn({6, 5}, at::kDouble), mesh, {Shard(0), Shard(0)});
    loss_of(net->forward(x)).backward();
    for (int step = 0; step < 2; ++step) {
      const CommTraceScope trace(manager);
      loss_of(net->forward(x)).backward();
      const ByGroup found = gathers_of(*trace, mesh);
      // The root's, used first and last in forward, is gathered over all once.
      EXPECT_EQ(found.all, kBlocks + 1) << trace->table();
      EXPECT_EQ(found.b, 1 + kBlocks) << trace->table();
      EXPECT_EQ(found.other, 0) << trace->table();
    }
  });
}

TEST(FullyShardSmallerGroup, RefusesWhatCannotBe) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    Net net = net_of({});
    EXPECT_THROW(fully_shard(*net, mesh, {.reshard_axes = {"c"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.axes = {"a"}, .reshard_axes = {"b"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.reshard_after_forward = false, .reshard_axes = {"b"}}),
                 InvalidArgument);
    FullyShardOptions differs;
    differs.reshard_axes = {manager.rank() == 0 ? "a" : "b"};
    EXPECT_THROW(fully_shard(*net, mesh, differs), MismatchError);
    EXPECT_FALSE(is_sharded(net->last)) << "nothing has changed";
    fully_shard(*net, mesh, {.reshard_axes = {"b"}});
  });
}

}  // namespace tessera::test::fully_shard_group_test
