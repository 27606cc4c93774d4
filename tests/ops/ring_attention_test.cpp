// Attention over a sharded sequence.

#include <cmath>
#include <limits>

#include <ATen/record_function.h>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::ring_attention_test {

namespace {

using Shape = std::vector<std::int64_t>;

}  // namespace

TEST(RingAttention, EqualsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(20 + ranks);
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::int64_t batch = draw.between(1, 2), groups = draw.between(1, 2),
                           rows = draw.between(1, 9), columns = draw.between(1, 9),
                           width = draw.between(1, 4);
        const bool grouped = draw.chance(30);
        const std::int64_t heads = groups * (grouped ? 2 : 1);
        const Shape qs = {batch, heads, rows, width}, ks = {batch, groups, columns, width},
                    vs = {batch, groups, columns, draw.between(1, 4)};
        test::seed(i);
        std::vector<at::Tensor> values = {randn(qs, at::kDouble), randn(ks, at::kDouble),
                                          randn(vs, at::kDouble)};
        const int mask_kind = draw.below(4);  // none, causal, additive, boolean
        at::Tensor mask;
        if (mask_kind == 2)
          mask = randn(draw.chance(50) ? Shape{rows, columns} : Shape{batch, 1, rows, columns},
                       at::kDouble);
        if (mask_kind == 3)
          mask =
              test::rand(draw.chance(50) ? Shape{rows, columns} : Shape{batch, heads, 1, columns},
                         at::kDouble)
                  .gt(0.3);
        const auto f = [&](const std::vector<at::Tensor>& t) {
          return at::scaled_dot_product_attention(
              t[0], t[1], t[2], t.size() > 3 ? std::optional<at::Tensor>(t[3]) : std::nullopt, 0.0,
              mask_kind == 1, std::nullopt, grouped);
        };
        if (mask.defined()) values.push_back(mask);
        std::vector<at::Tensor> plain, x;
        const ShardSizes uneven = {{2, draw.sizes(rows, ranks)}},
                         uneven_keys = {{2, draw.sizes(columns, ranks)}};
        std::string where = concat("mask ", mask_kind, " grouped ", grouped);
        for (std::size_t j = 0; j < values.size(); ++j) {
          plain.push_back(values[j].clone());
          if (at::isFloatingType(values[j].scalar_type())) plain.back().requires_grad_(true);
          // Half of the time along the sequence on one axis, as it is meant; else anyhow.
          if (draw.chance(50) && j < 3 && mesh.mesh().dims() == 1) {
            x.push_back(leaf(values[j], ShardSpec(mesh, values[j].sizes().vec(), {Shard(2)},
                                                  j == 0 ? uneven : uneven_keys)));
          } else if (j == 3 && draw.chance(30)) {
            x.push_back(plain.back().detach().clone().requires_grad_(plain.back().requires_grad()));
          } else {
            x.push_back(leaf(values[j], draw.spec(mesh, values[j].sizes().vec(), j < 3)));
          }
          where += is_sharded(x.back()) ? concat(" ", spec(x.back())) : " plain";
        }
        const at::Tensor expected = f(plain), along = randn(expected.sizes(), at::kDouble);
        (expected * along).sum().backward();
        const at::Tensor got = f(x);
        ASSERT_LT(difference(got, expected), 1e-10) << where;
        (got * along).sum().backward();
        for (std::size_t j = 0; j < x.size(); ++j) {
          if (!plain[j].requires_grad()) continue;
          ASSERT_TRUE(x[j].grad().defined()) << where;
          ASSERT_LT((whole(x[j].grad()) - plain[j].grad()).abs().max().item<double>(), 1e-10)
              << where << " gradient " << j;
        }
      }
    });
  }
}

