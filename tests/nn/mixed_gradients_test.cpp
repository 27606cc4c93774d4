// Modules whose parts are parallel in different ways: each gradient is that of one process, or the
// mix is refused.
#include "support.h"
#include "tessera/gradient/step_weight.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/schedule/generators.h"

namespace tessera::test::mixed_gradients_test {

namespace {

// `in` is run as a plain module, `out` on sharded tensors, or the other way round.
struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl() {
    in = register_module("in", torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::Tanh(),
                                                     torch::nn::Linear(5, 6)));
    out = register_module(
        "out", torch::nn::Sequential(torch::nn::Tanh(), torch::nn::Linear(6, 4),
                                     torch::nn::LayerNorm(torch::nn::LayerNormOptions({4}))));
    to(at::kDouble);
    fill(*this, 23);
  }
  at::Tensor forward(const at::Tensor& x) { return out->forward(in->forward(x)); }
  torch::nn::Sequential in{nullptr}, out{nullptr};
};
TORCH_MODULE(TwoParts);

void expect_like(torch::nn::Module& got, torch::nn::Module& expected, const std::string& where) {
  const auto a = got.named_parameters(), b = expected.named_parameters();
  for (const auto& item : b) {
    ASSERT_TRUE(a[item.key()].grad().defined()) << where << " " << item.key();
    EXPECT_LT(difference(a[item.key()].grad(), item.value().grad()), 1e-11)
        << where << " gradient of " << item.key();
    EXPECT_LT(difference(a[item.key()], item.value()), 1e-11) << where << " " << item.key();
  }
}

at::Tensor rows_of_rank(const at::Tensor& x, const Sizes& sizes, int rank) {
  std::int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += sizes[r];
  return x.narrow(0, begin, sizes[rank]);
}

// A batch on every rank alike, and how its rows are spread: often unevenly, often to some alone.
struct Batch {
  at::Tensor x, y;
  Sizes sizes;
};
Batch draw_batch(Draw& draw, int ranks) {
  const std::int64_t n = 1 + draw.below(9);
  Batch b{randn({n, 3}, at::kDouble), randn({n, 4}, at::kDouble), draw.sizes(n, ranks)};
  return b;
}

}  // namespace

// The plain part sees each rank's rows, the rest one sharded tensor.
TEST(MixedGradients, DataParallelSubModuleBeforeShardedTensors) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", ranks}}));
      const int me = mesh.coordinate()[0];
      Draw draw(ranks);
      for (int round = 0; round < 6; ++round) {
        const bool overlap = draw.chance(60), view = draw.chance(40);
        const std::int64_t bytes = draw.chance(50) ? 1 : 1 << 20;
        TwoParts net, expected;
        distribute_module(*net->out, mesh);
        DistributedDataParallel ddp(
            net->in, manager.world(),
            {.reducer = {bytes, bytes, overlap, view}, .reduction = ReduceOp::sum});
        for (int step = 0; step < 4; ++step) {
          const Batch b = draw_batch(draw, ranks);
          const auto backward = [&] {
            const at::Tensor h = ddp(rows_of_rank(b.x, b.sizes, me));
            torch::mse_loss(net->out->forward(from_local(h, mesh, {Shard(0)}, {{0, b.sizes}})),
                            distribute_tensor(b.y, mesh, {Shard(0)}, {{0, b.sizes}}))
                .backward();
          };
          torch::mse_loss(expected(b.x), b.y).backward();
          if (step == 1) {
            const auto scope = no_sync(*net);
            backward();
          } else {
            backward();
            expect_like(*net, *expected, concat("round ", round, " step ", step));
          }
          if (step == 2) {
            net->zero_grad();
            expected->zero_grad();
          }
        }
      }
    });
  }
}

