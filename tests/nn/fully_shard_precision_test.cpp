// fully_shard: units that compute, gather and reduce in another dtype than their parameters have.

#include <c10/core/InferenceMode.h>

#include "fully_shard_case.h"

namespace tessera::test::fully_shard_precision_test {

namespace {

namespace F = torch::nn::functional;
using Precision = UnitPrecision;

// What a unit's operators do, written out.
struct Casts {
  Precision precision;

  at::Tensor in(const at::Tensor& t) const {
    return precision.parameters && at::isFloatingType(t.scalar_type()) ? t.to(*precision.parameters)
                                                                       : t;
  }
  at::Tensor out(const at::Tensor& t) const {
    return precision.output ? t.to(*precision.output) : t;
  }
};

// The forward of Net on one process, with the casts of its blocks' and its own unit.
at::Tensor cast_forward(NetImpl& net, const at::Tensor& x, const Casts& own, const Casts& block) {
  const auto linear = [](const Casts& c, const torch::nn::LinearImpl& layer, const at::Tensor& t) {
    return c.out(F::linear(c.in(t), c.in(layer.weight), c.in(layer.bias)));
  };
  const auto run = [&](std::size_t i, const at::Tensor& h) {
    auto list = net.blocks->ptr<torch::nn::SequentialImpl>(i);
    const auto& norm = *list->ptr<torch::nn::LayerNormImpl>(0);
    const at::Tensor n =
        block.out(at::layer_norm(block.in(h), norm.options.normalized_shape(),
                                 block.in(norm.weight), block.in(norm.bias), norm.options.eps()));
    const at::Tensor up = linear(block, *list->ptr<torch::nn::LinearImpl>(1), n);
    return linear(block, *list->ptr<torch::nn::LinearImpl>(3), at::gelu(up));
  };
  at::Tensor h = linear(own, *net.first, x);
  for (std::size_t i = 0; i < net.blocks->size(); ++i) {
    h = h + run(i, h);
    if (static_cast<int>(i) == net.twice) {
      const at::Tensor again = run(i, h);
      h = h - own.out(own.in(again) * own.in(net.scale));
    }
  }
  const at::Tensor y = own.out(own.in(h).matmul(own.in(net.last)));
  const at::Tensor scaled = own.out(own.in(y) * own.in(net.scale));
  return own.out(own.in(scaled) + own.in(net.bias));
}

// Largest difference of a parameter or its gradient.
double largest_difference(torch::nn::Module& got, torch::nn::Module& expected) {
  double most = 0;
  const auto named = got.named_parameters();
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor p = named[item.key()];
    most = std::max(most, difference(p, item.value(), 1e-2));
    EXPECT_EQ(p.grad().defined(), item.value().grad().defined()) << item.key();
    if (p.grad().defined()) most = std::max(most, difference(p.grad(), item.value().grad(), 1e-2));
  }
  return most;
}

}  // namespace

TEST(FullyShardPrecision, EqualsOneProcessWithTheSameCasts) {
  for (const auto& axes : meshes()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped(axes));
      Draw draw(23);
      double apart = 0;
      for (int round = 0; round < 3; ++round) {
        const NetImpl::Shape shape{draw.between(2, 6), draw.between(4, 9), draw.between(1, 5),
                                   draw.between(1, 3), draw.chance(50)};
        Net net = net_of(shape), expected = net_of(shape), uncast = net_of(shape);
        Casts own{{.parameters = at::kFloat}}, block = own;
        if (draw.chance(50)) own.precision.output = at::kDouble;
        if (draw.chance(40)) {  // layer norm takes no data of another dtype
          block.precision = {};
          own.precision.output = at::kDouble;
        }
        FullyShardOptions options{.units = {"blocks.*"},
                                  .reshard_after_forward = draw.chance(60),
                                  .prefetch = draw.below(3)};
        options.precision = own.precision;
        options.unit_precision = {{"blocks.*", block.precision}};
        if (draw.chance(50)) options.precision.reduce = at::kFloat;
        if (draw.chance(50)) options.axes = {"x"};
        fully_shard(*net, mesh, options);
        const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-2);
        torch::optim::AdamW opt(once(*net), adam), expected_opt(once(*expected), adam);
        for (int step = 0; step < 3; ++step) {
          net->twice = expected->twice = uncast->twice = draw.chance(25) ? 0 : -1;
          opt.zero_grad();
          expected_opt.zero_grad();
          const at::Tensor x = randn({draw.between(1, 6), shape.in}, at::kDouble);
          const at::Tensor y = net->forward(sharded(draw, x, mesh));
          const at::Tensor wanted = cast_forward(*expected, x, own, block);
          const std::string where = concat("round ", round, " on ", ranks, " step ", step);
          EXPECT_EQ(y.scalar_type(), wanted.scalar_type()) << where;
          EXPECT_LT(difference(y, wanted, 1e-2), 2e-5) << where;
          if (step == 0) apart += difference(y.to(at::kDouble), uncast->forward(x));
          loss_of(y).backward();
          loss_of(wanted).backward();
          EXPECT_LT(largest_difference(*net, *expected), 5e-5) << where;
          for (const at::Tensor& p : net->parameters()) {
            EXPECT_EQ(p.scalar_type(), at::kDouble);
            if (p.grad().defined()) {
              EXPECT_EQ(p.grad().scalar_type(), at::kDouble);
              EXPECT_TRUE(spec(p.grad()) == spec(p)) << where;
            }
          }
          opt.step();
          expected_opt.step();
        }
      }
      EXPECT_GT(apart, 1e-10) << "nothing was cast";
    });
  }
}