// Beside its definition: libtorch's fused kernel gives zeros for some scores that are NaN.
TEST(RingAttention, NanAndInfinitiesAreThoseOfItsDefinition) {
  for (const int ranks : {2, 3}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh({{"x", ranks}});
      Draw draw(50 + ranks);
      for (int i = 0; i < 60; ++i) {
        const std::int64_t rows = draw.between(1, 5), columns = draw.between(2, 7);
        test::seed(i);
        std::vector<at::Tensor> values = {randn({1, 2, rows, 3}, at::kDouble),
                                          randn({1, 2, columns, 3}, at::kDouble),
                                          randn({1, 2, columns, 3}, at::kDouble)};
        constexpr double inf = std::numeric_limits<double>::infinity();
        for (int n = draw.between(1, 4); n > 0; --n) {
          at::Tensor place = values[draw.below(3)].view({-1});
          place = place[draw.below(static_cast<int>(place.numel()))];
          place.fill_(draw.chance(30)   ? std::numeric_limits<double>::quiet_NaN()
                      : draw.chance(50) ? inf
                                        : -inf);
        }
        const at::Tensor scores =
            values[0].mul(1.0 / std::sqrt(3.0)).matmul(values[1].transpose(-2, -1));
        const at::Tensor expected = at::_safe_softmax(scores, -1).matmul(values[2]);
        std::vector<at::Tensor> x;
        for (const at::Tensor& t : values)
          x.push_back(leaf(
              t, ShardSpec(mesh, t.sizes().vec(), {Shard(2)}, {{2, draw.sizes(t.size(2), ranks)}}),
              false));
        const at::Tensor got = at::scaled_dot_product_attention(x[0], x[1], x[2]);
        ASSERT_LT(difference(got, expected), 1e-12) << i << ": " << whole(got) << expected;
      }
    });
  }
}

TEST(RingAttention, NobodyHoldsTheWholeSequence) {
  on_ranks(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"x", 4}});
    const Shape shape = {1, 2, 64, 8};
    const ShardSpec lies(mesh, shape, {Shard(2)}, {{2, {40, 0, 20, 4}}});
    const at::Tensor q = leaf(randn(shape), lies), k = leaf(randn(shape), lies),
                     v = leaf(randn(shape), lies);
    std::int64_t bytes = 0;
    {
      const CommTraceScope trace(manager);
      const at::Tensor y = at::scaled_dot_product_attention(q, k, v);
      EXPECT_EQ(spec(y), lies);
      for (const auto& e : trace->events()) {
        EXPECT_EQ(e.operation, "exchange");
        bytes += e.bytes;
      }
      y.sum().backward();
    }
    EXPECT_EQ(spec(k.grad()), lies);
    const at::Tensor total = at::full({1}, bytes, at::kLong);
    mesh.all().all_reduce(total);
    EXPECT_EQ(total.item<std::int64_t>(), 2 * 3 * 2 * 2 * 64 * 8 * 4)
        << "both sides count: each key and value goes to three other ranks";
    // Second derivatives pass keys and values too, and third ones are refused, not zero.
    const auto y = at::scaled_dot_product_attention(q, k, v);
    const auto g = torch::autograd::grad({y.square().sum()}, {q}, {}, true, true)[0];
    const CommTraceScope trace(manager);
    const auto second = torch::autograd::grad({(g * g).sum()}, {q}, {}, true, true)[0];
    EXPECT_EQ(spec(second), lies);
    for (const auto& e : trace->events()) EXPECT_TRUE(e.operation != "all_gather") << e.operation;
    EXPECT_THROW(torch::autograd::grad({(second * second).sum()}, {q}), ShardingError);
  });
}

