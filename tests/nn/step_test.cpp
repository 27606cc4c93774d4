// What happens between backward and the optimizer: the denominator of a step, and clipping.
#include <cmath>

#include "support.h"
#include "tessera/gradient/step_weight.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"

namespace tessera::test::step_test {

namespace {

torch::nn::Sequential small() {
  torch::nn::Sequential net(torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
  net->to(at::kDouble);
  fill(*net, 11);
  return net;
}

// Rows of micro-batch k on rank r: ragged, with empty ones among them.
std::int64_t rows_of(int rank, int k) { return (rank * 3 + k * 2) % 5; }

TEST(StepWeight, RaggedMicroBatchesGiveTheGradientOfOneBatch) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      for (int micro = 1; micro <= 3; ++micro) {
        // Everything on one process.
        std::vector<std::vector<at::Tensor>> x(ranks), y(ranks);
        std::vector<at::Tensor> all_x, all_y;
        seed(5);
        for (int r = 0; r < ranks; ++r) {
          for (int k = 0; k < micro; ++k) {
            const std::int64_t n = rows_of(r, k) + (ranks == 1 && k == 0 ? 1 : 0);
            x[r].push_back(randn({n, 3}, at::kDouble)), y[r].push_back(randn({n, 2}, at::kDouble));
            all_x.push_back(x[r].back()), all_y.push_back(y[r].back());
          }
        }
        if (at::cat(all_x).size(0) == 0) continue;
        auto alone = small();
        const at::Tensor expected = torch::mse_loss(alone->forward(at::cat(all_x)), at::cat(all_y));
        expected.backward();

        auto net = small();
        DistributedDataParallel ddp(net, manager.world());
        StepWeight weight(manager.world());
        const int me = manager.rank();
        for (int k = 0; k < micro; ++k) {
          const auto loss = [&] {  // of an empty micro-batch: NaN, the mean over nothing
            return torch::mse_loss(ddp(x[me][k]), y[me][k]);
          };
          if (k + 1 < micro) {
            const auto scope = ddp.no_sync();
            weight.weigh(loss(), static_cast<double>(x[me][k].size(0))).backward();
          } else {
            weight.weigh(loss(), static_cast<double>(x[me][k].size(0))).backward();
          }
        }
        const double mean = weight.finish(net->parameters());
        EXPECT_NEAR(mean, expected.item<double>(), 1e-12);
        for (std::size_t i = 0; i < net->parameters().size(); ++i) {
          EXPECT_LT(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-12)
              << ranks << " ranks, " << micro << " micro-batches, parameter " << i;
        }
      }
    });
  }
}

// C++ modules list a tied parameter once under each of its names.
TEST(StepWeight, ATiedParameterIsDividedOnce) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto tied = [] {
      auto net = small();
      net->register_parameter("again", net->ptr<torch::nn::LinearImpl>(0)->weight);
      return net;
    };
    auto net = tied(), alone = tied();
    ASSERT_EQ(net->parameters().size(), 5u);
    const at::Tensor x = randn({6, 3}, at::kDouble);
    alone->forward(x).square().mean().backward();
    DistributedDataParallel ddp(net, manager.world());
    StepWeight weight(manager.world());
    const at::Tensor mine = x.narrow(0, manager.rank() == 0 ? 0 : 2, manager.rank() == 0 ? 2 : 4);
    weight.weigh(ddp(mine).square().mean(), static_cast<double>(mine.size(0))).backward();
    weight.finish(net->parameters());
    for (std::size_t i = 0; i < 5; ++i)
      EXPECT_LT(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-12) << i;
  });
}

TEST(StepWeight, AWrongWeightOfOneRankThrowsOnAllAndTheNextStepIsRight) {
  on_ranks(3, [](DistributedManager& manager) {
    const at::Tensor w = at::ones({2}, at::kDouble).requires_grad_();
    StepWeight weight(manager.world(), StepWeight::Reduced::averaged);
    for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
      w.mutable_grad() = at::Tensor();
      weight.weigh(w.sum(), manager.rank() == 1 ? wrong : 2.0).backward();
      const at::Tensor before = w.grad().clone();
      EXPECT_THROW(weight.finish({w}), InvalidArgument);
      EXPECT_TRUE(w.grad().equal(before));
    }
    // No sample anywhere is an error, too.
    weight.weigh(w.sum(), 0);
    EXPECT_THROW(weight.finish({w}), InvalidArgument);

    w.mutable_grad() = at::Tensor();
    weight.weigh(w.sum(), manager.rank() + 1.0).backward();
    manager.world().all_reduce(w.mutable_grad(), ReduceOp::avg);
    EXPECT_NEAR(weight.finish({w}), 2.0, 1e-14);
    EXPECT_LT(difference(w.grad(), at::ones({2}, at::kDouble)), 1e-14);
    EXPECT_THROW(weight.weigh(at::ones({2}), 1), InvalidArgument);
  });
}

