// fully_shard: what is gathered when, and how much of it lives at a time.

#include <functional>

#include "byte_counter.h"
#include "call_order.h"
#include "fully_shard_case.h"
#include "tessera/nn/detail/flat_plan.h"

namespace tessera::test::fully_shard_gathers_test {

TEST(FullyShard, GathersEachUnitOnceAndNothingElse) {
  on_threads(3, [](DistributedManager& manager) {
    constexpr int kBlocks = 4;
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of({.blocks = kBlocks});
    fully_shard(*net, mesh, {.units = {"blocks.*"}, .coalesce_bytes = 0});
    const at::Tensor x = distribute_tensor(randn({6, 5}, at::kDouble), mesh, {Shard(0)});
    loss_of(net->forward(x)).backward();
    for (int step = 0; step < 2; ++step) {
      const CommTraceScope trace(manager);
      loss_of(net->forward(x)).backward();
      auto moved = calls_of(*trace);
      // Forward: the root's, the blocks', the root's again; backward goes on with it, and needs the
      // root's first layer no more: no input asks for a gradient.
      EXPECT_EQ(moved["all_gather"].first, kBlocks + 2 + kBlocks) << trace->table();
      EXPECT_EQ(moved["reduce_scatter"].first, kBlocks + 1) << trace->table();
    }
  });
}

TEST(FullyShard, GathersSmallUnitsTogether) {
  on_threads(3, [](DistributedManager& manager) {
    constexpr int kBlocks = 6;
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor x = randn({6, 5}, at::kDouble);
    const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
    const auto calls_with = [&](const FullyShardOptions& options) {
      Net net = net_of({.blocks = kBlocks}), expected = net_of({.blocks = kBlocks});
      fully_shard(*net, mesh, options);
      std::map<std::string, std::pair<int, std::int64_t>> moved;
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        expected->zero_grad();
        const CommTraceScope trace(manager);
        loss_of(net->forward(mine)).backward();
        moved = calls_of(*trace);
        loss_of(expected->forward(x)).backward();
        expect_same(*net, *expected, concat("step ", step));
      }
      return moved;
    };
    auto each = calls_with({.units = {"blocks.*"}, .coalesce_bytes = 0});
    auto all = calls_with({.units = {"blocks.*"}});
    // One message a pass: what forward ends with is what backward begins with.
    EXPECT_EQ(all["all_gather"].first, 2);
    EXPECT_EQ(all["reduce_scatter"].first, 1);
    // A block's buffer is 600 to 1100 bytes.
    auto some = calls_with({.units = {"blocks.*"}, .coalesce_bytes = 2000});
    EXPECT_LT(some["all_gather"].first, each["all_gather"].first);
    EXPECT_GT(some["all_gather"].first, 4);
    EXPECT_LT(some["reduce_scatter"].first, each["reduce_scatter"].first);
    EXPECT_GT(some["reduce_scatter"].first, 2);
    auto none = calls_with({.units = {"blocks.*"}, .prefetch = 0});
    EXPECT_EQ(none["all_gather"].first, each["all_gather"].first);
  });
}

// A weight that is not in row-major order lies in no buffer of its unit: an operator takes the bias
// of the unit's, and gathers the weight by itself. A rank without rows does the same another way.
TEST(FullyShard, RanksWithoutRowsGatherAsOftenAsTheOthers) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const int without : {0, 1}) {
      const auto made = [] {
        Sequential net(Linear(8, 4), Linear(4, 4));
        net->to(at::kDouble);
        fill(*net, 7);
        Linear first = net->ptr<torch::nn::LinearImpl>(0);
        first->weight.set_data(first->weight.detach().t().contiguous().t());
        return net;
      };
      Sequential net = made(), expected = made();
      fully_shard(*net, mesh);
      const at::Tensor x = randn({3, 8}, at::kDouble);
      const Sizes rows = without == 0 ? Sizes{0, 3} : Sizes{3, 0};
      const at::Tensor mine = leaf(x, ShardSpec(mesh, {3, 8}, {Shard(0)}, {{0, rows}}), false);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        expected->zero_grad();
        const CommTraceScope trace(manager);
        {
          const at::NoGradGuard no_grad;
          EXPECT_LT(difference(net->forward(mine), expected->forward(x)), 1e-10) << step;
        }
        loss_of(net->forward(mine)).backward();
        const std::string calls = order_of(*trace);
        EXPECT_EQ(manager.world().all_gather_bytes(calls), std::vector<std::string>(2, calls))
            << "step " << step;
        loss_of(expected->forward(x)).backward();
        expect_same(*net, *expected, concat("step ", step));
      }
    }
  });
}