namespace {

struct RingCase {
  int mask = 0;  // none, causal, additive, boolean
  bool grouped = false;
  double dropout = 0;
};

// libtorch's fused kernels have no second derivative: the definition.
at::Tensor attention_by_definition(const std::vector<at::Tensor>& t, const RingCase& c) {
  const auto heads = [&](const at::Tensor& x) {
    return c.grouped ? x.repeat_interleave(t[0].size(1) / x.size(1), 1) : x;
  };
  const double nothing = -std::numeric_limits<double>::infinity();
  at::Tensor s = at::matmul(t[0], heads(t[1]).transpose(-2, -1)) /
                 std::sqrt(static_cast<double>(t[0].size(-1)));
  if (c.mask == 1)
    s = s.masked_fill(at::ones({s.size(-2), s.size(-1)}, at::kBool).tril().logical_not(), nothing);
  if (c.mask == 2) s = s + t[3];
  if (c.mask == 3) s = s.masked_fill(t[3].logical_not(), nothing);
  return at::matmul(s.softmax(-1), heads(t[2]));
}

at::Tensor test_draw(const DeviceMesh& mesh) {
  return tessera::rand(ShardSpec::replicated(mesh, {5}), at::kDouble);
}

at::Tensor attention_of(const std::vector<at::Tensor>& t, const RingCase& c) {
  return at::scaled_dot_product_attention(
      t[0], t[1], t[2], c.mask > 1 ? std::optional<at::Tensor>(t[3]) : std::nullopt, c.dropout,
      c.mask == 1, std::nullopt, c.grouped);
}

// The value, its gradients along `along`, and the gradients of the sum of their squares, by all
// inputs and by `along`.
std::vector<at::Tensor> second_derivatives(const at::Tensor& y, std::vector<at::Tensor> inputs,
                                           const at::Tensor& along) {
  std::erase_if(inputs, [](const at::Tensor& t) { return !t.requires_grad(); });
  std::vector<at::Tensor> all = torch::autograd::grad({y}, inputs, {along}, true, true);
  at::Tensor sum = all[0].square().sum();
  for (std::size_t i = 1; i < all.size(); ++i) sum = sum + all[i].square().sum();
  inputs.push_back(along);
  for (const at::Tensor& t : torch::autograd::grad({sum}, inputs)) all.push_back(t);
  all.push_back(y);
  return all;
}

}  // namespace

TEST(RingAttention, SecondDerivativesEqualOneProcess) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(70 + ranks);
      for (int i = 0; i < 24; ++i) {
        const RingCase c{i % 4, draw.chance(30)};
        const bool two_axes = ranks == 4 && draw.chance(50);
        const auto mesh = manager.mesh(two_axes ? std::vector<Axis>{{"a", 2}, {"b", 2}}
                                                : std::vector<Axis>{{"a", ranks}});
        const std::int64_t batch = draw.between(1, 2), groups = draw.between(1, 2),
                           rows = draw.between(2, 9), columns = draw.between(2, 9);
        const Shape qs = {batch, groups * (c.grouped ? 2 : 1), rows, 3},
                    ks = {batch, groups, columns, 3}, vs = {batch, groups, columns, 2},
                    os = {qs[0], qs[1], rows, 2};
        test::seed(i);
        std::vector<at::Tensor> values = {randn(qs, at::kDouble), randn(ks, at::kDouble),
                                          randn(vs, at::kDouble)};
        if (c.mask == 2) values.push_back(randn({batch, 1, rows, columns}, at::kDouble));
        if (c.mask == 3) {
          values.push_back(test::rand({rows, columns}, at::kDouble).gt(0.3));
          values.back().select(1, 0).fill_(true);  // each query sees a key
        }
        const at::Tensor along = randn(os, at::kDouble);
        // Keys along the sequence, or replicated while the queries are sharded.
        const bool keys_too = draw.chance(75);
        const auto lies = [&](const Shape& shape, bool sharded, const Sizes& sizes) {
          std::vector<Placement> placements(two_axes ? 2 : 1, Replicate());
          if (two_axes) placements[0] = Shard(0);
          if (sharded) placements.back() = Shard(2);
          return ShardSpec(mesh, shape, placements,
                           sharded ? ShardSizes{{2, sizes}} : ShardSizes{});
        };
        const int parts = two_axes ? 2 : ranks;
        const Sizes of_rows = draw.sizes(rows, parts), of_keys = draw.sizes(columns, parts);
        std::vector<at::Tensor> plain, x;
        for (std::size_t j = 0; j < values.size(); ++j) {
          plain.push_back(values[j].clone());
          if (at::isFloatingType(values[j].scalar_type())) plain.back().requires_grad_(true);
          const Shape shape = values[j].sizes().vec();
          x.push_back(j == 0  ? leaf(values[j], lies(shape, true, of_rows))
                      : j < 3 ? leaf(values[j], lies(shape, keys_too, of_keys))
                              : leaf(values[j], ShardSpec::replicated(mesh, shape)));
        }
        const auto expected = second_derivatives(attention_by_definition(plain, c), plain,
                                                 along.clone().requires_grad_(true));
        const auto got =
            second_derivatives(attention_of(x, c), x, leaf(along, lies(os, true, of_rows)));
        ASSERT_EQ(got.size(), expected.size());
        for (std::size_t j = 0; j < got.size(); ++j)
          ASSERT_LT(difference(got[j], expected[j], 1e-3), 1e-10)
              << "result " << j << " mask " << c.mask << " grouped " << c.grouped << " "
              << spec(x[0]) << " " << spec(x[1]);
      }
    });
  }
}

