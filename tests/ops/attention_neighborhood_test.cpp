// Neighbourhood attention against its definition, written down once more with libtorch's operators;
// on plain tensors and on fields sharded over ranks.

#include "tessera/ops/attention/neighborhood.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/cuda.h>

#include "fields.h"

namespace tessera::test::attention_neighborhood_test {
namespace {

using Shape = std::vector<std::int64_t>;

struct Case {
  Shape shape;  // of q
  std::int64_t value_channels;
  std::vector<Neighborhood> dims;
  std::optional<double> scale;

  Case(Draw& draw, int n) : shape{draw.between(1, 2)} {
    for (int d = 0; d < n; ++d) {
      Neighborhood w{draw.between(1, n == 3 ? 3 : 5), draw.between(1, n == 1 ? 3 : 2),
                     draw.chance(35)};
      shape.push_back(w.causal && draw.chance(30)
                          ? draw.between(1, 4)
                          : w.kernel * w.dilation + draw.below(n == 3 ? 3 : 7));
      dims.push_back(w);
    }
    shape.push_back(draw.between(1, 3));
    shape.push_back(draw.between(1, 5));
    value_channels = draw.chance(50) ? shape.back() : draw.between(1, 6);
    if (draw.chance(30)) scale = 0.7;
  }
  Shape value_shape() const {
    Shape s = shape;
    s.back() = value_channels;
    return s;
  }
  std::string text() const {
    std::string t = concat("q ", list(shape), " v channels ", value_channels);
    for (const auto& d : dims)
      t += concat(" kernel ", d.kernel, " dilation ", d.dilation, d.causal ? " causal" : "");
    return t;
  }
};

/// Of all runs of `kernel` neighbours in the query's dilation group the one whose middle is
/// nearest; causal: the query and those before it.
Shape seen(const Neighborhood& w, std::int64_t query, std::int64_t extent) {
  Shape group, keys;
  for (std::int64_t i = query % w.dilation; i < extent; i += w.dilation) group.push_back(i);
  const auto at = std::ranges::find(group, query) - group.begin();
  if (w.causal) {
    for (auto i = at - w.kernel + 1; i <= at; ++i)
      if (i >= 0) keys.push_back(group[i]);
    return keys;
  }
  std::int64_t best = -1;
  for (std::int64_t start = 0; start + w.kernel <= static_cast<std::int64_t>(group.size()); ++start)
    if (best < 0 || std::abs(start + w.kernel / 2 - at) < std::abs(best + w.kernel / 2 - at))
      best = start;
  for (std::int64_t i = best; i < best + w.kernel; ++i) keys.push_back(group[i]);
  return keys;
}

/// A full attention with a mask of what each query sees.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Case& c) {
  std::int64_t positions = 1;
  at::Tensor mask = at::ones({1, 1}, at::kBool);
  for (std::size_t d = 0; d < c.dims.size(); ++d) {
    const std::int64_t extent = c.shape[d + 1];
    at::Tensor one = at::zeros({extent, extent}, at::kBool);
    for (std::int64_t i = 0; i < extent; ++i)
      for (const auto key : seen(c.dims[d], i, extent)) one[i][key] = true;
    mask = at::kron(mask.to(at::kLong), one.to(at::kLong)).to(at::kBool);
    positions *= extent;
  }
  const auto flat = [&](const at::Tensor& t) {
    return t.reshape({t.size(0), positions, t.size(-2), t.size(-1)}).transpose(1, 2);
  };
  const double scale = c.scale.value_or(1 / std::sqrt(static_cast<double>(c.shape.back())));
  const at::Tensor scores = at::matmul(flat(q), flat(k).transpose(-1, -2)) * scale;
  const at::Tensor weights =
      scores.masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity()).softmax(-1);
  return at::matmul(weights, flat(v)).transpose(1, 2).reshape(c.value_shape());
}

struct Result {
  at::Tensor value;
  std::vector<at::Tensor> gradients;
};

Result run(const Case& c, std::vector<at::Tensor> inputs, const at::Tensor& g, bool by_definition) {
  Result r;
  r.value = by_definition
                ? reference(inputs[0], inputs[1], inputs[2], c)
                : neighborhood_attention(inputs[0], inputs[1], inputs[2], c.dims, c.scale);
  r.value.backward(is_sharded(r.value) ? distribute_tensor(g, spec(r.value)) : g);
  for (const auto& t : inputs) r.gradients.push_back(t.grad());
  return r;
}

void expect_same(const Result& got, const Result& expected, const std::string& where,
                 double tolerance = 1e-10) {
  EXPECT_LT(difference(got.value, expected.value), tolerance) << where;
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_LT(difference(got.gradients[i], expected.gradients[i]), tolerance)
        << "gradient " << i << ", " << where;
}

