// Random numbers do not depend on where they are drawn.

#include "support.h"
#include "tessera/ops/random/detail/draws.h"

namespace tessera::test::random_test {

TEST(Philox, PublishedVectors) {
  // From the known-answer tests of Random123.
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(detail::philox({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(
      detail::philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      detail::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, SameNumbersWhateverThePlacement) {
  const std::vector<std::int64_t> shape{5, 7};
  const auto draws = [&](DistributedManager& manager, const ShardSpec& spec) {
    manual_seed(manager, 42);
    const at::Tensor x = zeros(spec, at::kDouble);
    std::vector<at::Tensor> all{x.clone().uniform_(-1, 2), x.clone().normal_(3, 0.5),
                                x.clone().bernoulli_(0.3), at::rand_like(x),
                                at::randn_like(x),         at::dropout(x + 1, 0.4, true),
                                at::bernoulli(x + 0.5),    at::rand_like(x.to(at::kFloat))};
    for (at::Tensor& t : all) t = whole(t);
    return all;
  };
  std::vector<at::Tensor> expected;
  on_threads(1, [&](DistributedManager& manager) {
    expected = draws(manager, ShardSpec::replicated(manager.mesh({{"x", 1}}), shape));
  });
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(ranks);
      for (int i = 0; i < 10; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const ShardSpec spec = draw.spec(mesh, shape, false);
        const auto got = draws(manager, spec);
        for (std::size_t k = 0; k < got.size(); ++k)
          EXPECT_TRUE(got[k].equal(expected[k])) << "draw " << k << " with " << spec;
      }
    });
  }
}

TEST(Random, HasTheMomentsOfItsDistribution) {
  on_threads(2, [](DistributedManager& manager) {
    const ShardSpec spec(manager.mesh({{"x", 2}}), {200000}, {Shard(0)});
    const at::Tensor x = zeros(spec, at::kDouble);
    const auto mean = [](const at::Tensor& t) { return whole(t.mean()).item<double>(); };
    const at::Tensor u = at::rand_like(x), n = at::randn_like(x), b = x.clone().bernoulli_(0.25);
    // Five standard errors.
    EXPECT_NEAR(mean(u), 0.5, 5 * std::sqrt(1.0 / 12 / 200000));
    EXPECT_NEAR(mean(n), 0, 5 * std::sqrt(1.0 / 200000));
    EXPECT_NEAR(mean(n * n), 1, 5 * std::sqrt(2.0 / 200000));
    EXPECT_NEAR(mean(n.pow(4)), 3, 5 * std::sqrt(96.0 / 200000));
    EXPECT_NEAR(mean(b), 0.25, 5 * std::sqrt(0.1875 / 200000));
    EXPECT_GE(whole(u.min()).item<double>(), 0);
    EXPECT_LT(whole(u.max()).item<double>(), 1);
  });
}

TEST(Random, DropoutScalesItsGradient) {
  on_threads(2, [](DistributedManager& manager) {
    const ShardSpec spec(manager.mesh({{"x", 2}}), {100}, {Shard(0)});
    const at::Tensor x = ones(spec, at::TensorOptions(at::kDouble).requires_grad(true));
    const at::Tensor y = at::dropout(x, 0.4, true);
    y.sum().backward();
    EXPECT_EQ(difference(x.grad(), y), 0);
  });
}

TEST(Random, RefusesWhatItCannotHonour) {
  on_threads(1, [](DistributedManager& manager) {
    const at::Tensor x = zeros(ShardSpec::replicated(manager.mesh({{"x", 1}}), {3}));
    EXPECT_THROW(x.uniform_(0, 1, generator()), ShardingError);
  });
}

TEST(Random, BernoulliOfATensorOfProbabilities) {
  std::vector<at::Tensor> drawn;
  for (const int ranks : {1, 2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
      manual_seed(manager, 3);
      const at::Tensor p = at::tensor({0.0, 1.0, 0.5, 0.5}, at::kDouble);
      const at::Tensor x = distribute_tensor(at::zeros({5, 4}), mesh, {Shard(0)});
      x.bernoulli_(p);
      const at::Tensor all = full_tensor(x);
      EXPECT_EQ(all.select(1, 0).sum().item<double>(), 0);
      EXPECT_EQ(all.select(1, 1).sum().item<double>(), 5);
      const at::Tensor one = distribute_tensor(at::zeros({6}), mesh, {Shard(0)});
      one.bernoulli_(at::tensor(1.0, at::kDouble));
      EXPECT_EQ(full_tensor(one).sum().item<double>(), 6);
      if (manager.rank() == 0) drawn.push_back(all);
    });
  }
  for (const at::Tensor& d : drawn) EXPECT_TRUE(d.equal(drawn[0]));
}

// Categories by their weights: rows may be sharded, and a row's categories too.
TEST(Random, CategoriesByTheirWeights) {
  const std::int64_t rows = 3000;
  const at::Tensor weights =
      at::tensor({1.0, 0.0, 3.0, 0.0, 4.0, 0.0}, at::kDouble).expand({rows, 6}).contiguous();
  std::vector<at::Tensor> expected;
  for (const int ranks : {1, 2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh({{"x", ranks}});
      for (const Placement& placement :
           {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
        manual_seed(manager, 5);
        const at::Tensor p = distribute_tensor(weights, mesh, {placement});
        const std::vector<at::Tensor> drawn = {at::multinomial(p, 4, true), at::multinomial(p, 3),
                                               at::multinomial(p.select(0, 7), 1)};
        std::vector<at::Tensor> got;
        for (const at::Tensor& t : drawn) got.push_back(whole(t));
        if (placement.is_shard(0)) {
          EXPECT_TRUE(spec(drawn[0]).is_sharded(0));
        }
        if (expected.empty()) expected = got;
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
      }
    });
  }
  const at::Tensor with = expected[0], without = expected[1];
  for (const int never : {1, 3, 5}) EXPECT_FALSE(with.eq(never).any().item<bool>()) << never;
  const double n = 4.0 * static_cast<double>(rows);
  const auto near = [](const at::Tensor& is, double share, double of) {
    EXPECT_NEAR(is.sum().item<double>() / of, share, 5 * std::sqrt(share * (1 - share) / of));
  };
  near(with.eq(0), 1.0 / 8, n);
  near(with.eq(2), 3.0 / 8, n);
  // Without replacement all three that can be drawn are, the heaviest first with its own share.
  EXPECT_TRUE(
      std::get<0>(without.sort(1)).equal(at::tensor({0, 2, 4}, at::kLong).expand({rows, 3})));
  near(without.select(1, 0).eq(4), 0.5, static_cast<double>(rows));
  near(without.select(1, 1).eq(0), 3.0 / 8 * 1 / 5 + 4.0 / 8 * 1 / 4, static_cast<double>(rows));
}

TEST(Random, CategoriesAreRefusedAsPlainLibtorchRefuses) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const auto put = [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {Shard(0)}); };
    for (const auto& [p, count, replacement] :
         std::vector<std::tuple<at::Tensor, int, bool>>{{at::ones({4, 3}), 4, false},
                                                        {at::ones({4, 3}), 0, true},
                                                        {at::ones({4, 3}, at::kLong), 2, true},
                                                        {at::ones({2, 4, 3}), 2, true},
                                                        {at::zeros({4, 3}), 2, true},
                                                        {at::ones({4, 3}) * -1, 2, true},
                                                        {at::full({4, 3}, NAN), 2, false}}) {
      EXPECT_ANY_THROW(at::multinomial(p, count, replacement)) << p;
      EXPECT_ANY_THROW(at::multinomial(put(p), count, replacement)) << p;
      EXPECT_EQ(full_tensor(put(at::ones({3}))).sum().item<double>(), 3)
          << "the ranks cannot go on";
    }
  });
}