TEST(FullyShardPrecision, MovesTheBytesOfItsDtypes) {
  // Small whole numbers, of which bfloat16 rounds none: equal to float64.
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    std::map<bool, std::int64_t> gathered, reduced;
    for (const bool low : {false, true}) {
      const auto make = [] {
        Sequential net(Linear(8, 8), Linear(8, 8));
        const at::NoGradGuard no_grad;
        seed(5);
        for (const auto& p : net->parameters()) p.copy_(randint(3, p.sizes()) - 1);
        return net;
      };
      Sequential net = make(), expected = make();
      expected->to(at::kDouble);
      FullyShardOptions options;
      if (low) options.precision = {.parameters = at::kBFloat16, .reduce = at::kBFloat16};
      fully_shard(*net, mesh, options);
      const at::Tensor x = (randint(3, {7, 8}) - 1).to(at::kFloat);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        expected->zero_grad();
        const CommTraceScope trace(manager);
        const at::Tensor y = net->forward(mine);
        EXPECT_EQ(y.scalar_type(), low ? at::kBFloat16 : at::kFloat);
        y.to(at::kFloat).sum().backward();
        const auto calls = calls_of(*trace);
        gathered[low] = calls.at("all_gather").second;
        reduced[low] = calls.at("reduce_scatter").second;
        expected->forward(x.to(at::kDouble)).sum().backward();
        for (std::size_t i = 0; i < net->parameters().size(); ++i) {
          const at::Tensor g = net->parameters()[i].grad();
          EXPECT_EQ(g.scalar_type(), at::kFloat);
          EXPECT_EQ(difference(g.to(at::kDouble), expected->parameters()[i].grad()), 0) << i;
        }
      }
    }
    EXPECT_EQ(2 * gathered[true], gathered[false]);
    EXPECT_EQ(2 * reduced[true], reduced[false]);
  });
}

TEST(FullyShardPrecision, OptimizersAndPenaltiesComputeWithTheParametersThemselves) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Linear net(5, 4), expected(5, 4);
    net->to(at::kDouble);
    expected->to(at::kDouble);
    fill(*net, 3);
    fill(*expected, 3);
    fully_shard(*net, mesh, {.precision = {.parameters = at::kBFloat16}});
    const auto penalty = [](const torch::nn::LinearImpl& m, const at::Tensor& target) {
      return (m.weight - target).square().sum() + m.bias.square().sum() * 0.3 + m.weight.norm();
    };
    const at::Tensor target = randn({4, 5}, at::kDouble);
    const at::Tensor got = penalty(*net, distribute_tensor(target, mesh, {Shard(0)}));
    const at::Tensor wanted = penalty(*expected, target);
    EXPECT_LT(difference(got, wanted), 1e-13);
    got.backward();
    wanted.backward();
    torch::optim::SGD a(net->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.2)),
        b(expected->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.2));
    a.step();
    b.step();
    EXPECT_LT(difference(net->weight, expected->weight), 1e-13);
    EXPECT_LT(difference(net->bias, expected->bias), 1e-13);
  });
}

