#include "tessera/nn/distributed_data_parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <optional>

#include "data_parallel_case.h"
#include "support.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::distributed_data_parallel_test {
namespace {

using test::on_ranks;
using testing::Net;

// Seeding is process-wide in libtorch: ranks as threads make their random numbers one after the
// other.
template <class F>
auto one_at_a_time(F make) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return make();
}

TEST(DistributedDataParallel, UnevenTrainingEqualsOneProcess) {
  for (const bool shared : {false, true}) {
    torch::manual_seed(1);
    const Net reference = testing::one_process(shared);
    std::vector<torch::Tensor> batches;
    for (int step = 0; step < testing::kSteps; ++step)
      batches.push_back(testing::samples(step, 13));
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (const bool overlap : {true, false})
        for (const bool view : {true, false})
          for (const std::int64_t bytes : {1l, 600l, 1l << 20})
            on_ranks(ranks, [&](DistributedManager& manager) {
              Net net = one_at_a_time([&] {
                torch::manual_seed(1 + manager.rank());
                return Net(shared);
              });
              DistributedDataParallel ddp(net, manager.world(),
                                          {.reducer = {bytes, bytes, overlap, view}});
              torch::optim::Adam optimizer(net->parameters(), 1e-2);
              for (int step = 0; step < testing::kSteps; ++step) {
                auto x = testing::part(batches[step], step, manager.rank(), ranks);
                optimizer.zero_grad();
                ddp.mean_loss(torch::mse_loss(ddp(x), testing::target(x)),
                              static_cast<double>(x.size(0)))
                    .backward();
                optimizer.step();
              }
              const auto wanted = reference->named_parameters();
              for (const auto& item : net->named_parameters()) {
                EXPECT_TRUE(torch::allclose(item.value(), wanted[item.key()], 1e-10, 1e-10))
                    << item.key() << ", " << ranks << " ranks";
                EXPECT_EQ(item.value().grad().defined(), wanted[item.key()].grad().defined())
                    << item.key();
              }
            });
  }
}

TEST(DistributedDataParallel, AccumulationOverMicroBatchesEqualsOneProcess) {
  torch::manual_seed(1);
  Net reference(false);
  const auto x = testing::samples(0, 12);
  for (int micro = 0; micro < 3; ++micro) {
    auto rows = x.slice(0, 4 * micro, 4 * micro + 4);
    (torch::mse_loss(reference(rows), testing::target(rows)) / 3).backward();
  }
  on_ranks(3, [&](DistributedManager& manager) {
    Net net = one_at_a_time([&] {
      torch::manual_seed(1 + manager.rank());
      return Net(false);
    });
    DistributedDataParallel ddp(net, manager.world());
    auto backward = [&](int micro) {
      auto rows = testing::part(x.slice(0, 4 * micro, 4 * micro + 4), micro, manager.rank(), 3);
      (ddp.mean_loss(torch::mse_loss(ddp(rows), testing::target(rows)),
                     static_cast<double>(rows.size(0))) /
       3)
          .backward();
    };
    {
      const auto scope = ddp.no_sync();
      backward(0);
      backward(1);
    }
    backward(2);
    const auto wanted = reference->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(!wanted[item.key()].grad().defined() ||
                  torch::allclose(item.value().grad(), wanted[item.key()].grad(), 1e-11, 1e-11))
          << item.key();
  });
}

// A user's function whose backward throws.
struct Fails : torch::autograd::Function<Fails> {
  using Context = torch::autograd::AutogradContext;
  static torch::Tensor forward(Context*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(Context*, const torch::autograd::variable_list&) {
    throw std::runtime_error("in backward");
  }
};

enum class FailsIn { nothing, function, recomputation, nested_backward };

// tanh(layer(x)), computed again in backward, as reentrant checkpointing does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Context = torch::autograd::AutogradContext;
  static torch::Tensor forward(Context* ctx, const torch::Tensor& x, const torch::nn::Linear& layer,
                               FailsIn fails) {
    ctx->saved_data["weight"] = layer->weight;
    ctx->saved_data["bias"] = layer->bias;
    ctx->saved_data["fails"] = static_cast<int>(fails);
    ctx->save_for_backward({x});
    const at::NoGradGuard no_grad;
    return torch::tanh(torch::linear(x, layer->weight, layer->bias));
  }
  static torch::autograd::variable_list backward(Context* ctx,
                                                 const torch::autograd::variable_list& g) {
    const auto fails = static_cast<FailsIn>(ctx->saved_data["fails"].toInt());
    const auto x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad(true);
    // It throws when the gradients of weight and bias have been accumulated.
    const auto y = torch::tanh(
        torch::linear(fails == FailsIn::nested_backward ? Fails::apply(x) : x,
                      ctx->saved_data["weight"].toTensor(), ctx->saved_data["bias"].toTensor()));
    if (fails == FailsIn::recomputation) throw std::runtime_error("in a recomputation");
    y.backward(g[0]);
    return {x.grad(), torch::Tensor(), torch::Tensor()};
  }
};