namespace {

// Multiplications of batched products on this thread.
thread_local std::int64_t multiplied = 0;

std::unique_ptr<at::ObserverContext> count_products(const at::RecordFunction& call) {
  if (std::string(call.name()) == "aten::bmm")
    multiplied += call.inputs()[0].toTensor().numel() * call.inputs()[1].toTensor().size(2);
  return nullptr;
}

}  // namespace

// Each rank hands the second half of its queries to the one that mirrors it: all compute alike.
TEST(RingAttention, CausalRingsAreBalancedAndEqualOneProcess) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh({{"x", ranks}});
      Draw draw(120 + ranks);
      for (int i = 0; i < 4; ++i) {
        const RingCase c{1, i % 2 == 1};
        const std::int64_t rows = 64 * ranks + (i == 0 ? 0 : i);
        const Shape ks = {1, 2, rows, 3}, qs = {1, c.grouped ? 4 : 2, rows, 3};
        test::seed(i);
        const std::vector<at::Tensor> values = {randn(qs, at::kDouble), randn(ks, at::kDouble),
                                                randn(ks, at::kDouble)};
        const at::Tensor along = randn(qs, at::kDouble);
        const Sizes sizes = i == 0 ? Sizes(ranks, 64) : draw.sizes(rows, ranks);
        std::vector<at::Tensor> plain, x;
        for (const at::Tensor& v : values) {
          plain.push_back(v.clone().requires_grad_(true));
          x.push_back(leaf(v, ShardSpec(mesh, v.sizes().vec(), {Shard(2)}, {{2, sizes}})));
        }
        if (i == 0) {
          multiplied = 0;
          const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count_products)
                                                             .needsInputs(true)
                                                             .scopes({at::RecordScope::FUNCTION}));
          attention_of(x, c);
          at::removeCallback(handle);
          const at::Tensor least = at::full({1}, multiplied, at::kLong), most = least.clone();
          manager.world().all_reduce(least, ReduceOp::min);
          manager.world().all_reduce(most, ReduceOp::max);
          EXPECT_GT(least.item<std::int64_t>(), 0);
          EXPECT_EQ(least.item<std::int64_t>(), most.item<std::int64_t>())
              << "rank " << manager.rank() << " multiplied " << multiplied;
        }
        const auto expected = second_derivatives(attention_by_definition(plain, c), plain,
                                                 along.clone().requires_grad_(true));
        const auto got = second_derivatives(
            attention_of(x, c), x, leaf(along, ShardSpec(mesh, qs, {Shard(2)}, {{2, sizes}})));
        for (std::size_t j = 0; j < got.size(); ++j)
          ASSERT_LT(difference(got[j], expected[j], 1e-3), 1e-10)
              << "result " << j << " grouped " << c.grouped << " " << list(sizes);
      }
    });
  }
}