/// The gradients of the squares of the gradients, by q, k, v and by what those are along.
std::vector<at::Tensor> run_twice(const Case& c, std::vector<at::Tensor> t, const at::Tensor& g,
                                  bool by_definition) {
  const at::Tensor y = by_definition ? reference(t[0], t[1], t[2], c)
                                     : neighborhood_attention(t[0], t[1], t[2], c.dims, c.scale);
  t.push_back(is_sharded(y) ? leaf(g, spec(y)) : g.detach().clone().requires_grad_(true));
  const auto first = torch::autograd::grad({y}, {t[0], t[1], t[2]}, {t[3]}, true, true);
  at::Tensor sum = first[0].square().sum();
  for (int i = 1; i < 3; ++i) sum = sum + first[i].square().sum();
  return torch::autograd::grad({sum}, t);
}

void expect_same_twice(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                       const std::string& where) {
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_LT(difference(got[i], expected[i], 1e-3), 1e-10)
        << "second derivative " << i << ", " << where;
}

std::vector<at::Tensor> leaves(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> all;
  for (const auto& v : values) all.push_back(v.detach().clone().requires_grad_(true));
  return all;
}

TEST(Neighborhood, WorkedExamples) {
  const auto keys = [](const Neighborhood& w, std::int64_t q, std::int64_t n) {
    return std::pair(w.keys(q, n).begin, w.keys(q, n).count);
  };
  EXPECT_EQ(keys({3, 2, false}, 5, 7), std::pair(std::int64_t{1}, std::int64_t{3}));
  EXPECT_EQ(keys({3, 2, true}, 2, 7), std::pair(std::int64_t{0}, std::int64_t{2}));
  EXPECT_EQ(keys({3, 1, false}, 0, 7), std::pair(std::int64_t{0}, std::int64_t{3}));
  EXPECT_EQ(keys({3, 1, false}, 6, 7), std::pair(std::int64_t{4}, std::int64_t{3}));
  EXPECT_EQ(keys({4, 1, false}, 3, 7), std::pair(std::int64_t{1}, std::int64_t{4}));
}

TEST(Neighborhood, PlainTensorsFollowTheDefinition) {
  Draw draw(5);
  for (int n = 0; n < 150; ++n) {
    const Case c(draw, 1 + n % 3);
    seed(static_cast<std::uint64_t>(n));
    const std::vector<at::Tensor> values{randn(c.shape, at::kDouble), randn(c.shape, at::kDouble),
                                         randn(c.value_shape(), at::kDouble)};
    const at::Tensor g = randn(c.value_shape(), at::kDouble);
    expect_same(run(c, leaves(values), g, false), run(c, leaves(values), g, true), c.text());
    expect_same_twice(run_twice(c, leaves(values), g, false), run_twice(c, leaves(values), g, true),
                      c.text());
  }
}

TEST(Neighborhood, OtherTypesAndStrides) {
  Draw draw(6);
  for (const auto& [type, tolerance] :
       {std::pair(at::kFloat, 2e-5), {at::kHalf, 5e-3}, {at::kBFloat16, 4e-2}}) {
    const Case c(draw, 2);
    seed(3);
    std::vector<at::Tensor> values{randn(c.shape), randn(c.shape), randn(c.value_shape())};
    for (auto& v : values) v = v.to(type);
    const at::Tensor expected = reference(values[0].to(at::kDouble), values[1].to(at::kDouble),
                                          values[2].to(at::kDouble), c);
    for (auto& v : values) v = v.transpose(1, 2).contiguous().transpose(1, 2);
    const at::Tensor got = neighborhood_attention(values[0], values[1], values[2], c.dims, c.scale);
    EXPECT_EQ(got.scalar_type(), type);
    EXPECT_LT(difference(got.to(at::kDouble), expected), tolerance);
  }
}

TEST(Neighborhood, OnCudaAsOnTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  Draw draw(7);
  for (int n = 0; n < 30; ++n) {
    const Case c(draw, 1 + n % 3);
    seed(static_cast<std::uint64_t>(n));
    std::vector<at::Tensor> values{randn(c.shape, at::kDouble), randn(c.shape, at::kDouble),
                                   randn(c.value_shape(), at::kDouble)};
    const at::Tensor g = randn(c.value_shape(), at::kDouble);
    const Result expected = run(c, leaves(values), g, false);
    for (auto& v : values) v = v.cuda();
    Result got = run(c, leaves(values), g.cuda(), false);
    EXPECT_TRUE(got.value.is_cuda());
    got.value = got.value.cpu();
    for (auto& t : got.gradients) t = t.cpu();
    expect_same(got, expected, c.text());
  }
}