struct CheckpointedImpl : torch::nn::Module {
  CheckpointedImpl()
      : first(register_module("first", torch::nn::Linear(6, 8))),
        middle(register_module("middle", torch::nn::Linear(8, 8))),
        last(register_module("last", torch::nn::Linear(8, 2))) {
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor h = torch::tanh(first(x));
    if (fails == FailsIn::function) h = Fails::apply(h);
    return last(Recomputed::apply(h, middle, fails));
  }
  torch::nn::Linear first, middle, last;
  FailsIn fails = FailsIn::nothing;
};
TORCH_MODULE(Checkpointed);

// Backwards that exceptions end, three before each step, change nothing about the training.
TEST(DistributedDataParallel, TrainsOnAfterBackwardsThatFailed) {
  std::vector<torch::Tensor> batches;
  for (int step = 0; step < testing::kSteps; ++step) batches.push_back(testing::samples(step, 13));
  const auto train = [](Checkpointed& net, const std::function<torch::Tensor(int)>& loss,
                        bool fails) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < testing::kSteps; ++step) {
      const bool set_to_none = step % 2 == 0;
      for (const auto in : {FailsIn::function, FailsIn::recomputation, FailsIn::nested_backward}) {
        if (!fails) break;
        optimizer.zero_grad(set_to_none);
        net->fails = in;
        EXPECT_THROW(loss(step).backward(), std::runtime_error);
        net->fails = FailsIn::nothing;
      }
      optimizer.zero_grad(set_to_none);
      loss(step).backward();
      optimizer.step();
    }
  };
  torch::manual_seed(1);
  Checkpointed reference;
  train(
      reference,
      [&](int step) {
        return torch::mse_loss(reference(batches[step]), testing::target(batches[step]));
      },
      false);
  for (const bool overlap : {true, false})
    for (const bool view : {true, false})
      for (const std::int64_t bytes : {1l, 600l, 1l << 20})
        on_ranks(2, [&](DistributedManager& manager) {
          Checkpointed net = one_at_a_time([&] {
            torch::manual_seed(1 + manager.rank());
            return Checkpointed();
          });
          DistributedDataParallel ddp(net, manager.world(),
                                      {.reducer = {bytes, bytes, overlap, view}});
          train(
              net,
              [&](int step) {
                const auto x = testing::part(batches[step], step, manager.rank(), 2);
                return ddp.mean_loss(torch::mse_loss(ddp(x), testing::target(x)),
                                     static_cast<double>(x.size(0)));
              },
              true);
          const auto wanted = reference->named_parameters();
          for (const auto& item : net->named_parameters())
            EXPECT_TRUE(torch::allclose(item.value(), wanted[item.key()], 1e-10, 1e-10))
                << item.key() << ", buckets of " << bytes << " bytes";
        });
}