TEST(FullyShard, SeesWhatIsWrittenToUnitsOfOneMessage) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const std::int64_t coalesced : {600, 2000, 64 << 10}) {
      Net net = net_of({.blocks = 5}), expected = net_of({.blocks = 5});
      fully_shard(*net, mesh, {.coalesce_bytes = coalesced});
      const at::Tensor x = randn({5, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      // The third block is written to in the middle of forward, the first is used once more, and
      // the fourth is left out now and then.
      const auto run = [](Net& n, const at::Tensor& input, int step) {
        at::Tensor h = n->first->forward(input);
        for (const int i : {0, 1, 0, 2, 3, 4}) {
          if (i == 3 && step % 3 == 2) continue;
          if (i == 1 && step % 2 == 1) {
            const at::NoGradGuard no_grad;
            for (const auto& p : n->blocks->ptr(2)->parameters()) p.mul_(0.9);
          }
          h = h + n->blocks->ptr<torch::nn::SequentialImpl>(i)->forward(h);
        }
        return loss_of(h.matmul(n->last));
      };
      for (int step = 0; step < 8; ++step) {
        net->zero_grad();
        expected->zero_grad();
        const at::Tensor got = run(net, mine, step), wanted = run(expected, x, step);
        EXPECT_LT(difference(got, wanted), 1e-10) << step;
        got.backward();
        wanted.backward();
        expect_same(*net, *expected, concat("step ", step));
        const at::NoGradGuard no_grad;
        for (const auto& p : net->parameters()) p.mul_(1.01);
        for (const auto& p : expected->parameters()) p.mul_(1.01);
      }
    }
  });
}

TEST(FullyShard, HoldsTwoGatheredUnitsWhateverTheDepth) {
  // Ranks share the process, so that what lives of all of them is counted.
  constexpr int kRanks = 2;
  constexpr std::int64_t kWidth = 64;
  SizeCounter allocator;
  for (const bool reshard : {true, false}) {
    for (const int layers : {4, 7}) {
      on_threads(kRanks, [&](DistributedManager& manager) {
        const auto mesh = manager.mesh({{"x", kRanks}});
        Sequential net;
        for (int i = 0; i < layers; ++i) {
          net->push_back(Linear(kWidth, kWidth));
          net->push_back(torch::nn::Tanh());
        }
        net->to(at::kDouble);
        fully_shard(*net, mesh, {.reshard_after_forward = reshard});
        const at::Tensor x = leaf(randn({5, kWidth}, at::kDouble),
                                  ShardSpec(mesh, {5, kWidth}, {Shard(0)}, {{0, {3, 2}}}));
        const auto together = [&](const std::function<void()>& f) {
          mesh.all().barrier();
          if (manager.rank() == 0) f();
          mesh.all().barrier();
        };
        for (int step = 0; step < 3; ++step) {
          // The buffer of a weight and its bias, with its padding: nothing else has its size.
          together([&] {
            allocator.watched =
                detail::plan_flat({{kWidth, kWidth}, {kWidth, 1}}, kRanks).numel() * sizeof(double);
            allocator.most = 0;
          });
          const at::Tensor loss = net->forward(x).square().mean();
          const int kept = reshard ? 1 : layers;
          together([&] {
            EXPECT_EQ(allocator.live, kept * kRanks) << step;
            if (step > 0) {
              EXPECT_EQ(allocator.most, (reshard ? 2 : layers) * kRanks) << step;
            }
            allocator.most = 0;
          });
          loss.backward();
          together([&] {
            EXPECT_EQ(allocator.live, 0) << step;
            if (step > 0) {
              EXPECT_LE(allocator.most, (reshard ? 2 : 0) * kRanks) << step;
            }
            allocator.watched = ~std::size_t{0};
          });
          net->zero_grad();
        }
      });
    }
  }
}

