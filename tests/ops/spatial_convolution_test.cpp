// Convolutions of drawn shapes, windows and placements give the values and gradients of plain
// libtorch, whichever way the work is ordered.

#include "fields.h"

namespace tessera::test::spatial_convolution_test {

namespace {

using Shape = std::vector<std::int64_t>;
using Order = HaloPolicy::Order;
using Backward = HaloPolicy::Backward;

struct Case {
  Shape x, w, stride, padding, dilation, output_padding;
  bool transposed, bias;
  std::int64_t groups;

  /// `width`: multiplies the channels. A strip of a halo with many is a call of the operator, with
  /// few a sum over its taps.
  Case(Draw& draw, int spatial, std::int64_t width) {
    transposed = draw.chance(40);
    bias = draw.chance(60);
    groups = draw.chance(70) ? 1 : draw.between(2, 3);
    const std::int64_t in = width * groups * draw.between(1, 3),
                       out = width * groups * draw.between(1, 3);
    x = {draw.between(0, 9) ? draw.between(1, 3) : 0, in};
    w = transposed ? Shape{in, out / groups} : Shape{out, in / groups};
    const int largest = spatial == 1 ? 16 : spatial == 2 ? 9 : 6;
    for (int d = 0; d < spatial; ++d) {
      const std::int64_t k = draw.between(1, spatial == 3 ? 4 : 7), s = draw.between(1, 4),
                         l = draw.between(1, 3);
      w.push_back(k);
      stride.push_back(s);
      dilation.push_back(l);
      const std::int64_t reach = (k - 1) * l;
      if (transposed) {
        const std::int64_t n = draw.between(1, largest / 2 + 1),
                           extra = draw.below(static_cast<int>(std::max(s, l)));
        // At least one output is left.
        const std::int64_t most = ((n - 1) * s + reach + extra) / 2;
        padding.push_back(draw.below(static_cast<int>(std::min<std::int64_t>(most, 4)) + 1));
        output_padding.push_back(extra);
        x.push_back(n);
      } else {
        const std::int64_t n = draw.between(1, largest),
                           least = std::max<std::int64_t>(0, (reach + 1 - n + 1) / 2);
        padding.push_back(least + draw.below(4));
        output_padding.push_back(0);
        x.push_back(n);
      }
    }
  }