TEST(StepWeight, ALossThatAllRanksShareIsCountedOnce) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(mapped({{"data", ranks}}));
      seed(3);
      const at::Tensor first = randn({5, 3}, at::kDouble), second = randn({2, 3}, at::kDouble);
      auto alone = small();
      at::cat({alone->forward(first), alone->forward(second)}).square().mean().backward();

      auto net = small();
      distribute_module(*net, mesh);
      StepWeight weight(manager.group({manager.rank()}), StepWeight::Reduced::summed);
      for (const at::Tensor& rows : {first, second}) {
        const at::Tensor x = distribute_tensor(rows, mesh, {Shard(0)});
        weight.weigh(net->forward(x).square().mean(), static_cast<double>(rows.size(0))).backward();
      }
      // an empty micro-batch that everybody has
      const at::Tensor none = distribute_tensor(randn({0, 3}, at::kDouble), mesh, {Shard(0)});
      weight.weigh(net->forward(none).square().mean(), 0).backward();
      weight.finish(net->parameters());
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_LT(difference(net->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-12);
      }
    });
  }
}

// A parameter whose gradient is given.
at::Tensor with_gradient(const at::Tensor& gradient, at::Tensor value) {
  value.requires_grad_();
  value.mutable_grad() = gradient;
  return value;
}

TEST(ClipGradients, EveryElementCountsOnceWhateverItsKind) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      const int me = manager.rank();
      const auto line = manager.mesh(mapped({{"x", ranks}}));
      const auto plane =
          manager.mesh(mapped(ranks == 4 ? std::vector<Axis>{{"a", 2}, {"b", 2}}
                                         : std::vector<Axis>{{"a", ranks}, {"b", 1}}));
      for (const double type : {1.0, 2.0, 3.5, HUGE_VAL}) {
        seed(static_cast<std::uint64_t>(ranks) + 17);
        const at::Tensor plain = randn({3, 2}, at::kDouble), rows = randn({5, 3}, at::kDouble),
                         tile = randn({4, 6}, at::kDouble),
                         table = randn({2 * ranks, 2}, at::kDouble), same = randn({7}, at::kDouble);
        const auto put = [](const at::Tensor& t, const DeviceMesh& mesh,
                            std::vector<Placement> placements, const ShardSizes& sizes = {}) {
          return distribute_tensor(t, mesh, placements, sizes);
        };
        std::vector<std::int64_t> uneven(ranks, 0);
        uneven.back() = 5;  // every rank but the last has an empty shard
        const at::Tensor a = with_gradient(plain.clone(), at::zeros_like(plain));
        const at::Tensor b =
            with_gradient(put(rows, line, {Shard(0)}, {{0, uneven}}),
                          put(at::zeros_like(rows), line, {Shard(0)}, {{0, uneven}}));
        const at::Tensor c = with_gradient(put(tile, plane, {Shard(0), Shard(1)}),
                                           put(at::zeros_like(tile), plane, {Shard(0), Shard(1)}));
        const at::Tensor d = with_gradient(put(same.clone(), line, {Replicate()}),
                                           put(at::zeros_like(same), line, {Replicate()}));
        const at::Tensor mine = table.narrow(0, 2 * me, 2);
        const at::Tensor e = with_gradient(mine.clone(), at::zeros_like(mine));
        const at::Tensor unused = at::zeros({3}, at::kDouble).requires_grad_();
        const std::vector<at::Tensor> parameters{a, b, unused, c, d, e};
        const std::vector<OwnedShard> by_hand{{e, manager.world()}};

        const at::Tensor all =
            at::cat({plain.flatten(), rows.flatten(), tile.flatten(), same, table.flatten()});
        const double expected = at::linalg_vector_norm(all, type).item<double>();
        const auto clip = [&](double max_norm) {
          return clip_gradients(parameters, manager.world(),
                                {.max_norm = max_norm, .norm_type = type}, by_hand);
        };
        EXPECT_NEAR(clip(HUGE_VAL), expected, 1e-11 * expected);
        EXPECT_NEAR(clip(2 * expected), expected, 1e-11 * expected);
        EXPECT_TRUE(a.grad().equal(plain));  // nothing was scaled
        EXPECT_NEAR(clip(expected / 4), expected, 1e-11 * expected);
        EXPECT_LT(difference(a.grad(), plain / 4), 1e-12);
        EXPECT_LT(difference(b.grad(), rows / 4), 1e-12);
        EXPECT_LT(difference(c.grad(), tile / 4), 1e-12);
        EXPECT_LT(difference(d.grad(), same / 4), 1e-12);
        EXPECT_LT(difference(e.grad(), mine / 4), 1e-12);
        EXPECT_NEAR(clip(HUGE_VAL), expected / 4, 1e-11 * expected);
      }
    });
  }
}

