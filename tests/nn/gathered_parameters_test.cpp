// Sharded parameters that are gathered where they are used (fully sharded data parallelism).

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sharded_parameters.h"
#include "size_counter.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"

namespace tessera::test::sharded_parameters_test {

namespace {

torch::nn::Sequential deep(int layers, std::int64_t width) {
  torch::nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

}  // namespace

TEST(FullySharded, TrainsLikeOneProcessForAnyDimAndSizes) {
  for (const auto& axes : std::vector<std::vector<Axis>>{{{"x", 1}},
                                                         {{"x", 2}},
                                                         {{"x", 3}},
                                                         {{"x", 4}},
                                                         {{"r", 2}, {"x", 2}},
                                                         {{"x", 2}, {"r", 2}}}) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_ranks(ranks, [&](DistributedManager& manager) {
      // Nothing but parameters may move by itself.
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh(test::mapped(axes));
      const int axis = mesh.mesh().index("x"), parts = axes[axis].size;
      Draw draw(3);
      for (int round = 0; round < 6; ++round) {
        const auto make = [] {
          return torch::nn::Sequential(torch::nn::Linear(4, 7), torch::nn::Tanh(),
                                       torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})),
                                       torch::nn::Linear(7, 3));
        };
        auto net = prepared(make()), expected = prepared(make());
        distribute_module(
            *net, mesh,
            [&](const std::string&, const at::Tensor& t) -> std::optional<ParameterPlacement> {
              const int d = draw.below(static_cast<int>(t.dim()));
              std::vector<Placement> placements(axes.size());
              placements[axis] = Shard(d);
              return ParameterPlacement{placements, {{d, draw.sizes(t.size(d), parts)}}};
            },
            {.first_bucket_bytes = draw.chance(50) ? 1 : 1 << 20, .bucket_bytes = 300});
        torch::optim::AdamW opt(net->parameters(), 0.01),
            expected_opt(expected->parameters(), 0.01);
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = randn({6, 4}, at::kDouble);
          expected_opt.zero_grad();
          opt.zero_grad();
          const ShardSpec lies(mesh, {6, 4}, std::vector<Placement>(axes.size(), Shard(0)),
                               {{0, draw.sizes(6, ranks)}});
          for (int part = 0; part < 2; ++part) {
            expected->forward(x).square().mean().backward();
            const std::optional<NoSync> scope =
                part == 0 && step == 1 ? std::optional(no_sync(*net)) : std::nullopt;
            net->forward(leaf(x, lies)).square().mean().backward();
          }
          torch::nn::utils::clip_grad_norm_(expected->parameters(), 0.3);
          torch::nn::utils::clip_grad_norm_(net->parameters(), 0.3);
          expected_opt.step();
          opt.step();
        }
        expect_alike(*net, *expected, concat("round ", round, " on ", ranks));
      }
    });
  }
}

TEST(FullySharded, NoParameterStaysGatheredLongerThanItsUse) {
  // Ranks share the process, so that what lives of all of them is counted.
  constexpr int kRanks = 3, kLayers = 5;
  constexpr std::int64_t kWidth = 96;
  SizeCounter allocator;
  on_threads(kRanks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", kRanks}});
    auto net = prepared(deep(kLayers, kWidth));
    distribute_module(*net, mesh, {{"*.weight", {{Shard(0)}, {{0, {50, 0, 46}}}}}},
                      {.first_bucket_bytes = 1, .bucket_bytes = 1});
    const at::Tensor x = leaf(randn({7, kWidth}, at::kDouble),
                              ShardSpec(mesh, {7, kWidth}, {Shard(0)}, {{0, {3, 2, 2}}}));
    const auto together = [&](const std::function<void()>& f) {
      mesh.all().barrier();
      if (manager.rank() == 0) f();
      mesh.all().barrier();
    };
    together([&] { allocator.watched = kWidth * kWidth * sizeof(double); });
    const at::Tensor loss = net->forward(x).square().mean();
    together([&] {
      EXPECT_EQ(allocator.live, 0) << "saved for backward: the parts alone\n" << allocator.who();
      EXPECT_GE(allocator.most, 1) << "something was gathered at all";
      EXPECT_LE(allocator.most, 2 * kRanks) << "one a rank, and what arrived while it is laid out";
      allocator.most = 0;
    });
    loss.backward();
    together([&] {
      EXPECT_EQ(allocator.live, 0);
      // A gathered weight, its gradient, what is packed of it, and one more bucket under way:
      // whatever the number of layers.
      EXPECT_LE(allocator.most, 4 * kRanks);
      allocator.watched = ~std::size_t{0};
    });
  });
}