  at::Tensor operator()(const at::Tensor& input, const at::Tensor& weight,
                        const at::Tensor& b) const {
    return at::convolution(input, weight, b, stride, padding, dilation, transposed, output_padding,
                           groups);
  }
  std::string text() const {
    return concat(transposed ? "transposed " : "", "x ", list(x), " w ", list(w), " stride ",
                  list(stride), " padding ", list(padding), " dilation ", list(dilation),
                  " output padding ", list(output_padding), " groups ", groups,
                  bias ? " bias" : "");
  }
};

// Mostly in space; over one or more axes a dim.
ShardSpec field_spec(Draw& draw, const DeviceMesh& mesh, const Shape& shape) {
  if (draw.chance(25)) return draw.spec(mesh, shape, false);
  std::vector<Placement> placements;
  std::map<int, int> parts;
  for (const Axis& axis : mesh.mesh().axes()) {
    const int d =
        draw.chance(85) ? 2 + draw.below(static_cast<int>(shape.size()) - 2) : draw.below(2);
    placements.push_back(Shard(d));
    parts[d] = (parts.contains(d) ? parts[d] : 1) * axis.size;
  }
  ShardSizes all;
  for (const auto& [d, n] : parts) all[d] = draw.sizes(shape[d], n);
  return ShardSpec(mesh, shape, placements, all);
}

struct Result {
  at::Tensor value;
  std::vector<at::Tensor> gradients;
};

Result run(const Case& c, std::vector<at::Tensor> inputs, const at::Tensor& seed_gradient) {
  Result r;
  r.value = c(inputs[0], inputs[1], c.bias ? inputs[2] : at::Tensor());
  at::Tensor g = seed_gradient;
  r.value.backward(is_sharded(r.value) ? distribute_tensor(g, spec(r.value)) : g);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (i < 2 || c.bias) r.gradients.push_back(inputs[i].grad());
  }
  return r;
}

void compare(const DeviceMesh& mesh, DistributedManager& manager, Draw& draw, std::uint64_t number,
             std::int64_t width) {
  const Case c(draw, draw.chance(30) ? 1 : draw.chance(75) ? 2 : 3, width);
  const at::ScalarType type = draw.chance(12) ? at::kFloat : at::kDouble;  // other kernels
  const double tolerance = type == at::kFloat ? 2e-5 : 1e-10;
  seed(number);
  const Shape out_channels{c.transposed ? c.w[1] * c.groups : c.w[0]};
  const std::vector<at::Tensor> values{randn(c.x, type), randn(c.w, type),
                                       randn(out_channels, type)};
  std::vector<at::Tensor> plain;
  for (const auto& v : values) plain.push_back(v.clone().requires_grad_(true));
  const at::Tensor shape_only = c(values[0], values[1], {});
  const at::Tensor g = randn(shape_only.sizes(), type);
  const Result expected = run(c, plain, g);

  std::vector<ShardSpec> specs{field_spec(draw, mesh, c.x)};
  if (Coverage::instance().noting()) {
    std::vector<std::string> names(c.x.size(), "space");
    names[0] = "samples";
    names[1] = "channels";
    const auto op = concat(c.transposed ? "transposed " : "", "convolution ", c.x.size() - 2, "d",
                           c.groups > 1 ? ", grouped" : "");
    return Coverage::instance().note(op, specs[0], names, false, manager.rank());
  }
  for (int i = 1; i < 3; ++i)
    specs.push_back(draw.chance(60) ? ShardSpec::replicated(mesh, values[i].sizes().vec())
                                    : draw.spec(mesh, values[i].sizes().vec()));
  // If only samples and space are sharded, only halos move.
  const auto is_local = [](const Placement& p) {
    return p.is_replicate() || (p.is_shard() && p.dim != 1);
  };
  const bool local = std::ranges::all_of(specs[0].placements(), is_local) &&
                     specs[1].is_replicated() && specs[2].is_replicated();
  set_policies(manager, {.redistribution = local ? Policy::error : Policy::allow});
  const auto sharded = [&](HaloPolicy policy) {
    set_halo_policy(manager, policy);
    std::vector<at::Tensor> leaves;
    for (int i = 0; i < 3; ++i) leaves.push_back(leaf(values[i], specs[i]));
    return run(c, leaves, g);
  };
  const auto check = [&](const Result& got, const char* how) {
    const std::string where = concat(how, ": ", c.text(), " on ", specs[0], "; ", specs[1], "; ",
                                     specs[2], " -> ", spec(got.value));
    EXPECT_LT(difference(got.value, expected.value), tolerance) << where;
    for (std::size_t i = 0; i < got.gradients.size(); ++i)
      EXPECT_LT(difference(got.gradients[i], expected.gradients[i]), tolerance)
          << "gradient " << i << " " << where;
  };
  try {
    check(sharded({Order::assemble, Backward::exchange}), "assemble");
    check(sharded({Order::assemble, Backward::sum}), "sum back");
    const Result first = sharded({Order::interior_first, Backward::exchange}),
                 waiting = sharded({Order::wait_first, Backward::exchange});
    check(first, "interior first");
    EXPECT_TRUE(to_local(first.value.detach()).equal(to_local(waiting.value.detach())));
    for (std::size_t i = 0; i < first.gradients.size(); ++i)
      EXPECT_TRUE(
          to_local(first.gradients[i].detach()).equal(to_local(waiting.gradients[i].detach())))
          << "gradient " << i;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    ADD_FAILURE() << std::string(e.what()).substr(0, 500) << ": " << c.text() << " on " << specs[0]
                  << "; " << specs[1];
  }
}

struct Mesh {
  std::vector<Axis> axes;
  int cases;
};

class Convolutions : public ::testing::TestWithParam<Mesh> {};

TEST_P(Convolutions, GiveWhatOneProcessGives) {
  const int ranks = ranks_of(GetParam().axes);
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh(mapped(GetParam().axes));
    for (int n = 0; n < (process() ? 20 : GetParam().cases); ++n) {
      const std::uint64_t number =
          7919ull * static_cast<std::uint64_t>(n) + static_cast<std::uint64_t>(ranks);
      Draw draw(number);
      compare(mesh, manager, draw, number, n % 12 == 11 ? 32 : 1);
      if (::testing::Test::HasFailure()) return;  // all ranks see it: the checks are collective
    }
  });
}

