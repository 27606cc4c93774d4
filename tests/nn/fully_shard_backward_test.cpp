// fully_shard: backwards of other kinds: twice, recomputed, ended by an exception.

#include <torch/csrc/autograd/custom_function.h>

#include "fully_shard_case.h"

namespace tessera::test::fully_shard_backward_test {

TEST(FullyShard, SecondDerivatives) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of({}), expected = net_of({});
    fully_shard(*net, mesh);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({5, 5}, at::kDouble);
      // A penalty on the gradients of the input and of a parameter.
      const auto penalty = [](Net& n, const at::Tensor& input) {
        const at::Tensor y = loss_of(n->forward(input));
        const auto g = torch::autograd::grad({y}, {input, n->last}, {}, true, true);
        return y + g[0].square().sum() + g[1].square().sum();
      };
      const at::Tensor plain = x.clone().requires_grad_();
      const at::Tensor wanted = penalty(expected, plain);
      wanted.backward();
      const at::Tensor mine = leaf(x, ShardSpec(mesh, {5, 5}, {Shard(0)}, {{0, {2, 0, 3}}}));
      const at::Tensor got = penalty(net, mine);
      got.backward();
      EXPECT_LT(difference(got, wanted), 1e-11);
      EXPECT_LT(difference(mine.grad(), plain.grad()), 1e-10);
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

namespace {

// Backward of the value throws, once.
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("in backward");
  }
};

}  // namespace

TEST(FullyShard, GoesOnAfterExceptions) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({.blocks = 4}), expected = net_of({.blocks = 4});
    fully_shard(*net, mesh);
    for (int step = 0; step < 8; ++step) {
      const at::Tensor x = randn({4, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      if (step % 4 == 1) {
        net->throws = 2;
        EXPECT_THROW(net->forward(mine), std::runtime_error);
        net->throws = -1;
      } else if (step % 4 == 2) {
        const at::Tensor h = net->blocks->ptr<torch::nn::SequentialImpl>(3)->forward(
            Failing::apply(net->first->forward(mine)));
        EXPECT_THROW(h.square().mean().backward(), std::runtime_error);
      }
      // What was gathered before is not what is used after: parameters have changed since.
      const at::NoGradGuard no_grad;
      for (const auto& p : net->parameters()) p.mul_(1.01);
      for (const auto& p : expected->parameters()) p.mul_(1.01);
      const at::AutoGradMode grad(true);
      net->zero_grad();
      expected->zero_grad();
      loss_of(net->forward(mine)).backward();
      loss_of(expected->forward(x)).backward();
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

TEST(FullyShard, RecomputesActivations) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of({}), expected = net_of({});
    fully_shard(*net, mesh);
    for (int step = 0; step < 3; ++step) {
      const auto run = [](Net& n, const at::Tensor& x) {
        at::Tensor h = n->first->forward(x);
        for (std::size_t i = 0; i < n->blocks->size(); ++i) {
          auto block = n->blocks->ptr<torch::nn::SequentialImpl>(i);
          h = Recomputed::apply(
              h, Recomputed::Body([block](const at::Tensor& y) { return block->forward(y); }));
        }
        return loss_of(h.matmul(n->last));
      };
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({5, 5}, at::kDouble);
      run(net, distribute_tensor(x, mesh, {Shard(0)})).backward();
      run(expected, x).backward();
      Recomputed::bodies().clear();
      for (const auto& item : expected->named_parameters()) {
        if (!item.value().grad().defined()) continue;
        EXPECT_LT(difference(net->named_parameters()[item.key()].grad(), item.value().grad()),
                  1e-11)
            << item.key();
      }
    }
  });
}

}  // namespace tessera::test::fully_shard_backward_test