TEST(MixedGradients, AMeanOfPartialSumsIsRefusedAndTheGroupsGoOn) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", ranks}}));
      TwoParts net, expected;
      distribute_module(*net->out, mesh);
      seed(3);
      const at::Tensor x = randn({2, 3}, at::kDouble);
      const auto loss = [&](torch::nn::Sequential& in) {
        return net->out->forward(from_local(in->forward(x), mesh, {Shard(0)})).square().sum();
      };
      {
        const DistributedDataParallel mean(net->in, manager.world());
        if (ranks == 1) {
          loss(net->in).backward();
          return;
        }
        for (const bool paused : {false, true}) {
          const auto scope = paused ? std::optional(no_sync(*net)) : std::nullopt;
          try {
            loss(net->in).backward();
            ADD_FAILURE() << "the gradient would be too small by the number of ranks";
          } catch (const GradientError& e) {
            EXPECT_NE(std::string(e.what()).find("ReduceOp::sum"), std::string::npos) << e.what();
          }
          net->zero_grad();
        }
        // What is not accumulated is not looked at, nor is what another loss reaches.
        torch::autograd::grad({loss(net->in)}, {net->in->parameters()[0]});
        (net->in->forward(x).sum() +
         full_tensor(net->out->forward(from_local(at::ones({2, 6}, at::kDouble).requires_grad_(),
                                                  mesh, {Shard(0)})))
             .sum())
            .backward();
        net->zero_grad();
      }
      const DistributedDataParallel sum(net->in, manager.world(), {.reduction = ReduceOp::sum});
      loss(net->in).backward();
      for (int r = 0; r < ranks; ++r) expected(x).square().sum().backward();
      expect_like(*net, *expected, "summed");
    });
  }
}

// Where locals are replicated on one axis, their gradient is complete there.
TEST(MixedGradients, OnTwoAxesTheUserWeightsWhatIsSummedAndWhatIsComplete) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh(mapped({{"data", 2}, {"copy", 2}}));
    const int row = mesh.coordinate()[0];
    seed(9);
    const at::Tensor x = randn({5, 3}, at::kDouble);
    const auto loss = [&](TwoParts& net) {
      const at::Tensor h = net->in->forward(row == 0 ? x.narrow(0, 0, 4) : x.narrow(0, 4, 1));
      return net->out->forward(from_local(h, mesh, {Shard(0), Replicate()}, {{0, {4, 1}}}))
          .square()
          .sum();
    };
    TwoParts expected;
    expected(x).square().sum().backward();
    struct Case {
      Group group;
      ReduceOp reduction;
      bool right;
    };
    for (const Case& c :
         {Case{manager.world(), ReduceOp::avg, false}, Case{manager.world(), ReduceOp::sum, false},
          Case{manager.world(), ReduceOp::premultiplied(0.5), true},
          Case{mesh.group("data"), ReduceOp::avg, false},
          Case{mesh.group("data"), ReduceOp::sum, true}}) {
      TwoParts net;
      distribute_module(*net->out, mesh);
      const DistributedDataParallel ddp(net->in, c.group, {.reduction = c.reduction});
      if (c.right) {
        loss(net).backward();
        expect_like(*net, *expected, to_string(c.reduction.kind));
      } else {
        EXPECT_THROW(loss(net).backward(), GradientError);
      }
    }
  });
}

// A plain parameter that sharded tensors take as a replicated one.
TEST(MixedGradients, ASumOfCompleteGradientsIsRefused) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh(mapped({{"data", 3}}));
    seed(9);
    const at::Tensor x = randn({5, 3}, at::kDouble);
    const auto loss = [&](TwoParts& net) {
      return net(distribute_tensor(x, mesh, {Shard(0)}, {{0, {3, 0, 2}}})).square().sum();
    };
    for (const auto& reduction : {ReduceOp::avg, ReduceOp::sum, ReduceOp::premultiplied(1.0 / 3)}) {
      TwoParts net, expected;
      const DistributedDataParallel ddp(net, manager.world(), {.reduction = reduction});
      if (reduction == ReduceOp::sum) {
        EXPECT_THROW(loss(net).backward(), GradientError);
        net->zero_grad();
      } else {
        expected(x).square().sum().backward();
        loss(net).backward();
        expect_like(*net, *expected, to_string(reduction.kind));
      }
    }
    // Both in one parameter: no reduction is right.
    TwoParts net;
    const DistributedDataParallel ddp(net, manager.world(),
                                      {.reduction = ReduceOp::premultiplied(1.0 / 3)});
    EXPECT_THROW((loss(net) + from_local(net(x), mesh, {Shard(0)}).sum()).backward(),
                 GradientError);
    // Each of them alone goes on after that; in two micro-batches they are both again.
    for (const bool partial : {true, false}) {
      net->zero_grad();
      (partial ? from_local(net(x), mesh, {Shard(0)}).sum() : loss(net)).backward();
    }
    net->zero_grad();
    const auto scope = no_sync(*net);
    loss(net).backward();
    EXPECT_THROW(from_local(net(x), mesh, {Shard(0)}).sum().backward(), GradientError);
  });
}

