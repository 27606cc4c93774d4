// Attention inside the documents of packed rows against its definition with a mask: on plain
// tensors, and on tensors whose tokens, rows and heads are cut over ranks.

#include "tessera/ops/attention/packed.h"

#include <ATen/autocast_mode.h>

#include <limits>

#include "packed_case.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::packed_attention_test {
namespace {

/// The value, its gradients along `along`, and, if `twice`, those of the sum of their squares.
Values derivatives(const at::Tensor& y, const Values& inputs, const at::Tensor& along, bool twice) {
  Values all = torch::autograd::grad({y}, inputs, {along}, twice, twice);
  if (twice) {
    at::Tensor sum = all[0].square().sum();
    for (std::size_t i = 1; i < all.size(); ++i) sum = sum + all[i].square().sum();
    for (const at::Tensor& t : torch::autograd::grad({sum}, inputs)) all.push_back(t);
  }
  all.push_back(y);
  return all;
}

class Packed : public ::testing::TestWithParam<int> {};

TEST_P(Packed, EqualsItsDefinition) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    Draw draw(500 + static_cast<std::uint64_t>(ranks));
    for (int i = 0; i < (process() ? 12 : 80); ++i) {
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const Case c(draw);
      seed(static_cast<std::uint64_t>(i));
      const Values values{randn(c.q, at::kDouble), randn(c.k, at::kDouble),
                          randn(c.v, at::kDouble)};
      Shape result = c.q;
      result.back() = c.v.back();
      const at::Tensor along = randn(result, at::kDouble);
      // Mostly the tokens over the last axis, and heads or rows over others, as it is meant.
      const int tokens = static_cast<int>(c.q.size()) - 2;
      const bool meant = draw.chance(70);
      std::vector<Placement> placements(mesh.mesh().dims(), Replicate());
      for (Placement& p : placements) p = Shard(draw.below(tokens + 1));
      placements.back() = Shard(tokens);
      int parts = 1;
      for (std::size_t a = 0; a < placements.size(); ++a)
        parts *= placements[a].is_shard(tokens) ? mesh.mesh().axes()[a].size : 1;
      const ShardSizes cut{{tokens, draw.sizes(c.q[tokens], parts)}};
      Values x;
      std::string where = c.text();
      for (const at::Tensor& t : values) {
        const Shape shape = t.sizes().vec();
        const bool alike = meant && (x.empty() || draw.chance(80));
        x.push_back(
            leaf(t, alike ? ShardSpec(mesh, shape, placements, cut) : draw.spec(mesh, shape)));
        where += concat(" ", spec(x.back()));
      }
      const bool twice = i % 3 == 0 && meant;
      const Values plain = leaves_of(values);
      const auto expected = derivatives(by_definition(plain, c), plain, along, twice);
      const at::Tensor y = packed_attention(x[0], x[1], x[2], c.lengths, c.options);
      // A sequence that is whole goes libtorch's way, which has no second derivative.
      const bool ring = spec(y).is_sharded(tokens) && ranks > 1;
      const auto got = derivatives(y, x, distribute_tensor(along, spec(y)), twice && ring);
      for (std::size_t j = 0; j + 1 < got.size(); ++j)
        ASSERT_LT(difference(got[j], expected[j], 1e-3), 1e-10) << "gradient " << j << " " << where;
      ASSERT_LT(difference(y, expected.back(), 1e-3), 1e-12) << where;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Packed, ::testing::Values(1, 2, 3, 4));

// Documents of which a rank computes many queries, block by block, while keys come and sums leave.
TEST(PackedAttention, LongDocumentsOverAllRanks) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh(mapped({{"context", ranks}}));
      Draw draw(60 + static_cast<std::uint64_t>(ranks));
      const Shape shape{2, 1, 800, 2};
      for (int i = 0; i < 6; ++i) {
        const DocumentLengths lengths{{800}, {10, 500, 3, 287}};
        const PackedAttentionOptions options{.causal = i % 2 == 0};
        const auto cut = cut_documents(lengths, ranks, {.causal = options.causal}).sizes;
        const ShardSpec lies(mesh, shape, {Shard(2)},
                             {{2, i < 2 ? cut : draw.sizes(shape[2], ranks)}});
        Values plain, x;
        for (int j = 0; j < 3; ++j) {
          plain.push_back(randn(shape, at::kDouble).requires_grad_(true));
          x.push_back(leaf(plain.back(), lies));
        }
        const at::Tensor along = randn(shape, at::kDouble),
                         expected =
                             packed_attention(plain[0], plain[1], plain[2], lengths, options),
                         y = packed_attention(x[0], x[1], x[2], lengths, options);
        ASSERT_LT(difference(y, expected), 1e-12) << list(lies.sizes().at(2));
        expected.backward(along);
        y.backward(distribute_tensor(along, lies));
        for (int j = 0; j < 3; ++j)
          ASSERT_LT(difference(x[j].grad(), plain[j].grad()), 1e-11)
              << "gradient " << j << " " << list(lies.sizes().at(2));
      }
    });
  }
}

