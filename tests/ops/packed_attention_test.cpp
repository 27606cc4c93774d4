// Attention inside the documents of packed rows against its definition with a mask: on plain
// tensors, and on tensors whose tokens, rows and heads are cut over ranks. What is neither sent nor
// computed, and the balance of cut_documents().

#include "tessera/ops/attention/packed.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::packed_attention_test {
namespace {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<at::Tensor>;

struct Case {
  Shape q, k, v;
  DocumentLengths lengths;
  PackedAttentionOptions options;

  explicit Case(Draw& draw) {
    const std::int64_t rows = draw.between(1, 3), tokens = draw.between(1, 14),
                       groups = draw.between(1, 2), each = draw.chance(30) ? 2 : 1;
    options = {.causal = draw.chance(50), .grouped = each > 1};
    if (draw.chance(20)) options.scale = 0.7;
    q = {rows, groups * each, tokens, 3};
    k = {rows, groups, tokens, 3};
    v = {rows, groups, tokens, draw.between(1, 4)};
    for (std::int64_t r = draw.chance(50) ? rows : 1; r > 0; --r)
      lengths.push_back(drawn(draw, tokens));
    if (lengths.size() == 1 && draw.chance(20)) {
      for (Shape* s : {&q, &k, &v}) s->erase(s->begin());
    }
  }
  /// Often of 0 and 1, sometimes with padding after them, and sometimes none.
  static Shape drawn(Draw& draw, std::int64_t tokens) {
    Shape all;
    std::int64_t left = draw.chance(30) ? draw.below(static_cast<int>(tokens) + 1) : tokens;
    while (left > 0) {
      all.push_back(draw.chance(25) ? 0 : draw.chance(25) ? 1 : draw.between(1, int(left)));
      left -= all.back();
    }
    if (draw.chance(20)) all.push_back(0);
    return all;
  }
  std::string text() const {
    std::string t = concat("q ", list(q), " k ", list(k), " v ", list(v), " lengths");
    for (const auto& row : lengths) t += " " + list(row);
    return t + (options.causal ? " causal" : "");
  }
};

/// Which pairs of [tokens, tokens] attend.
at::Tensor seen(const Shape& lengths, std::int64_t tokens, bool causal) {
  at::Tensor all = at::zeros({tokens, tokens}, at::kBool);
  std::int64_t begin = 0;
  for (const std::int64_t n : lengths) {
    all.narrow(0, begin, n).narrow(1, begin, n).fill_(true);
    begin += n;
  }
  return causal ? all.tril() : all;
}

at::Tensor by_definition(const Values& t, const Case& c) {
  const std::int64_t tokens = t[0].size(-2), each = t[0].size(-3) / t[1].size(-3);
  Values masks;
  for (const auto& lengths : c.lengths) masks.push_back(seen(lengths, tokens, c.options.causal));
  at::Tensor mask = at::stack(masks);
  mask = t[0].dim() == 3 ? mask[0] : mask.unsqueeze(1);
  const auto heads = [&](const at::Tensor& x) { return x.repeat_interleave(each, -3); };
  const double scale = c.options.scale.value_or(1 / std::sqrt(static_cast<double>(t[0].size(-1))));
  // Finite, so that rows of padding have gradients: zeros.
  const at::Tensor scores =
      (t[0].matmul(heads(t[1]).transpose(-2, -1)) * scale).masked_fill(mask.logical_not(), -1e300);
  return at::matmul(scores.softmax(-1) * mask, heads(t[2]));
}

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

Values leaves_of(const Values& values) {
  Values all;
  for (const at::Tensor& t : values) all.push_back(t.detach().clone().requires_grad_(true));
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

// ---- what is sent, and what is computed ----

// Multiplications of batched products on this thread.
thread_local std::int64_t multiplied = 0;

std::unique_ptr<at::ObserverContext> count_products(const at::RecordFunction& call) {
  if (std::string(call.name()) == "aten::bmm")
    multiplied += call.inputs()[0].toTensor().numel() * call.inputs()[1].toTensor().size(2);
  return nullptr;
}

struct Counted {
  std::int64_t bytes = 0, products = 0;
};

/// What this rank sent and received, and multiplied.
template <class Body>
Counted counted(DistributedManager& manager, const Body& body) {
  Counted all;
  multiplied = 0;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count_products)
                                                     .needsInputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  {
    const CommTraceScope trace(manager);
    body();
    for (const auto& e : trace->events()) {
      if (e.name == "agreement") continue;  // 8 bytes: the lengths are the same on all ranks
      EXPECT_EQ(e.operation, "exchange");
      all.bytes += e.bytes;
    }
  }
  at::removeCallback(handle);
  all.products = multiplied;
  return all;
}

/// Keys of the second shard between the first and the last that queries of the first one see.
std::int64_t keys_between(const at::Tensor& pairs, const Interval& queries, const Interval& keys) {
  const at::Tensor any =
      pairs.narrow(0, queries.begin, queries.size()).narrow(1, keys.begin, keys.size()).any(0);
  const at::Tensor at = any.nonzero();
  return at.numel() == 0 ? 0 : (at.max() - at.min()).item<std::int64_t>() + 1;
}

TEST(PackedAttention, WhatNoQuerySeesIsNeitherSentNorComputed) {
  const std::int64_t heads = 2, width = 3, of_values = 5;
  on_ranks(4, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh(mapped({{"context", 4}}));
    Draw draw(31);
    for (int i = 0; i < 24; ++i) {
      const std::int64_t tokens = draw.between(8, 40);
      const Sizes sizes = draw.sizes(tokens, 4);
      // The first ones end where shards do.
      const Shape lengths = i < 4 ? Shape(sizes) : Case::drawn(draw, tokens);
      const bool causal = i % 2 == 1;
      const at::Tensor pairs = seen(lengths, tokens, causal);
      const auto shard = [&](std::int64_t channels) {
        const Shape shape{1, heads, tokens, channels};
        return leaf(randn(shape), ShardSpec(mesh, shape, {Shard(2)}, {{2, sizes}}));
      };
      const at::Tensor q = shard(width), k = shard(width), v = shard(of_values);
      const int me = mesh.coordinate()[0];
      const Partition parts(sizes);
      std::int64_t rows = 0;
      for (int other = 0; other < 4; ++other) {
        if (other == me) continue;
        rows += keys_between(pairs, parts.interval(me), parts.interval(other)) +
                keys_between(pairs, parts.interval(other), parts.interval(me));
      }
      if (i < 4) {
        EXPECT_EQ(rows, 0);
      }
      at::Tensor y;
      const Counted forward =
          counted(manager, [&] { y = packed_attention(q, k, v, {lengths}, {.causal = causal}); });
      EXPECT_EQ(forward.bytes, rows * heads * (width + of_values) * 4)
          << list(lengths) << " over " << list(sizes);
      const Interval mine = parts.interval(me);
      if (!causal) {
        EXPECT_EQ(forward.products,
                  pairs.narrow(0, mine.begin, mine.size()).sum().item<std::int64_t>() * heads *
                      (width + of_values));
      }
      // Keys and values again, and their gradients on the way back, in the dtype of sums: float.
      const at::Tensor along = distribute_tensor(at::ones(y.sizes()), spec(y));
      const Counted backward = counted(manager, [&] { y.backward(along); });
      EXPECT_EQ(backward.bytes, 2 * forward.bytes);
    }
  });
}