// Teams of every width, and rows that no team has at once; not on the current device, if there are
// several.
TEST(Neighborhood, OtherTypesAndWidthsOnCudaAsOnTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const c10::Device there(at::kCUDA,
                          static_cast<c10::DeviceIndex>(torch::cuda::device_count() - 1));
  Draw draw(8);
  for (const auto& [type, tolerance] :
       {std::pair(at::kFloat, 1e-4), {at::kHalf, 2e-2}, {at::kBFloat16, 1e-1}})
    for (const auto& [channels, value_channels] :
         {std::pair(4, 8), {32, 12}, {40, 64}, {128, 100}, {132, 4}, {33, 150}}) {
      Case c(draw, 2);
      c.shape.back() = channels;
      c.value_channels = value_channels;
      seed(4);
      std::vector<at::Tensor> values{randn(c.shape, at::kDouble).to(type),
                                     randn(c.shape, at::kDouble).to(type),
                                     randn(c.value_shape(), at::kDouble).to(type)};
      const at::Tensor g = randn(c.value_shape(), at::kDouble).to(type);
      const Result expected = run(c, leaves(values), g, false);
      for (auto& v : values) v = v.to(there);
      const Result got = run(c, leaves(values), g.to(there), false);
      EXPECT_EQ(got.value.device(), there);
      EXPECT_LT(difference(got.value.cpu(), expected.value, 1), tolerance) << c.text();
      for (std::size_t i = 0; i < 3; ++i)
        EXPECT_LT(difference(got.gradients[i].cpu(), expected.gradients[i], 1), tolerance)
            << "gradient " << i << ", " << c.text();
    }
}

TEST(Neighborhood, IsAnOperatorOfTheDispatcher) {
  seed(1);
  const at::Tensor q = randn({2, 6, 5, 2, 3}, at::kDouble), k = randn({2, 6, 5, 2, 3}, at::kDouble),
                   v = randn({2, 6, 5, 2, 4}, at::kDouble);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tessera::neighborhood_attention", "")
                      .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                        std::vector<std::int64_t>, std::vector<std::int64_t>,
                                        c10::List<bool>, std::optional<double>)>();
  EXPECT_TRUE(op.call(q, k, v, {3, 2}, {2, 1}, c10::List<bool>({false, true}), std::nullopt)
                  .equal(neighborhood_attention_2d(q, k, v, {3, 2}, {2, 1}, {false, true})));
}

