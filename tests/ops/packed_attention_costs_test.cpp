// What attention inside the documents of packed rows sends and multiplies, and what it does not;
// the balance of cut_documents() too.

#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>

#include "packed_case.h"
#include "tessera/comm/group/trace.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::packed_attention_test {
namespace {

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

}  // namespace
}  // namespace tessera::test::packed_attention_test