TEST(DistributedDataParallel, RankZeroGivesParametersAndBuffers) {
  on_ranks(3, [](DistributedManager& manager) {
    torch::nn::BatchNorm1d norm(4);
    norm->running_mean.fill_(manager.rank() + 1.0);
    norm->num_batches_tracked.fill_(10 * manager.rank());
    norm->weight.detach().fill_(manager.rank());
    DistributedDataParallel ddp(norm, manager.world(), {.ignore = {"bias"}});
    EXPECT_TRUE(norm->weight.eq(0).all().item<bool>());
    EXPECT_TRUE(norm->running_mean.eq(1).all().item<bool>());
    norm->running_mean.fill_(manager.rank() + 5.0);
    norm->eval();
    ddp(torch::ones({2, 4}));  // evaluation sends nothing
    EXPECT_TRUE(norm->running_mean.eq(manager.rank() + 5.0).all().item<bool>());
    norm->train();
    norm->options.momentum(0.0);
    ddp(torch::ones({2, 4}) * manager.rank());
    EXPECT_TRUE(norm->running_mean.eq(5).all().item<bool>()) << norm->running_mean;
    // Ignored: neither broadcast nor reduced.
    ddp(torch::randn({2, 4})).sum().backward();
    EXPECT_TRUE(norm->bias.grad().eq(2).all().item<bool>());
  });
}

// So that a program which goes on from rank 0's values between two steps is the same program.
TEST(DistributedDataParallel, BuffersAreBroadcastWhereAStepBegins) {
  on_ranks(2, [](DistributedManager& manager) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNormOptions(4).momentum(0.5));
    DistributedDataParallel ddp(norm, manager.world());
    const auto x = torch::full({2, 4}, manager.rank() + 1.0);
    double first = 0, mine = 0;
    const auto follow = [](double mean, double value) { return 0.5 * mean + 0.5 * value; };
    const auto expect_mean = [&] {
      EXPECT_TRUE(norm->running_mean.eq(mine).all().item<bool>()) << norm->running_mean << mine;
    };
    for (int step = 0; step < 3; ++step) {
      mine = first;
      for (int part = 0; part < 3; ++part) {
        const auto scope = part < 2 ? std::optional(ddp.no_sync()) : std::nullopt;
        ddp(x).sum().backward();
        mine = follow(mine, manager.rank() + 1.0);
        first = follow(first, 1.0);
        expect_mean();
      }
      norm->eval();
      ddp(x);  // is no forward of a step
      norm->train();
    }
    ddp.broadcast_buffers();
    mine = first;
    expect_mean();
  });
}

TEST(DistributedDataParallel, FrozenParametersAreLeftAlone) {
  on_ranks(2, [](DistributedManager& manager) {
    torch::nn::Linear layer(3, 3);
    layer->bias.set_requires_grad(false);
    DistributedDataParallel ddp(layer, manager.world());
    ddp(torch::ones({2, 3})).sum().backward();
    EXPECT_TRUE(layer->weight.grad().defined());
    EXPECT_FALSE(layer->bias.grad().defined());
  });
}

TEST(DistributedDataParallel, DifferentModulesAreAnErrorOnEveryRank) {
  on_ranks(3, [](DistributedManager& manager) {
    torch::nn::Linear layer(3, manager.rank() == 1 ? 4 : 3);
    EXPECT_THROW(DistributedDataParallel(layer, manager.world()), MismatchError);
  });
  on_ranks(2, [](DistributedManager& manager) {
    EXPECT_THROW(
        DistributedDataParallel(torch::nn::Linear(3, 3), manager.world(), {.ignore = {"wieght"}}),
        InvalidArgument);
  });
}

// Its gradient would be each rank's own, and the ranks would drift apart.
TEST(DistributedDataParallel, WhatIsUnfrozenLaterIsRefusedUntilItIsWrappedAnew) {
  on_ranks(2, [](DistributedManager& manager) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 1));
    const at::Tensor last = net->parameters()[2], x = torch::full({2, 3}, manager.rank() + 1.0);
    last.requires_grad_(false);
    {
      DistributedDataParallel ddp(net, manager.world());
      ddp(x).sum().backward();
      last.requires_grad_(true);
      {
        const at::NoGradGuard no_grad;
        EXPECT_NO_THROW(ddp(x));
      }
      EXPECT_THROW(ddp(x), GradientError);
      last.requires_grad_(false);
      EXPECT_NO_THROW(ddp(x));
      last.requires_grad_(true);
    }
    DistributedDataParallel ddp(net, manager.world());
    net->zero_grad();
    ddp(x).sum().backward();
    at::Tensor sum = last.grad().clone();
    manager.world().all_reduce(sum, ReduceOp::avg);
    EXPECT_TRUE(at::allclose(sum, last.grad())) << "the same on all ranks";
    last.requires_grad_(false);
    DistributedDataParallel without(net, manager.world(), {.ignore = {"1.weight"}});
    last.requires_grad_(true);
    EXPECT_NO_THROW(without(x)) << "of what is left out nothing is said";
  });
}