TEST(Neighborhood, RefusesWhatDoesNotFit) {
  const auto q = at::ones({1, 6, 2, 3});
  EXPECT_THROW(neighborhood_attention_1d(q, q, q, {7}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, q, q, {3}, {3}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, q, q, {0}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, q, q, {3}, {0}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, q, q, {3}, {std::int64_t{1} << 62}), InvalidArgument)
      << "their product overflows";
  EXPECT_THROW(neighborhood_attention_1d(q, q, q, {3, 3}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_2d(q, q, q, {3, 3}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, at::ones({1, 5, 2, 3}), q, {3}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, q, q.to(at::kDouble), {3}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention_1d(q, q, at::Tensor(), {3}), InvalidArgument);
  EXPECT_THROW(neighborhood_attention(q, q, q, {}), InvalidArgument);
}

class ShardedNeighborhoods : public ::testing::TestWithParam<int> {};

TEST_P(ShardedNeighborhoods, GivesWhatOneProcessGives) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    Draw draw(11 + static_cast<std::uint64_t>(ranks));
    for (int n = 0; n < (process() ? 9 : 45); ++n) {
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const Case c(draw, 1 + n % 3);
      seed(static_cast<std::uint64_t>(n));
      const std::vector<at::Tensor> values{randn(c.shape, at::kDouble), randn(c.shape, at::kDouble),
                                           randn(c.value_shape(), at::kDouble)};
      const at::Tensor g = randn(c.value_shape(), at::kDouble);
      const Result expected = run(c, leaves(values), g, true);
      // q sharded over batch, space and heads in any sizes; k and v alike, or with other
      // placements.
      ShardSpec field = draw.spec(mesh, Shape(c.shape.begin(), c.shape.end() - 1), draw.chance(20));
      std::vector<ShardSpec> specs;
      for (const auto& v : values) {
        const bool alike = specs.empty() || draw.chance(70);
        specs.push_back(alike ? ShardSpec(mesh, v.sizes().vec(), field.placements(), field.sizes())
                              : draw.spec(mesh, v.sizes().vec()));
      }
      const bool twice =
          n / 3 % 3 == 0 && std::ranges::all_of(specs, [](const ShardSpec& s) {
            const auto& all = s.placements();
            return std::ranges::none_of(all, [](const Placement& p) { return p.is_partial(); });
          });
      if (Coverage::instance().noting()) {
        std::vector<std::string> names(c.shape.size(), "space");
        names[0] = "samples";
        names[names.size() - 2] = "heads";
        names.back() = "channels";
        Coverage::instance().note(concat("neighbourhood attention ", c.dims.size(), "d"), specs[0],
                                  names, twice, manager.rank());
        continue;
      }
      const std::string where = concat(c.text(), " on ", specs[0], "; ", specs[1], "; ", specs[2]);
      const auto ordered = [&](HaloPolicy::Order order) {
        set_halo_policy(manager, {.order = order});
        std::vector<at::Tensor> sharded;
        for (std::size_t i = 0; i < 3; ++i) sharded.push_back(leaf(values[i], specs[i]));
        return run(c, sharded, g, false);
      };
      using Order = HaloPolicy::Order;
      expect_same(ordered(Order::assemble), expected, where);
      const Result first = ordered(Order::interior_first), waiting = ordered(Order::wait_first);
      expect_same(first, expected, "interior first: " + where);
      // The same split, waiting earlier: bit for bit the same.
      EXPECT_TRUE(to_local(first.value.detach()).equal(to_local(waiting.value.detach()))) << where;
      for (std::size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(to_local(first.gradients[i]).equal(to_local(waiting.gradients[i])))
            << "gradient " << i << " " << where;
      expect_same(ordered(Order::automatic), expected, "automatic: " + where);
      if (!twice) continue;
      const auto second = run_twice(c, leaves(values), g, true);
      for (const Order order : {Order::assemble, Order::interior_first}) {
        set_halo_policy(manager, {.order = order});
        std::vector<at::Tensor> sharded;
        for (std::size_t i = 0; i < 3; ++i) sharded.push_back(leaf(values[i], specs[i]));
        expect_same_twice(run_twice(c, sharded, g, false), second, where);
      }
    }
    if (Coverage::instance().noting()) return;
    const auto mesh = manager.mesh({{"a", ranks}});
    const at::Tensor plain = at::ones({1, 6, 2, 3}),
                     cut = distribute_tensor(plain, mesh, {Shard(3)}),
                     whole = distribute_tensor(plain, mesh, {Replicate()});
    EXPECT_THROW(neighborhood_attention_1d(cut, cut, cut, {3}), ShardingError);
    EXPECT_THROW(neighborhood_attention_1d(whole, plain, whole, {3}), ShardingError);
  });
}

// Large enough that automatic splits, with keys from both sides and a rank that holds nothing.
TEST(ShardedNeighborhood, ALargeFieldIsThatOfOneProcess) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    const Shape shape{1, 96, 64, 4, 8};
    seed(4);
    std::vector<at::Tensor> values;
    for (int i = 0; i < 3; ++i) values.push_back(randn(shape, at::kDouble));
    const at::Tensor g = randn(shape, at::kDouble);
    const auto once = [&](std::vector<at::Tensor> t) {
      const at::Tensor y =
          neighborhood_attention_2d(t[0], t[1], t[2], {7, 5}, {2, 1}, {false, true});
      y.backward(is_sharded(y) ? distribute_tensor(g, spec(y)) : g);
      return Result{y, {t[0].grad(), t[1].grad(), t[2].grad()}};
    };
    const Result expected = once(leaves(values));
    std::vector<at::Tensor> cut;
    for (const auto& v : values)
      cut.push_back(leaf(v, ShardSpec(mesh, shape, {Shard(1)}, {{1, {40, 0, 56}}})));
    expect_same(once(cut), expected, "automatic");
  });
}

// As for plain tensors; also on the rank whose shard has no interior, of which nothing is read
// again.
TEST(ShardedNeighborhood, WhatWasWrittenToMeanwhileIsNotUsedInBackward) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    set_halo_policy(manager, {.order = HaloPolicy::Order::interior_first});
    const Shape shape{1, 12, 2, 3};
    for (int written = 0; written < 3; ++written) {
      std::vector<at::Tensor> t;
      for (int i = 0; i < 3; ++i)
        t.push_back(
            leaf(randn(shape, at::kDouble), ShardSpec(mesh, shape, {Shard(1)}, {{1, {11, 1}}})) *
            2);
      const at::Tensor y = neighborhood_attention_1d(t[0], t[1], t[2], {3});
      t[written].mul_(2);
      EXPECT_THROW(y.sum().backward(), c10::Error) << written << " on rank " << manager.rank();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedNeighborhoods, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera::test::attention_neighborhood_test