TEST(PackedAttention, OfPlainTensorsEqualsItsDefinition) {
  Draw draw(7);
  for (int i = 0; i < 60; ++i) {
    const Case c(draw);
    const Values values{randn(c.q, at::kDouble), randn(c.k, at::kDouble), randn(c.v, at::kDouble)},
        expected_of = leaves_of(values), x = leaves_of(values);
    const at::Tensor expected = by_definition(expected_of, c),
                     along = randn(expected.sizes(), at::kDouble),
                     got = packed_attention(x[0], x[1], x[2], c.lengths, c.options);
    ASSERT_LT(difference(got, expected, 1e-3), 1e-12) << c.text();
    got.backward(along);
    expected.backward(along);
    for (int j = 0; j < 3; ++j) {
      const at::Tensor g = x[j].grad().defined() ? x[j].grad() : at::zeros_like(x[j]);
      ASSERT_LT(difference(g, expected_of[j].grad(), 1e-3), 1e-12) << j << " " << c.text();
    }
  }
}

TEST(PackedAttention, PaddingIsNotRead) {
  at::Tensor x = randn({1, 1, 6, 2}, at::kDouble);
  x.narrow(2, 4, 2).fill_(std::numeric_limits<double>::quiet_NaN());
  const auto check = [&](const at::Tensor& t) {
    const at::Tensor y = packed_attention(t, t, t, {{3, 1}});
    y.sum().backward();
    for (const at::Tensor& all : {whole(y), whole(t.grad())}) {
      EXPECT_TRUE(all.isfinite().all().item<bool>()) << all;
      EXPECT_EQ(all.narrow(2, 4, 2).abs().max().item<double>(), 0);
    }
  };
  check(x.clone().requires_grad_(true));
  on_ranks(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"context", 2}});
    check(leaf(x, ShardSpec(mesh, {1, 1, 6, 2}, {Shard(2)}, {{2, {5, 1}}})));
  });
}

TEST(PackedAttention, DropsByTheGlobalIndex) {
  for (const int ranks : {2, 3}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh({{"x", ranks}});
      Draw draw(9);
      const Shape shape{3, 2, 11, 3};
      const DocumentLengths lengths{{5, 6}, {11}, {0, 1, 7}};
      const at::Tensor value = randn(shape, at::kDouble), along = randn(shape, at::kDouble);
      Values first;
      for (int i = 0; i < 5; ++i) {
        const at::Tensor x = leaf(
            value, i == 0   ? ShardSpec::replicated(mesh, shape)
                   : i == 1 ? ShardSpec(mesh, shape, {Shard(0)}, {{0, draw.sizes(3, ranks)}})
                            : ShardSpec(mesh, shape, {Shard(2)}, {{2, draw.sizes(11, ranks)}}));
        manual_seed(manager, 4);
        const at::Tensor y = packed_attention(x, x, x, lengths, {.causal = true, .dropout = 0.4});
        const Values got = derivatives(y, {x}, distribute_tensor(along, spec(y)), true);
        if (i == 0) first = got;
        for (std::size_t j = 0; j < got.size(); ++j)
          EXPECT_LT(difference(got[j], first[j]), 1e-11) << i << " " << j;
      }
      const at::Tensor without = packed_attention(value, value, value, lengths, {.causal = true});
      EXPECT_GT(difference(first.back(), without), 0.05) << "nothing was dropped";
    });
  }
}

