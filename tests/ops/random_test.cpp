// Random numbers do not depend on where they are drawn.

#include "support.h"
#include "tessera/ops/random/philox.h"

namespace tessera::test {

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
        const auto mesh = manager.mesh(draw.axes(ranks));
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

}  // namespace tessera::test