TEST(DistributedDataParallel, TakesSharedPointersAndAnyForward) {
  struct Pair : torch::nn::Module {
    Pair() { layer = register_module("layer", torch::nn::Linear(2, 2)); }
    std::pair<torch::Tensor, int> forward(const torch::Tensor& x, int n) {
      return {layer(x), n + 1};
    }
    torch::nn::Linear layer{nullptr};
  };
  on_ranks(2, [](DistributedManager& manager) {
    DistributedDataParallel ddp(std::make_shared<Pair>(), manager.world());
    const auto [y, n] = ddp(torch::ones({1, 2}), 3);
    EXPECT_EQ(n, 4);
    y.sum().backward();
    EXPECT_TRUE(ddp.module()->layer->weight.grad().defined());
  });
}

// The module's output becomes one sharded tensor: its gradients are summed. Rank r has 2 r rows.
void beside_sharded_tensors(DistributedManager& manager) {
  const int ranks = manager.world_size(), rank = manager.rank();
  const auto mesh = manager.mesh({{"data", ranks}});
  Sizes rows(ranks);
  for (int r = 0; r < ranks; ++r) rows[r] = ranks == 1 ? 2 : 2 * r;
  const std::int64_t total = ranks == 1 ? 2 : ranks * (ranks - 1), begin = rank * (rank - 1);
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3));
    net->to(torch::kDouble);
    test::fill(*net, 4);
    return net;
  };
  auto net = make(), expected = make();
  DistributedDataParallel ddp(net, manager.world(), {.reduction = ReduceOp::sum});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = test::randn({total, 6}, at::kDouble),
                     mine = x.narrow(0, begin, rows[rank]);
    expected->forward(x).square().mean().backward();
    const auto scope = step == 1 ? std::optional(no_sync(*net)) : std::nullopt;
    from_local(ddp(mine), mesh, {Shard(0)}, {{0, rows}}).square().mean().backward();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), expected->parameters()[i].grad(),
                                1e-11, 1e-11))
        << i;
}

TEST(DistributedDataParallel, BesideShardedTensors) {
  for (const int ranks : {1, 2, 3}) on_ranks(ranks, beside_sharded_tensors);
}

// A wrapper that one rank keeps, for its log, when all go on with another one. The last case:
// groups may have ended afterwards.
void keep_an_old_wrapper(DistributedManager& manager) {
  const int ranks = manager.world_size();
  torch::nn::Linear net(3, 2);
  using Wrapper = DistributedDataParallel<torch::nn::Linear>;
  const auto step = [&](Wrapper& ddp) {
    net->zero_grad();
    ddp(torch::full({1, 3}, 1.0 + manager.rank())).sum().backward();
  };
  const auto wrapped = [&] { return std::make_unique<Wrapper>(net, manager.world()); };
  auto ddp = wrapped();
  step(*ddp);
  auto kept = manager.rank() == 0 ? std::move(ddp) : nullptr;
  ddp.reset();
  if (ranks > 1) {
    EXPECT_THROW(wrapped(), MismatchError);
  }
  kept.reset();
  ddp = wrapped();
  for (int k = 0; k < 2; ++k) {
    step(*ddp);
    EXPECT_TRUE(net->weight.grad().allclose(torch::full({2, 3}, (ranks + 1) / 2.0)))
        << net->weight.grad();
  }
  // The same, made before the old one goes.
  auto next = wrapped();
  kept = manager.rank() == 0 ? std::move(ddp) : nullptr;
  ddp.reset();
  if (ranks > 1) {
    EXPECT_THROW(step(*next), MismatchError);
  }
}

TEST(DistributedDataParallel, AnOldWrapperOfOneRankIsAnErrorOnEveryRank) {
  for (int ranks = 1; ranks <= 3; ++ranks)
    on_ranks(ranks, [](DistributedManager& manager) { keep_an_old_wrapper(manager); });
}

}  // namespace
}  // namespace tessera::distributed_data_parallel_test