TEST(FullyShard, PeakIsOwnShardsTwoGatheredUnitsAndActivationsToTheByte) {
  constexpr std::int64_t kWidth = 64;
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(double));
  const ByteCounter bytes;
  for (const int ranks : {2, 3}) {
    for (const int layers : {4, 7}) {
      on_threads(ranks, [&](DistributedManager& manager) {
        const int rank = manager.rank();
        const auto mesh = manager.mesh({{"x", ranks}});
        Sequential net;
        for (int i = 0; i < layers; ++i)
          net->push_back(Linear(LinearOptions(kWidth, kWidth).bias(false)));
        net->to(at::kDouble);
        // A count of rows of its own on each rank.
        const std::int64_t rows = 2 + rank;
        const at::Tensor x = from_local(randn({rows, kWidth}, at::kDouble), mesh, {Shard(0)});
        const std::int64_t result = rows * kWidth * kElement;
        const detail::FlatPlan plan = detail::plan_flat({{kWidth, kWidth}}, ranks);
        const std::int64_t unit = plan.numel() * kElement,
                           shards = layers * plan.sizes()[rank] * kElement;
        ByteCounter::count_as(rank);
        fully_shard(*net, mesh);
        for (int step = 0; step < 4; ++step) {
          const std::string where = concat(ranks, " ranks, ", layers, " layers, step ", step);
          const std::int64_t before = bytes.live(rank);
          EXPECT_EQ(before, shards) << where;
          {
            const at::NoGradGuard no_grad;
            bytes.restart(rank);
            (void)net->forward(x);
            // What a layer takes and makes. The order of an evaluation is that of a forward, once
            // one is learnt.
            if (step > 0) {
              EXPECT_EQ(bytes.most(rank) - before, 2 * unit + 2 * result) << where;
            }
          }
          release_parameters(*net);
          bytes.restart(rank);
          const at::Tensor y = net->forward(x);
          // With the last layer but one: its result, and what all before it have made.
          if (step > 0) {
            EXPECT_EQ(bytes.most(rank) - before, 2 * unit + (layers - 1) * result) << where;
          }
          bytes.restart(rank);
          y.square().mean().backward();
          // A gradient of a unit that is made, one that travels, and what of each is kept.
          if (step > 0) {
            EXPECT_LE(bytes.most(rank) - before, 4 * unit + shards + (layers + 4) * result)
                << where;
          }
          net->zero_grad();
        }
        ByteCounter::count_as(-1);
      });
    }
  }
}

TEST(FullyShard, HoldsTheGradientsOfAQuarterOfAUnit) {
  constexpr int kRanks = 2, kLayers = 12;
  constexpr std::int64_t kWidth = 128;
  SizeCounter allocator;
  on_threads(kRanks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", kRanks}});
    const auto make = [&] {
      torch::nn::ModuleList all;
      for (int unit = 0; unit < 2; ++unit) {
        Sequential layers;
        for (int i = 0; i < kLayers; ++i)
          layers->push_back(Linear(LinearOptions(kWidth, kWidth).bias(false)));
        all->push_back(layers);
      }
      all->to(at::kDouble);
      fill(*all, 5);
      const at::NoGradGuard no_grad;
      for (const auto& p : all->parameters()) p.mul_(0.2);
      return all;
    };
    const auto loss_on = [](torch::nn::ModuleList& net, at::Tensor h) {
      for (std::size_t unit = 0; unit < 2; ++unit)
        h = net->ptr<torch::nn::SequentialImpl>(unit)->forward(h);
      return h.square().mean();
    };
    torch::nn::ModuleList net = make(), expected = make();
    fully_shard(*net, mesh);
    const auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); i += 3) {
      std::int64_t rows = 0;
      for (std::size_t p = i; p < i + 3; ++p) rows += to_local(parameters[p].detach()).size(0);
      EXPECT_EQ(rows, 3 * kWidth / kRanks) << "each rank keeps as much of a message";
    }
    const auto together = [&](const std::function<void()>& f) {
      mesh.all().barrier();
      if (manager.rank() == 0) f();
      mesh.all().barrier();
    };
    const at::Tensor x = randn({3, kWidth}, at::kDouble);
    const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
    loss_on(expected, x).backward();
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      const at::Tensor loss = loss_on(net, mine);
      const CommTraceScope trace(manager);
      // A full gradient of one weight.
      together([&] {
        allocator.watched = kWidth * kWidth * sizeof(double);
        allocator.most = 0;
      });
      loss.backward();
      together([&] {
        EXPECT_LE(allocator.most, 4 * kRanks) << "three of a message, and one that is made";
        EXPECT_EQ(allocator.live, 0) << allocator.who();
        allocator.watched = ~std::size_t{0};
      });
      EXPECT_EQ(calls_of(*trace)["reduce_scatter"].first, 2 * 4) << trace->table();
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