TEST(Random, NormalNumbersOfTensors) {
  on_threads(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor mean =
        leaf(at::full({2, 50000}, 3.0, at::kDouble), ShardSpec(mesh, {2, 50000}, {Shard(1)}));
    const at::Tensor deviation =
        distribute_tensor(at::tensor({0.0, 2.0}, at::kDouble).view({2, 1}), mesh, {Replicate()});
    const at::Tensor drawn = at::normal(mean, deviation), all = full_tensor(drawn.detach());
    EXPECT_TRUE(all[0].eq(3).all().item<bool>());
    EXPECT_NEAR(all[1].mean().item<double>(), 3, 5 * 2 / std::sqrt(50000.0));
    EXPECT_NEAR(all[1].std().item<double>(), 2, 5 * 2 / std::sqrt(1e5));
    drawn.sum().backward();  // libtorch's gradient of a draw
    EXPECT_EQ(difference(mean.grad(), at::zeros({2, 50000}, at::kDouble)), 0);
    EXPECT_ANY_THROW(at::normal(mean, deviation - 1));
    EXPECT_ANY_THROW(at::normal(mean, -1.0));
    EXPECT_EQ(whole(at::normal(mean.detach(), 0.0)).mean().item<double>(), 3);
    EXPECT_EQ(whole(at::normal(3.0, deviation)).sizes(), (std::vector<std::int64_t>{2, 1}));
  });
}

}  // namespace tessera::test::random_test