// Numbers by global index: what is dropped does not depend on the ranks. Replicated tensors go
// libtorch's own way, which materialises all scores.
TEST(RingAttention, DropoutIsThatOfReplicatedTensors) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(90 + ranks);
      const auto mesh = manager.mesh({{"x", ranks}});
      for (int i = 0; i < 12; ++i) {
        const RingCase c{i % 3, draw.chance(30), 0.4};
        // The last causal one has enough queries to be balanced.
        const std::int64_t groups = draw.between(1, 2),
                           rows = i == 10 ? 64 * ranks + 3 : draw.between(2, 9);
        const Shape ks = {2, groups, rows, 3}, qs = {2, groups * (c.grouped ? 2 : 1), rows, 3};
        test::seed(i);
        std::vector<at::Tensor> values = {randn(qs, at::kDouble), randn(ks, at::kDouble),
                                          randn(ks, at::kDouble)};
        if (c.mask == 2) values.push_back(randn({rows, rows}, at::kDouble));
        const at::Tensor along = randn(qs, at::kDouble);
        const Sizes sizes = draw.sizes(rows, ranks);
        const auto run = [&](bool sharded) {
          const auto lies = [&](const Shape& shape, bool it) {
            return it ? ShardSpec(mesh, shape, {Shard(2)}, {{2, sizes}})
                      : ShardSpec::replicated(mesh, shape);
          };
          std::vector<at::Tensor> x;
          for (std::size_t j = 0; j < values.size(); ++j)
            x.push_back(leaf(values[j], lies(values[j].sizes().vec(), sharded && j < 3)));
          manual_seed(manager, 17 + static_cast<std::uint64_t>(i));
          const at::Tensor y = attention_of(x, c);
          EXPECT_EQ(spec(y), lies(qs, sharded));
          auto all = second_derivatives(y, x, leaf(along, lies(qs, sharded)));
          all.push_back(test_draw(mesh));  // the next draw: both have taken one
          return all;
        };
        const auto expected = run(false), got = run(true);
        for (std::size_t j = 0; j < got.size(); ++j)
          ASSERT_LT(difference(got[j], expected[j], 1e-3), 1e-10)
              << "result " << j << " dropout " << c.dropout << " mask " << c.mask << " grouped "
              << c.grouped << " " << list(sizes);
      }
      const at::Tensor q = leaf(randn({1, 1, 5, 2}), ShardSpec(mesh, {1, 1, 5, 2}, {Shard(2)}));
      const at::Tensor none = at::scaled_dot_product_attention(q, q, q, std::nullopt, 1.0);
      none.sum().backward();
      EXPECT_EQ(whole(none).abs().max().item<double>(), 0);
      EXPECT_EQ(whole(q.grad()).abs().max().item<double>(), 0);
    });
  }
}

TEST(RingAttention, BatchAndHeadsAreLocal) {
  on_ranks(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    const Shape shape = {3, 5, 6, 4};
    const ShardSpec lies(mesh, shape, {Shard(0), Shard(1)});
    std::vector<at::Tensor> x;
    for (int i = 0; i < 3; ++i) x.push_back(leaf(randn(shape, at::kDouble), lies));
    const CommTraceScope trace(manager);
    at::scaled_dot_product_attention(x[0], x[1], x[2]).sum().backward();
    EXPECT_TRUE(trace->events().empty());
  });
}

TEST(RingAttention, MultiheadAttentionOverASequence) {
  on_ranks(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 3}});
    const auto make = [] {
      torch::nn::MultiheadAttention m(8, 2);
      m->to(at::kDouble);
      fill(*m, 3);
      return m;
    };
    auto expected = make(), net = make();
    const at::Tensor value = randn({7, 2, 8}, at::kDouble), along = randn({7, 2, 8}, at::kDouble);
    const at::Tensor plain = value.clone().requires_grad_(true);
    (std::get<0>(expected->forward(plain, plain, plain)) * along).sum().backward();
    distribute_module(*net, mesh);
    const at::Tensor x = leaf(value, ShardSpec(mesh, {7, 2, 8}, {Shard(0)}, {{0, {5, 0, 2}}}));
    (std::get<0>(net->forward(x, x, x)) * along).sum().backward();
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11);
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_LT(difference(net->parameters()[i].grad(), expected->parameters()[i].grad()), 1e-11);
  });
}

}  // namespace tessera::test::ring_attention_test