// Of what is multiplied, and not of a formula alone.
TEST(PackedAttention, CutsByCostComputeAlike) {
  on_ranks(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"context", 4}});
    Draw draw(77);
    double worst = 1, of_even = 1;
    for (int i = 0; i < 4; ++i) {
      Shape lengths;
      // One long document among short ones, as they come.
      for (int n = 0; n < 24; ++n) lengths.push_back(draw.between(1, 60));
      lengths[draw.below(24)] = 4000;
      const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
      const bool causal = i % 2 == 0;
      const auto cut = cut_documents({lengths}, 4, {.causal = causal});
      const auto measured = [&](const Sizes& sizes) {
        const Shape shape{1, 1, tokens, 2};
        const at::Tensor x =
            leaf(randn(shape), ShardSpec(mesh, shape, {Shard(2)}, {{2, sizes}}), false);
        const auto products = counted(manager, [&] {
                                packed_attention(x, x, x, {lengths}, {.causal = causal});
                              }).products;
        const at::Tensor most = at::full({1}, products, at::kLong), all = most.clone();
        manager.world().all_reduce(most, ReduceOp::max);
        manager.world().all_reduce(all);
        return 4 * most.item<double>() / all.item<double>();
      };
      const double got = measured(cut.sizes), even = measured(Partition::even(tokens, 4).sizes());
      EXPECT_LT(got, 1.15) << list(lengths) << " cut into " << list(cut.sizes);
      EXPECT_GT(even, got);
      worst = std::max(worst, got);
      of_even = std::max(of_even, even);
    }
    EXPECT_GT(of_even, 1.5) << "beside " << worst << ": the draws are balanced by themselves";
  });
}

// ---- heads over another axis ----

TEST(PackedAttention, HeadsInWholeGroupsStayWhereTheyAre) {
  on_ranks(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh(mapped({{"context", 2}, {"tensor", 2}}));
    const Shape of_q{2, 6, 9, 4}, of_k{2, 3, 9, 4};
    const Sizes tokens{7, 2};
    const auto lies = [&](const Shape& shape, Sizes heads) {
      return ShardSpec(mesh, shape, {Shard(2), Shard(1)}, {{1, std::move(heads)}, {2, tokens}});
    };
    for (const bool causal : {false, true}) {
      Draw draw(3);
      Case c(draw);
      c.lengths = {{4, 0, 5}, {8}};
      c.options = {.causal = causal, .grouped = true};
      const Values values{randn(of_q, at::kDouble), randn(of_k, at::kDouble),
                          randn(of_k, at::kDouble)};
      const Values plain = leaves_of(values);
      const Values x{leaf(values[0], lies(of_q, {4, 2})), leaf(values[1], lies(of_k, {2, 1})),
                     leaf(values[2], lies(of_k, {2, 1}))};
      const at::Tensor expected = by_definition(plain, c);
      const Counted all = counted(manager, [&] {
        const at::Tensor y = packed_attention(x[0], x[1], x[2], c.lengths, c.options);
        EXPECT_EQ(spec(y), spec(x[0]));
        EXPECT_LT(difference(to_local(y.detach()),
                             to_local(distribute_tensor(expected.detach(), spec(y)))),
                  1e-12);
        y.backward(distribute_tensor(at::ones(of_q, at::kDouble), spec(y)));
      });
      EXPECT_GT(all.bytes, 0);
      expected.sum().backward();
      for (int j = 0; j < 3; ++j) EXPECT_LT(difference(x[j].grad(), plain[j].grad()), 1e-11) << j;
      // So do those of a ring without documents.
      const auto again = counted(manager, [&] {
        at::scaled_dot_product_attention(x[0], x[1], x[2], std::nullopt, 0, causal, std::nullopt,
                                         true)
            .sum();
      });
      EXPECT_GT(again.bytes, 0);
    }
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