// The other way round: what sharded tensors leave here goes through a plain part.
TEST(MixedGradients, DataParallelSubModuleBehindShardedTensors) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", ranks}}));
      const int me = mesh.coordinate()[0];
      Draw draw(5);
      for (int round = 0; round < 4; ++round) {
        for (const auto& reduction : {ReduceOp::sum, ReduceOp::avg}) {
          TwoParts net, expected;
          distribute_module(*net->in, mesh);
          DistributedDataParallel ddp(net->out, manager.world(), {.reduction = reduction});
          const Batch b = draw_batch(draw, ranks);
          const at::Tensor h =
              to_local(net->in->forward(distribute_tensor(b.x, mesh, {Shard(0)}, {{0, b.sizes}})));
          const at::Tensor loss =
              ddp.mean_loss(torch::mse_loss(ddp(h), rows_of_rank(b.y, b.sizes, me)),
                            static_cast<double>(b.sizes[me]));
          if (ranks > 1 && reduction == ReduceOp::avg) {
            EXPECT_THROW(loss.backward(), GradientError);
            continue;
          }
          loss.backward();
          torch::mse_loss(expected(b.x), b.y).backward();
          expect_like(*net, *expected, concat("round ", round));
        }
      }
    });
  }
}

// A wrapper over replicas of a module of which parts are sharded, on ranks of another axis.
TEST(MixedGradients, DataParallelAroundShardedParametersWithOneNoSync) {
  for (const bool mixed : {false, true}) {
    for (const Sizes& rows : {Sizes{5, 1}, Sizes{0, 6}}) {
      on_ranks(4, [&](DistributedManager& manager) {
        const auto mesh = manager.mesh(mapped({{"replica", 2}, {"shard", 2}}));
        const int replica = mesh.coordinate()[0];
        const DeviceMesh own(mesh.mesh().submesh({"shard"}, manager.rank()), manager);
        TwoParts net, expected;
        // `out` alone sees sharded data if mixed, and is used last: backward meets it first.
        const NamedPlacements where{{"*1.weight", {{Shard(1)}, {{1, rows}}}}};
        if (mixed) {
          distribute_module(*net->out, own, where);
        } else {
          distribute_module(
              *net, own,
              {{"out.1.weight", where[0].second}, {"in.2.weight", {{Shard(0)}, {{0, rows}}}}});
        }
        DistributedDataParallel ddp(net, mesh.group("replica"));
        torch::optim::Adam opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
        const auto backward = [&](const at::Tensor& x) {
          const at::Tensor mine = replica == 0 ? x.narrow(0, 0, 5) : x.narrow(0, 5, 3);
          const at::Tensor y =
              mixed ? net->out->forward(distribute_tensor(net->in->forward(mine), own, {Shard(0)},
                                                          {{0, {mine.size(0), 0}}}))
                    : ddp(distribute_tensor(mine, own, {Shard(0)}));
          ddp.mean_loss(full_tensor(y.square().mean()), static_cast<double>(mine.size(0)))
              .backward();
          expected(x).square().mean().backward();
        };
        for (int step = 0; step < 3; ++step) {
          opt.zero_grad();
          expected_opt.zero_grad();
          {
            const auto scope = no_sync(*net);
            backward(randn({8, 3}, at::kDouble));
            backward(randn({8, 3}, at::kDouble));
          }
          if (step < 2) {
            backward(randn({8, 3}, at::kDouble));
          } else {
            ddp.reduce();
          }
          expect_like(*net, *expected, concat("step ", step, mixed ? " mixed" : ""));
          if (step == 0) {
            backward(randn({8, 3}, at::kDouble));  // onto what is reduced
            expect_like(*net, *expected, "a second backward");
          }
          opt.step();
          expected_opt.step();
        }
      });
    }
  }
}