TEST(ClipGradients, AnUndeclaredPartIsAnErrorOnEveryRank) {
  on_ranks(3, [](DistributedManager& manager) {
    const at::Tensor mine = at::full({2}, 1.0 + manager.rank(), at::kDouble);
    const at::Tensor p = with_gradient(mine.clone(), at::zeros_like(mine));
    EXPECT_THROW(clip_gradients({p}, manager.world(), {.max_norm = 1}), MismatchError);
    EXPECT_TRUE(p.grad().equal(mine));
    // The groups go on.
    const double norm =
        clip_gradients({p}, manager.world(), {.max_norm = 1}, {{p, manager.world()}});
    EXPECT_NEAR(norm, std::sqrt(2.0 * (1 + 4 + 9)), 1e-12);
    EXPECT_LT(difference(p.grad(), mine / norm), 1e-12);

    EXPECT_THROW(clip_gradients({p}, manager.world(), {.max_norm = 0}), InvalidArgument);
    EXPECT_THROW(clip_gradients({p}, manager.world(), {.norm_type = 0.5}), InvalidArgument);
    EXPECT_THROW(clip_gradients({at::Tensor()}, manager.world()), InvalidArgument);
    EXPECT_THROW(clip_gradients({p}, manager.world(), {},
                                {{at::ones({1}).requires_grad_(), manager.world()}}),
                 InvalidArgument);
    // A rank whose gradient overflowed stops all from scaling.
    const at::Tensor q =
        with_gradient(at::full({2}, manager.rank() == 1 ? std::nan("") : 1.0, at::kDouble),
                      at::zeros({2}, at::kDouble));
    EXPECT_TRUE(std::isinf(clip_gradients({q}, manager.world(), {.max_norm = 0.1})));
    if (manager.rank() != 1) {
      EXPECT_TRUE(q.grad().equal(at::ones({2}, at::kDouble)));
    }
  });
}

TEST(ClipGradients, APartialGradientIsRefusedOnEveryRank) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh(mapped({{"data", 2}}));
    auto net = small();
    distribute_module(*net, mesh);
    const at::Tensor x = distribute_tensor(at::ones({4, 3}, at::kDouble), mesh, {Shard(0)});
    {
      const auto scope = no_sync(*net);
      net->forward(x).sum().backward();
    }
    EXPECT_THROW(clip_gradients(net->parameters(), manager.world(), {.max_norm = 1}),
                 ShardingError);
    net->forward(x).sum().backward();  // reduces both
    EXPECT_GT(clip_gradients(net->parameters(), manager.world(), {.max_norm = 1}), 1);
  });
}

TEST(ClipGradients, StagesThatHoldOtherParametersShareOneNorm) {
  on_ranks(4, [](DistributedManager& manager) {
    // Two stages of two replicas each.
    const auto mesh = manager.mesh(mapped({{"stage", 2}, {"replica", 2}}));
    const int stage = mesh.coordinate()[0];
    const at::Tensor gradient = at::full({3}, stage == 0 ? 1.0 : 2.0, at::kDouble);
    const at::Tensor p = with_gradient(gradient.clone(), at::zeros_like(gradient));
    const double norm =
        clip_gradients({p}, manager.world(), {.max_norm = 1, .disjoint = mesh.group("stage")});
    EXPECT_NEAR(norm, std::sqrt(15.0), 1e-13);
    EXPECT_LT(difference(p.grad(), gradient / norm), 1e-12);
  });
}

}  // namespace

}  // namespace tessera::test::step_test