TEST(FullyShardPrecision, ComputesAlikeWithoutGradients) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const Placement placement : {Placement(Shard(0)), Placement(Replicate())}) {
      Net net = net_of({});
      fully_shard(*net, mesh, {.units = {"blocks.*"}, .precision = {at::kFloat, {}, at::kDouble}});
      const at::Tensor x = distribute_tensor(randn({5, 5}, at::kDouble), mesh, {placement});
      const at::Tensor y = net->forward(x).detach();
      EXPECT_EQ(y.scalar_type(), at::kDouble);
      {
        const at::NoGradGuard no_grad;
        EXPECT_EQ(difference(net->forward(x), y), 0);
      }
      {
        const c10::InferenceMode inference;
        const at::Tensor again = net->forward(x);
        EXPECT_EQ(again.scalar_type(), at::kDouble);
        EXPECT_EQ(difference(again, y), 0);
      }
    }
  });
}

TEST(FullyShardPrecision, SeesWhatIsWrittenAndRefusesItBeforeBackward) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const bool reshard : {true, false}) {
      Net net = net_of({.blocks = 2}), expected = net_of({.blocks = 2});
      fully_shard(*net, mesh,
                  {.reshard_after_forward = reshard, .precision = {.parameters = at::kFloat}});
      const Casts casts{{.parameters = at::kFloat}};
      const at::Tensor x = randn({4, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        expected->zero_grad();
        const at::Tensor y = net->forward(mine), wanted = cast_forward(*expected, x, casts, casts);
        EXPECT_LT(difference(y, wanted, 1e-2), 1e-5) << step;
        y.square().mean().backward();
        wanted.square().mean().backward();
        EXPECT_LT(largest_difference(*net, *expected), 1e-5) << step;
        const at::NoGradGuard no_grad;
        for (const auto& p : net->parameters()) p.mul_(0.9);
        for (const auto& p : expected->parameters()) p.mul_(0.9);
      }
      // As plain libtorch does for what is saved.
      const at::Tensor loss = net->forward(mine).square().mean();
      {
        const at::NoGradGuard no_grad;
        for (const auto& p : net->parameters()) p.mul_(1.1);
      }
      EXPECT_THROW(loss.backward(), c10::Error);
    }
  });
}

TEST(FullyShardPrecision, LeavesBatchNormAlone) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Sequential net(Linear(4, 6), torch::nn::BatchNorm1d(6)),
        expected(Linear(4, 6), torch::nn::BatchNorm1d(6));
    fill(*net, 3);
    fill(*expected, 3);
    fully_shard(*net, mesh, {.precision = {.parameters = at::kBFloat16}});
    const at::Tensor x = randn({6, 4});
    net->forward(distribute_tensor(x, mesh, {Shard(0)})).sum().backward();
    expected->forward(x);
    const auto mean = [](Sequential& n) { return n->named_buffers()["1.running_mean"]; };
    EXPECT_EQ(mean(net).scalar_type(), at::kFloat);
    EXPECT_LT(difference(mean(net), mean(expected)), 0.02);
    EXPECT_GT(whole(mean(net)).abs().max().item<double>(), 0);
  });
}

TEST(FullyShardPrecision, RefusesWhatMakesNoSense) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    struct OddImpl : torch::nn::Module {
      explicit OddImpl(at::ScalarType type) {
        odd = register_parameter("odd", at::ones({4, 2}, type), at::isComplexType(type));
        even = register_parameter("even", at::ones({4, 2}));
      }
      at::Tensor odd, even;
    };
    for (const auto type : {at::kComplexFloat, at::kLong}) {
      OddImpl net(type);
      EXPECT_THROW(fully_shard(net, mesh, {.precision = {.parameters = at::kBFloat16}}),
                   InvalidArgument);
      EXPECT_THROW(fully_shard(net, mesh, {.precision = {.reduce = at::kBFloat16}}),
                   InvalidArgument);
      EXPECT_FALSE(is_sharded(net.even)) << "nothing has changed";
      fully_shard(net, mesh, {.ignore = {"odd"}, .precision = {.parameters = at::kBFloat16}});
    }
    Net net = net_of({});
    const std::vector<UnitPrecision> wrong{{.parameters = at::kLong},
                                           {.parameters = at::kComplexFloat},
                                           {.reduce = at::kBool},
                                           {.output = at::kFloat},
                                           {at::kDouble, {}, at::kFloat}};
    for (const UnitPrecision& precision : wrong)
      EXPECT_THROW(fully_shard(*net, mesh, {.precision = precision}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.unit_precision = {{"block", {.reduce = at::kFloat}}}}),
                 InvalidArgument);
    FullyShardOptions differs;
    if (manager.rank() == 1) differs.precision.reduce = at::kFloat;
    EXPECT_THROW(fully_shard(*net, mesh, differs), MismatchError);
    fully_shard(*net, mesh);
  });
}

}  // namespace tessera::test::fully_shard_precision_test