// Ranks that were placed for their traffic: a domain is inside a host, its replicas are elsewhere.
TEST(MixedGradients, ReplicasOfADomainOnTheMeshOfAPlacement) {
  on_ranks(4, [](DistributedManager& manager) {
    ProcessGroupConfig config;
    config.add_node({.name = "replica", .size = 2}, "world");
    config.add_node({.name = "domain"}, "world");
    const auto topology = Topology::uniform(2, 2);
    manager.create_process_groups(
        config, topology,
        {{.axes = {"domain"}, .bytes = 1e9}, {.axes = {"replica"}, .bytes = 1e3}});
    const DeviceMesh mesh = manager.mesh("world"),
                     domain(mesh.mesh().submesh({"domain"}, manager.rank()), manager);
    const auto& near = domain.mesh().ranks();
    ASSERT_EQ(topology.host_of(near[0]), topology.host_of(near[1]));
    ASSERT_FALSE(std::ranges::is_sorted(mesh.mesh().ranks()));
    const auto make = [] {
      const auto conv = [](int in, int out) {
        return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
      };
      torch::nn::Sequential net(conv(2, 3), torch::nn::Tanh(), conv(3, 1));
      net->to(at::kDouble);
      fill(*net, 5);
      return net;
    };
    auto net = make(), expected = make();
    distribute_module(*net, domain);
    DistributedDataParallel ddp(net, manager.group("replica"));
    const Sizes samples{2, 1};
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({3, 2, 7, 4}, at::kDouble);
      const int replica = mesh.coordinate()[mesh.mesh().index("replica")];
      const at::Tensor mine = rows_of_rank(x, samples, replica);
      const at::Tensor y = ddp(distribute_tensor(mine, domain, {Shard(2)}, {{2, {5, 2}}}));
      EXPECT_LT(difference(y, expected->forward(mine)), 1e-12);
      ddp.mean_loss(full_tensor(y.square().mean()), static_cast<double>(mine.size(0))).backward();
      expected->forward(x).square().mean().backward();
      expect_like(*net, *expected, concat("step ", step));
    }
  });
}

TEST(MixedGradients, WrappingWhatIsShardedOverTheSameRanksIsRefused) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh(mapped({{"x", 2}}));
    TwoParts net;
    distribute_module(*net->out, mesh, {{"1.weight", {{Shard(0)}}}});
    const at::Tensor before = to_local(net->out->parameters()[0]).clone();
    EXPECT_THROW(DistributedDataParallel(net, manager.world()), ShardingError);
    EXPECT_TRUE(to_local(net->out->parameters()[0]).equal(before)) << "another rank's shard";
    const DistributedDataParallel without(net, manager.world(), {.ignore = {"out.1.weight"}});
    TwoParts other;
    distribute_module(*other->out, mesh);
    EXPECT_THROW(DistributedDataParallel(other, manager.world(), {.reduction = ReduceOp::sum}),
                 ShardingError)
        << "complete gradients, twice";
    EXPECT_THROW(DistributedDataParallel(other, manager.world(), {.reduction = ReduceOp::max}),
                 InvalidArgument);
    TwoParts third;
    const DistributedDataParallel first(third->in, manager.world());
    EXPECT_THROW(distribute_module(*third, mesh), ShardingError);
    EXPECT_FALSE(is_sharded(third->out->parameters()[0]));
  });
}