TEST(PackedAttention, AutocastCastsAndHalfPrecisionSumsInFloat) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"context", 2}});
    const Shape shape{1, 2, 40, 8};
    const at::Tensor value = randn(shape);
    const at::Tensor x = leaf(value, ShardSpec(mesh, shape, {Shard(2)}, {{2, {30, 10}}}));
    const at::Tensor expected = packed_attention(value, value, value, {{25, 15}});
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const at::Tensor y = packed_attention(x, x, x, {{25, 15}});
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_LT(difference(y.to(at::kFloat), expected), 0.02);
    y.to(at::kFloat).sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  });
}

// Such as would send the same numbers of rows, and such as fit on one rank alone.
TEST(PackedAttention, DocumentsThatRanksDoNotShareAreTold) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"context", 2}});
    const at::Tensor x = distribute_tensor(at::ones({1, 1, 8, 2}), mesh, {Shard(2)});
    const std::int64_t mine = manager.rank();
    EXPECT_THROW(packed_attention(x, x, x, {{6 - mine, 2 + mine}}), MismatchError);
    EXPECT_THROW(packed_attention(x, x, x, {{8 + mine}}), MismatchError);
    EXPECT_THROW(packed_attention(x, x, x, {{8}}, {.causal = mine == 1}), MismatchError);
    EXPECT_THROW(packed_attention(x, x, x, {{8}}, {.scale = mine ? 0.125 : 0.12500001}),
                 MismatchError);
    Shape many(40, 0);  // more than a message shows
    many[38] = 6 - mine;
    many[39] = 2 + mine;
    EXPECT_THROW(packed_attention(x, x, x, {many}), MismatchError);
    EXPECT_EQ(packed_attention(x, x, x, {{6, 2}}).sizes(), x.sizes());
  });
}

TEST(PackedAttention, RefusesWhatDoesNotFit) {
  const at::Tensor x = at::ones({2, 2, 6, 3});
  const auto refuse = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const DocumentLengths& lengths, const PackedAttentionOptions& options,
                         const std::string& says) {
    try {
      packed_attention(q, k, v, lengths, options);
      ADD_FAILURE() << "no error that says " << says;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(says), std::string::npos) << e.what();
    }
  };
  const auto all = [&](const at::Tensor& t) {
    refuse(t, t, t, {{4, 3}}, {}, "longer than the row of 6 tokens");
    refuse(t, t, t, {{std::int64_t{1} << 62, std::int64_t{1} << 62, 6}}, {}, "longer than the row");
    refuse(t, t, t, {{4, -1}}, {}, "a document of -1 tokens");
    refuse(t, t, t, {{4}, {3}, {2}}, {}, "lengths of 3");
    refuse(t, t, t, {}, {}, "lengths of 0");
    refuse(t, t, t, {{6}}, {.dropout = 2}, "dropout of 2");
    refuse(t, t, at::Tensor(), {{6}}, {}, "give q, k and v of [rows");
    refuse(t, t.select(0, 0), t, {{6}}, {}, "give q, k and v of [rows");
    refuse(t, t, t.to(at::kDouble), {{6}}, {}, "give one floating-point type");
    refuse(t, t.narrow(1, 0, 1), t.narrow(1, 0, 1), {{6}}, {}, "if grouped");
    refuse(t.narrow(1, 0, 0), t, t, {{6}}, {.grouped = true}, "if grouped");
    refuse(t, t, t.narrow(2, 0, 5), {{5}}, {}, "they differ in v's channels at most");
  };
  all(x);
  on_ranks(2, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"context", 2}});
    all(distribute_tensor(x, mesh, {Shard(2)}));
    // What moves by itself is for the policy to say.
    set_policies(manager, {.redistribution = Policy::error});
    const at::Tensor q = distribute_tensor(x, ShardSpec(mesh, {2, 2, 6, 3}, {Shard(2)})),
                     k = distribute_tensor(
                         x, ShardSpec(mesh, {2, 2, 6, 3}, {Shard(2)}, {{2, {1, 5}}}));
    EXPECT_THROW(packed_attention(q, k, k, {{6}}), ImplicitRedistributionError);
  });
}

}  // namespace
}  // namespace tessera::test::packed_attention_test