// The derivative of a derivative runs the composite of libtorch on sharded tensors.
TEST(Convolution, SecondDerivativesAreRight) {
  for (const bool transposed : {false, true}) {
    on_ranks(3, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const auto mesh = manager.mesh({{"domain", 3}});
      const at::Tensor x = randn({2, 2, 7, 4}, at::kDouble), w = randn({2, 2, 3, 2}, at::kDouble);
      const auto twice = [&](const at::Tensor& input, const at::Tensor& weight) {
        const at::Tensor y =
            at::convolution(input, weight, {}, {2, 1}, {1, 0}, {1, 1}, transposed, {0, 0}, 1);
        const auto first =
            torch::autograd::grad({y.square().sum()}, {input, weight}, {}, true, true);
        return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()},
                                     {input, weight});
      };
      const auto expected = twice(x.clone().requires_grad_(true), w.clone().requires_grad_(true));
      const auto got = twice(leaf(x, ShardSpec(mesh, {2, 2, 7, 4}, {Shard(2)}, {{2, {4, 1, 2}}})),
                             leaf(w, ShardSpec::replicated(mesh, {2, 2, 3, 2})));
      for (int i = 0; i < 2; ++i)
        EXPECT_LT(difference(got[i], expected[i]), 1e-10) << "gradient " << i;
    });
  }
}

TEST(Convolution, SecondDerivativesOfDrawnCasesAreRight) {
  on_ranks(3, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    set_halo_policy(manager, {});
    const auto mesh = manager.mesh({{"domain", 3}});
    for (int n = 0; n < (process() ? 4 : 40); ++n) {
      const std::uint64_t number = 31ull * static_cast<std::uint64_t>(n);
      Draw draw(number);
      Case c(draw, 1 + n % 2, 1);
      c.x[0] = std::max<std::int64_t>(c.x[0], 1);
      seed(number);
      const at::Tensor x = randn(c.x, at::kDouble), w = randn(c.w, at::kDouble);
      const auto twice = [&](const at::Tensor& input, const at::Tensor& weight) {
        const auto first = torch::autograd::grad({c(input, weight, {}).square().sum()},
                                                 {input, weight}, {}, true, true);
        return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()},
                                     {input, weight});
      };
      const auto expected = twice(x.clone().requires_grad_(true), w.clone().requires_grad_(true));
      const ShardSpec cut = field_spec(draw, mesh, c.x);
      const auto got = twice(leaf(x, cut), leaf(w, ShardSpec::replicated(mesh, c.w)));
      for (int i = 0; i < 2; ++i)
        EXPECT_LT(difference(got[i], expected[i]), 1e-10)
            << "gradient " << i << " of " << c.text() << " on " << cut;
      if (::testing::Test::HasFailure()) return;
    }
  });
}

TEST(Convolution, AWindowThatDoesNotFitIsRefusedOnEveryRank) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const at::Tensor x = leaf(randn({1, 1, 3}), ShardSpec(mesh, {1, 1, 3}, {Shard(2)}));
    EXPECT_THROW(at::conv1d(x, randn({1, 1, 4})), std::exception);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Convolutions,
                         ::testing::Values(Mesh{{{"a", 1}}, 75}, Mesh{{{"a", 2}}, 300},
                                           Mesh{{{"a", 3}}, 300}, Mesh{{{"a", 4}}, 250},
                                           Mesh{{{"a", 2}, {"b", 2}}, 300},
                                           Mesh{{{"a", 1}, {"b", 3}}, 75},
                                           Mesh{{{"a", 2}, {"b", 2}, {"c", 2}}, 100}));

}  // namespace

}  // namespace tessera::test::spatial_convolution_test