TEST(FullyShard, LearnsFromEvaluationAlone) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const bool tied : {false, true}) {
      Net net = net_of({.tied = tied}), expected = net_of({.tied = tied});
      fully_shard(*net, mesh, {.coalesce_bytes = 0});
      const at::NoGradGuard no_grad;
      const at::Tensor x = randn({5, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)}), y = expected->forward(x);
      for (int pass = 0; pass < 6; ++pass) EXPECT_LT(difference(net->forward(mine), y), 1e-11);
      const CommTraceScope trace(manager);
      net->forward(mine);
      std::vector<CommEvent> gathers;
      for (const CommEvent& e : trace->events()) {
        if (e.operation == "all_gather") gathers.push_back(e);
      }
      std::ranges::sort(gathers, [](const auto& a, const auto& b) { return a.begin < b.begin; });
      // The root's first and last layers are one use where one forward goes into the next.
      ASSERT_GE(gathers.size(), 4u) << trace->table();
      EXPECT_LE(gathers.size(), 5u) << trace->table();
      int ahead = 0;
      for (std::size_t i = 1; i < gathers.size(); ++i)
        ahead += gathers[i].begin < gathers[i - 1].end;
      EXPECT_GE(ahead, 3) << "each starts before the one before it has been waited for";
    }
  });
}

TEST(FullyShard, GathersByHand) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({}), expected = net_of({});
    EXPECT_THROW(gather_parameters(*net), InvalidArgument);
    fully_shard(*net, mesh);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const CommTraceScope trace(manager);
      gather_parameters(*net);
      std::vector<at::Tensor> losses;
      // Several micro-batches, forward and backward in turn.
      for (int part = 0; part < 3; ++part) {
        const at::Tensor x = randn({4, 5}, at::kDouble);
        const std::optional<NoSync> scope = part < 2 ? std::optional(no_sync(*net)) : std::nullopt;
        loss_of(net->forward(distribute_tensor(x, mesh, {Shard(0)}))).backward();
        loss_of(expected->forward(x)).backward();
      }
      release_parameters(*net);
      EXPECT_EQ(calls_of(*trace)["all_gather"].first, 4) << trace->table();
      expect_same(*net, *expected, concat("step ", step));
      const at::NoGradGuard no_grad;
      for (const auto& p : net->parameters()) p.mul_(1.1);
      for (const auto& p : expected->parameters()) p.mul_(1.1);
    }
  });
}

TEST(FullyShard, SeesWhatIsWrittenToParameters) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (const bool reshard : {true, false}) {
      Net net = net_of({.blocks = 1}), expected = net_of({.blocks = 1});
      fully_shard(*net, mesh, {.units = {"first"}, .reshard_after_forward = reshard});
      const at::Tensor x = randn({5, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      const auto compare = [&](const std::string& what) {
        EXPECT_LT(difference(net->forward(mine), expected->forward(x)), 1e-11) << what;
      };
      for (int step = 0; step < 2; ++step) {
        {
          const at::NoGradGuard no_grad;
          compare("at first");
          for (const auto& p : net->parameters()) p.add_(0.1);
          for (const auto& p : expected->parameters()) p.add_(0.1);
          compare("in place");
          for (auto& p : net->parameters()) p.data().mul_(0.9);
          for (auto& p : expected->parameters()) p.data().mul_(0.9);
          compare("through .data");
        }
        // Forwards without a backward, as of a validation that forgot no_grad.
        compare("with gradients");
        const at::NoGradGuard no_grad;
        for (const auto& p : net->parameters()) to_local(p.detach()).mul_(0.5);
        for (const auto& p : expected->parameters()) p.mul_(0.5);
        release_parameters(*net);
        compare("through locals");
        const at::AutoGradMode grad(true);
        loss_of(net->forward(mine)).backward();
      }
    }
  });
}

TEST(FullyShard, OneUnitSeesWhatIsWritten) {
  // What is used last is what is used first, and nothing tells where one forward ends.
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Linear net(4, 3), expected(4, 3);
    net->to(at::kDouble);
    expected->to(at::kDouble);
    fill(*net, 3);
    fill(*expected, 3);
    fully_shard(*net, mesh);
    const at::Tensor x = randn({5, 4}, at::kDouble);
    const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
    const auto halve = [](torch::nn::Module& m, bool locals) {
      const at::NoGradGuard no_grad;
      for (const auto& p : m.parameters()) (locals ? to_local(p.detach()) : p).mul_(0.5);
    };
    for (int step = 0; step < 6; ++step) {
      const bool trained = step >= 2;
      const at::Tensor wanted = expected->forward(x), got = net->forward(mine);
      EXPECT_LT(difference(got, wanted), 1e-11) << step;
      if (trained && step % 2 == 0) {
        net->zero_grad();
        expected->zero_grad();
        wanted.square().mean().backward();
        got.square().mean().backward();
        expect_same(*net, *expected, concat("step ", step));
      }
      // Past the operators, as an optimizer of the user's own may: after a backward.
      halve(*net, trained && step % 2 == 0);
      halve(*expected, false);
    }
  });
}

}  // namespace tessera::test::fully_shard_gathers_test