TEST(FullySharded, MovesNoMoreThanItMust) {
  on_ranks(4, [](DistributedManager& manager) {
    constexpr int kLayers = 3, kWidth = 8;
    const auto mesh = manager.mesh({{"x", 4}});
    auto net = prepared(deep(kLayers, kWidth));
    const Sizes rows{3, 0, 1, 4};
    distribute_module(*net, mesh, {{"*", {{Shard(0)}, {{0, rows}}}}});
    const at::Tensor x = distribute_tensor(randn({5, kWidth}, at::kDouble), mesh, {Shard(0)});
    const CommTraceScope trace(manager);
    net->forward(x).square().mean().backward();
    auto moved = counts(*trace);
    // Each weight is gathered once forward, and once backward where an input's gradient is asked
    // for: the first one's is not.
    const std::int64_t mine = rows[manager.rank()] * kWidth * 8, whole = kWidth * kWidth * 8;
    EXPECT_EQ(moved["all_gather"].calls, 2 * kLayers - 1) << trace->table();
    EXPECT_EQ(moved["all_gather"].bytes, (2 * kLayers - 1) * mine);
    // One bucket, that is, one message of all gradients.
    EXPECT_EQ(moved["reduce_scatter"].calls, 1);
    EXPECT_EQ(moved["reduce_scatter"].bytes, kLayers * whole);
    EXPECT_EQ(moved.size(), 2u) << trace->table();
  });
}

TEST(FullySharded, OnOneAxisAndReplicatedOnAnother) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"replica", 2}, {"shard", 2}});
    auto net = prepared(deep(2, 6)), expected = prepared(deep(2, 6));
    distribute_module(*net, mesh, {{"*.weight", {{Replicate(), Shard(1)}, {{1, {5, 1}}}}}});
    const at::Tensor x = randn({7, 6}, at::kDouble);
    expected->forward(x).square().mean().backward();
    const CommTraceScope trace(manager);
    net->forward(distribute_tensor(x, mesh, {Shard(0), Shard(0)}, {{0, {3, 0, 2, 2}}}))
        .square()
        .mean()
        .backward();
    std::map<std::string, int> calls;
    const auto summary = trace->summary();
    for (const CommSummary& s : summary)
      calls[s.operation + " " + s.group] += static_cast<int>(s.count);
    expect_alike(*net, *expected, "two axes");
    const std::string shard = mesh.group("shard").name(), replica = mesh.group("replica").name();
    EXPECT_EQ(calls, (std::map<std::string, int>{{"all_gather " + shard, 3},
                                                 {"reduce_scatter " + shard, 1},
                                                 {"all_reduce " + replica, 1}}))
        << trace->table();
    for (const CommSummary& s : summary) {
      if (s.operation == "all_reduce") {
        EXPECT_EQ(s.bytes, 2 * 6 * (manager.rank() % 2 == 0 ? 5 : 1) * 8) << "the part alone";
      }
    }
  });
}

TEST(FullySharded, UnderDistributedDataParallel) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"replica", 2}, {"shard", 2}});
    const int replica = manager.rank() / 2;
    // this replica's ranks
    const DeviceMesh own(mesh.mesh().submesh({"shard"}, manager.rank()), manager);
    auto net = prepared(deep(2, 6), 7 + 100 * replica), expected = prepared(deep(2, 6));
    distribute_module(*net, own, {{"0.weight", {{Shard(0)}, {{0, {5, 1}}}}}});
    // parameters are broadcast from the first replica
    DistributedDataParallel ddp(net, mesh.group("replica"));
    torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      // five samples for the first replica, three for the other
      const at::Tensor x = randn({8, 6}, at::kDouble);
      expected_opt.zero_grad();
      expected->forward(x).square().mean().backward();
      expected_opt.step();
      const at::Tensor mine = replica == 0 ? x.narrow(0, 0, 5) : x.narrow(0, 5, 3);
      opt.zero_grad();
      ddp.mean_loss(full_tensor(ddp(distribute_tensor(mine, own, {Shard(0)})).square().mean()),
                    static_cast<double>(mine.size(0)))
          .backward();
      opt.step();
    }
    expect_alike(*net, *expected, "replicas");
  });
}

}  // namespace tessera::test::sharded_parameters_test