// One sub-module data-parallel, another one fully sharded, micro-batches of any sizes, one
// optimizer and one clip.
TEST(MixedGradients, TrainLikeOneProcessOverRaggedMicroBatches) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", ranks}}));
      const int me = mesh.coordinate()[0];
      Draw draw(40 + ranks);
      TwoParts net, expected;
      distribute_module(*net->out, mesh,
                        {{"1.weight", {{Shard(0)}, {{0, draw.sizes(4, ranks)}}}},
                         {"*.bias", {{Shard(0)}, {{0, draw.sizes(4, ranks)}}}}});
      DistributedDataParallel ddp(net->in, manager.world(), {.reduction = ReduceOp::sum});
      torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
      StepWeight weight(manager.world());
      for (int step = 0; step < 4; ++step) {
        opt.zero_grad();
        expected_opt.zero_grad();
        std::vector<at::Tensor> all_x, all_y;
        const int micro = 1 + step % 3;
        for (int k = 0; k < micro; ++k) {
          const Batch b = draw_batch(draw, ranks);
          all_x.push_back(b.x), all_y.push_back(b.y);
          const auto scope = k + 1 < micro ? std::optional(no_sync(*net)) : std::nullopt;
          const at::Tensor h = ddp(rows_of_rank(b.x, b.sizes, me));
          const at::Tensor loss =
              torch::mse_loss(net->out->forward(from_local(h, mesh, {Shard(0)}, {{0, b.sizes}})),
                              distribute_tensor(b.y, mesh, {Shard(0)}, {{0, b.sizes}}));
          weight.weigh_global(loss, static_cast<double>(b.x.size(0))).backward();
        }
        const double mean = weight.finish(net->parameters());
        const at::Tensor reference = torch::mse_loss(expected(at::cat(all_x)), at::cat(all_y));
        reference.backward();
        EXPECT_NEAR(mean, reference.item<double>(), 1e-12);
        expect_like(*net, *expected, concat("step ", step));
        const double norm = clip_gradients(net->parameters(), manager.world(), {.max_norm = 0.3}),
                     same = clip_gradients(expected->parameters(), Group(), {.max_norm = 0.3});
        EXPECT_NEAR(norm, same, 1e-11);
        opt.step();
        expected_opt.step();
      }
    });
  }
}

// A loss that all ranks share, of plain parameters that are averaged: their gradients are complete
// already.
TEST(MixedGradients, AStepOfCompleteGradientsThatAreAveraged) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", ranks}}));
      Draw draw(60 + ranks);
      TwoParts net, expected;
      const DistributedDataParallel ddp(net, manager.world());
      StepWeight weight(manager.world());
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        expected->zero_grad();
        std::vector<at::Tensor> all;
        for (int k = 0; k <= step; ++k) {
          const Batch b = draw_batch(draw, ranks);
          all.push_back(b.x);
          const auto scope = k < step ? std::optional(no_sync(*net)) : std::nullopt;
          const at::Tensor x = distribute_tensor(b.x, mesh, {Shard(0)}, {{0, b.sizes}});
          weight.weigh_global(net(x).square().mean(), static_cast<double>(b.x.size(0))).backward();
        }
        weight.finish(net->parameters());
        expected(at::cat(all)).square().mean().backward();
        expect_like(*net, *expected, concat("step ", step, " on ", ranks));
      }
      if (ranks == 1) return;
      // Beside a loss of each rank's own no one factor is right.
      net->zero_grad();
      const at::Tensor x = at::ones({ranks, 3}, at::kDouble);
      {
        const auto scope = no_sync(*net);
        weight.weigh(net(x).square().mean(), 1).backward();
      }
      weight.weigh_global(net(distribute_tensor(x, mesh, {Shard(0)})).square().mean(), 1)
          .backward();
      EXPECT_THROW(weight.finish(net->parameters()), GradientError);
    });
  }
}

// A stage that is wrapped over the ranks of another axis than the one along which samples differ.
TEST(MixedGradients, APipelineRefusesGradientsOfOtherRanks) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh(mapped({{"data", 2}, {"copy", 2}, {"pipe", 1}}));
    seed(7);
    const PipelineBatch batch =
        split_batch({randn({4, 3}, at::kDouble)}, {randn({4, 3}, at::kDouble)}, 2);
    for (const ReduceOp op : {ReduceOp::avg, ReduceOp::sum}) {
      for (const std::string axis : {"copy", "data"}) {
        torch::nn::Sequential net(torch::nn::Linear(3, 3));
        net->to(at::kDouble);
        const DistributedDataParallel ddp(net, mesh.group(axis), {.reduction = op});
        Pipeline pipeline(mesh, "pipe", schedule_gpipe(loop_placement(1), 2), {make_stage(net)},
                          [](const auto& y, const auto& t) { return torch::mse_loss(y[0], t[0]); },
                          {.sample_axes = std::vector<std::string>{"data"}});
        if (axis == "copy") {
          EXPECT_THROW(pipeline.step(batch), GradientError) << to_string(op.kind);
        } else {
          EXPECT_EQ(pipeline.step(batch).weight, 8);
        }
      }
    }
  });
}

}  // namespace tessera::test::mixed_gradients_test
