// The halo engine: what each rank gets is a slice of the global field continued beyond its edges,
// and the way back is the adjoint.

#include "tessera/ops/halo/halo.h"

#include "fields.h"
#include "tessera/comm/group/trace.h"
#include "tessera/partition/halo.h"

namespace tessera::test::halo_test {

namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t at_edge(std::int64_t t, std::int64_t extent, Edge edge) {
  if (t >= 0 && t < extent) return t;
  switch (edge) {
    case Edge::zero:
      return -1;
    case Edge::replicate:
      return t < 0 ? 0 : extent - 1;
    case Edge::circular:
      return ((t % extent) + extent) % extent;
    case Edge::reflect:
      while (t < 0 || t >= extent) {
        if (extent == 1) return 0;
        t = t < 0 ? -t : 2 * (extent - 1) - t;
      }
      return t;
  }
  return -1;
}

// A box of the field continued beyond its edges; differentiable.
at::Tensor sliced(const at::Tensor& field, const Box& box, const std::vector<Edge>& edges) {
  at::Tensor t = field;
  for (std::size_t d = 0; d < box.size(); ++d) {
    std::vector<std::int64_t> index;
    std::vector<double> mask;
    for (auto i = box[d].begin; i < box[d].end; ++i) {
      const auto from = at_edge(i, field.size(static_cast<std::int64_t>(d)), edges[d]);
      index.push_back(std::max<std::int64_t>(from, 0));
      mask.push_back(from < 0 ? 0 : 1);
    }
    Shape shape(box.size(), 1);
    shape[d] = static_cast<std::int64_t>(index.size());
    t = t.index_select(static_cast<std::int64_t>(d), torch::tensor(index, at::kLong)) *
        torch::tensor(mask, at::kDouble).view(shape);
  }
  return t;
}

// Boxes that differ only along axes that do not shard the field get the same number.
std::uint64_t number_of(const Sharding& s, int position) {
  std::uint64_t n = 17;
  for (std::size_t axis = 0; axis < s.mesh().size(); ++axis) {
    const auto& free = s.free_axes();
    const bool is_free = std::ranges::find(free, static_cast<int>(axis)) != free.end();
    n = n * 31 +
        (is_free ? 0 : static_cast<std::uint64_t>(s.coordinate(position, static_cast<int>(axis))));
  }
  return n;
}
bool first_replica(const Sharding& s, int position) {
  return std::ranges::all_of(s.free_axes(),
                             [&](int axis) { return s.coordinate(position, axis) == 0; });
}

int position_of(const DeviceMesh& mesh) { return mesh.all().rank(); }

struct Case {
  Shape shape;
  HaloWidths widths;
  std::vector<Edge> edges;
  Case(Draw& draw, int dims) {
    for (int d = 0; d < dims; ++d) {
      const HaloWidth w{draw.below(6), draw.below(4), static_cast<Edge>(draw.below(4))};
      shape.push_back(draw.between(1, 7));
      edges.push_back(w.edge);
      widths[draw.chance(50) ? d : d - dims] = w;
    }
  }
};

void check(const DeviceMesh& mesh, Draw& draw, std::uint64_t number) {
  const Case c(draw, draw.between(1, 4));
  const ShardSpec field = draw.spec(mesh, c.shape, false);
  const bool twice = number % 4 == 0;
  if (Coverage::instance().noting())
    return Coverage::instance().note("`halo_exchange`, any widths and edges", field,
                                     std::vector<std::string>(c.shape.size(), "space"), twice,
                                     mesh.manager().rank());
  const Sharding& s = field.sharding();
  const HaloOptions options{draw.chance(50) ? HaloMethod::point_to_point : HaloMethod::all_to_all};
  const Halo halo = halo_of(field, c.widths, options);
  seed(number);
  const at::Tensor value = randn(c.shape, at::kDouble);
  const int me = position_of(mesh);

  // What each position needs, and a weight for what it gets.
  std::vector<at::Tensor> expected, weight;
  const at::Tensor plain = value.clone().requires_grad_(true);
  at::Tensor loss = at::zeros({}, at::kDouble), energy = at::zeros({}, at::kDouble);
  const NeededBox needed = [&](int p) {
    Box box = s.box(p);
    for (auto& [d, w] : c.widths) {
      auto& i = box[d < 0 ? d + static_cast<int>(c.shape.size()) : d];
      i = {i.begin - w.before, i.end + w.after};
    }
    return box;
  };
  for (int p = 0; p < s.positions(); ++p) {
    expected.push_back(sliced(plain, needed(p), c.edges));
    seed(number_of(s, p));
    weight.push_back(randn(expected.back().sizes(), at::kDouble));
    if (!first_replica(s, p)) continue;
    loss = loss + (expected[p] * weight[p]).sum();
    energy = energy + (expected[p].square() * weight[p]).sum();
  }
  loss.backward({}, twice);

  const at::Tensor x = leaf(value, field);
  CommTraceScope trace(halo.travels() ? halo.group() : mesh.all());
  const at::Tensor got = halo_exchange(x, c.widths, options);
  ASSERT_FALSE(is_sharded(got));
  EXPECT_LT(difference(got, expected[me]), 1e-300) << field;  // exact: nothing is computed
  if (halo.travels()) {
    std::int64_t bytes = 0, calls = 0;
    for (const CommSummary& call : trace->summary()) {
      bytes += call.operation == "exchange" || call.operation == "all_to_all" ? call.bytes : 0;
      calls += call.count;
    }
    // What an exchange counts is sent and received; an all-to-all counts what is sent.
    const bool both = halo.method() == HaloMethod::point_to_point;
    EXPECT_EQ(bytes, 8 * (halo.plan().sent() + (both ? halo.plan().received() : 0)))
        << trace->table();
    EXPECT_LE(calls, 1);
  }
  (got * weight[me]).sum().backward({}, twice);
  EXPECT_LT(difference(x.grad(), plain.grad()), 1e-12) << field << "\n" << to_string(halo.plan());
  EXPECT_TRUE(spec(x.grad()) == field);
  if (twice) {
    // Every rank's energy is a summand of the total.
    const auto second = [](const at::Tensor& of, const at::Tensor& by) {
      const at::Tensor first = torch::autograd::grad({of}, {by}, {}, true, true)[0];
      return torch::autograd::grad({first.square().sum()}, {by})[0];
    };
    EXPECT_LT(difference(second((got.square() * weight[me]).sum(), x), second(energy, plain)),
              1e-10)
        << "second derivatives on " << field;
  }

  // Any box of what is there can be asked for, and what is beyond is zero.
  HaloValues values = halo.start_exchange(to_local(x.detach()));
  values.arrival().wait();
  Box box = needed(me);
  for (Interval& i : box) {
    if (i.empty()) continue;
    i.begin += draw.between(-2, 3);
    i.end = i.begin + draw.below(5);
  }
  at::Tensor wanted = at::zeros_like(sliced(value, box, c.edges));
  const Box inside = intersect(box, needed(me));
  if (volume(inside) > 0) {
    at::Tensor part = wanted;
    for (std::size_t d = 0; d < box.size(); ++d)
      part = part.narrow(static_cast<std::int64_t>(d), inside[d].begin - box[d].begin,
                         inside[d].size());
    part.copy_(sliced(value, inside, c.edges));
  }
  EXPECT_LT(difference(values.assemble(box).clone(), wanted), 1e-300);
}

class Halos : public ::testing::TestWithParam<int> {};

TEST_P(Halos, AreSlicesOfTheContinuedFieldAndTheWayBackIsTheAdjoint) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 15 : 150); ++n) {
      Draw draw(n * 101 + static_cast<std::uint64_t>(ranks));
      check(manager.mesh(draw.mesh(ranks)), draw, n);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Halos, ::testing::Values(1, 2, 3, 4));

TEST(Halo, TheExampleOfTheHeader) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 3}});
    const at::Tensor value = at::arange(35, at::kDouble).view({7, 5});
    const at::Tensor u = leaf(value, ShardSpec(mesh, {7, 5}, {Shard(0)}, {{0, {3, 0, 4}}}));
    const at::Tensor h = halo_exchange(u, {{0, {1, 1, Edge::zero}}});
    const Shape sizes[] = {{5, 5}, {2, 5}, {6, 5}};
    EXPECT_EQ(h.sizes(), at::IntArrayRef(sizes[manager.rank()]));
    const at::Tensor padded = at::constant_pad_nd(value, {0, 0, 1, 1});
    EXPECT_TRUE(h.equal(padded.narrow(0, manager.rank() == 0 ? 0 : 3, h.size(0))));
    const at::Tensor d = h.slice(0, 2) - h.slice(0, 0, -2);
    EXPECT_EQ(d.size(0), spec(u).local_shape()[0]);
  });
}

// Differences of second order, and of fourth, in one to three dims with any edges: values, the
// adjoint, and the gradient of an energy.
class Stencils : public ::testing::TestWithParam<int> {};

TEST_P(Stencils, AreThoseOfOneProcess) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    for (std::uint64_t n = 0; n < (process() ? 9 : 60); ++n) {
      Draw draw(n * 53 + static_cast<std::uint64_t>(ranks));
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const int dims = 1 + static_cast<int>(n % 3);
      Shape shape;
      std::vector<Edge> edges;
      HaloWidths widths;
      for (int d = 0; d < dims; ++d) {
        shape.push_back(draw.between(1, dims == 3 ? 5 : 9));
        edges.push_back(draw.chance(60) ? Edge::circular : static_cast<Edge>(draw.below(4)));
        widths[d] = {2, 2, edges.back()};
      }
      const ShardSpec cut = draw.spec(mesh, shape, false);
      if (Coverage::instance().noting()) {
        Coverage::instance().note("finite differences on `halo_exchange`", cut,
                                  std::vector<std::string>(shape.size(), "space"), false,
                                  manager.rank());
        continue;
      }
      // Of a field with two more elements on either side of each dim.
      const auto at = [&](const at::Tensor& h, int dim, int by) {
        at::Tensor t = h;
        for (int d = 0; d < dims; ++d) t = t.narrow(d, d == dim ? 2 + by : 2, h.size(d) - 4);
        return t;
      };
      const auto laplacian = [&](const at::Tensor& h) {
        at::Tensor sum = at(h, 0, 0) * (-2.0 * dims);
        for (int d = 0; d < dims; ++d) sum = sum + at(h, d, 1) + at(h, d, -1);
        return sum;
      };
      const auto slope = [&](const at::Tensor& h, int d) {
        return (at(h, d, -2) - at(h, d, 2) + 8 * (at(h, d, 1) - at(h, d, -1))) / 12;
      };
      seed(n);
      const at::Tensor value = randn(shape, at::kDouble), y = randn(shape, at::kDouble);
      const auto apply = [&](const std::function<at::Tensor(const at::Tensor&)>& stencil,
                             const at::Tensor& field) {
        if (is_sharded(field)) return from_local(stencil(halo_exchange(field, widths)), cut);
        Box box;
        for (const auto extent : shape) box.push_back({-2, extent + 2});
        return stencil(sliced(field, box, edges));
      };
      for (int kind = 0; kind <= dims; ++kind) {
        const auto stencil = [&](const at::Tensor& h) {
          return kind == dims ? laplacian(h) : slope(h, kind);
        };
        const at::Tensor plain = value.clone().requires_grad_(true), u = leaf(value, cut);
        const at::Tensor expected = apply(stencil, plain), got = apply(stencil, u);
        const std::string where =
            concat(kind == dims ? "laplacian" : concat("slope in dim ", kind), " on ", cut);
        EXPECT_LT(difference(got, expected), 1e-13) << where;
        const at::Tensor adjoint =
            torch::autograd::grad({got}, {u}, {leaf(y, cut, false)}, true)[0];
        const double there = (whole(got) * y).sum().item<double>(),
                     here = (value * whole(adjoint)).sum().item<double>();
        EXPECT_NEAR(there, here, 1e-12 * (1 + whole(got).abs().sum().item<double>())) << where;
        expected.square().sum().backward();
        got.square().sum().backward();
        EXPECT_LT(difference(u.grad(), plain.grad()), 1e-12) << where;
      }
      if (::testing::Test::HasFailure()) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Stencils, ::testing::Values(1, 2, 3, 4));

TEST(Halo, SecondDerivativesFollow) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const at::Tensor value = randn({6}, at::kDouble);
    const ShardSpec cut(mesh, {6}, {Shard(0)}, {{0, {2, 4}}});
    const auto energy = [](const at::Tensor& h) {
      return (h.narrow(0, 1, h.size(0) - 1) - h.narrow(0, 0, h.size(0) - 1)).pow(3).sum();
    };
    const auto twice = [](const at::Tensor& loss, const at::Tensor& x) {
      const auto g = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      return torch::autograd::grad({g.square().sum()}, {x})[0];
    };
    const at::Tensor plain = value.clone().requires_grad_(true), u = leaf(value, cut);
    const at::Tensor h = sliced(plain, {{-1, 6}}, {Edge::circular});
    const at::Tensor expected = twice(energy(h), plain);
    const at::Tensor part = halo_exchange(u, {{0, {1, 0, Edge::circular}}});
    const at::Tensor got = twice(energy(part), u);
    EXPECT_LT(difference(got, expected), 1e-12);
  });
}

TEST(Halo, RequestsOverlapAndAreReused) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 2}});
    const ShardSpec cut(mesh, {8, 3}, {Shard(0)});
    const Halo halo = halo_of(cut, {{0, {1, 1, Edge::circular}}});
    for (int n = 0; n < 3; ++n) {
      const at::Tensor a = randn({8, 3}, at::kDouble), b = randn({8, 3});
      const at::Tensor of_a = to_local(leaf(a, cut, false)), of_b = to_local(leaf(b, cut, false));
      HaloValues first = halo.start_exchange(of_a), second = halo.start_exchange(of_b);
      second.arrival().wait();
      first.arrival().wait();
      const std::vector<Edge> edges{Edge::circular, Edge::zero};
      EXPECT_LT(difference(first.assemble(halo.needed()), sliced(a, halo.needed(), edges)), 1e-300);
      EXPECT_LT(difference(second.assemble(halo.needed()).to(at::kDouble),
                           sliced(b.to(at::kDouble), halo.needed(), edges)),
                1e-300);
    }
  });
}

TEST(Halo, AllToAllOnlyWhereEveryRankServesEveryOther) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 4}});
    const ShardSpec cut(mesh, {8}, {Shard(0)});
    EXPECT_EQ(halo_of(cut, {{0, {1, 1, Edge::zero}}}).method(), HaloMethod::point_to_point);
    EXPECT_EQ(halo_of(cut, {{0, {7, 7, Edge::zero}}}).method(), HaloMethod::all_to_all);
    EXPECT_FALSE(halo_of(cut, {{0, {0, 0, Edge::zero}}}).travels());
  });
}

TEST(Halo, BadRequestsSayWhatIsWrong) {
  on_ranks(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", 1}});
    const at::Tensor u = leaf(randn({4, 3}), ShardSpec(mesh, {4, 3}, {Shard(0)}));
    EXPECT_THROW(halo_exchange(at::zeros({3}), {{0, {1, 1}}}), InvalidArgument);
    EXPECT_THROW(halo_exchange(u, {{0, {-1, 1}}}), InvalidArgument);
    EXPECT_THROW(halo_exchange(u, {{2, {1, 1}}}), InvalidArgument);
    EXPECT_THROW(halo_exchange(u, {{0, {1, 1}}, {-2, {2, 2}}}), InvalidArgument) << "dim 0 twice";
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    EXPECT_THROW(halo_exchange(u, {{0, {kMost, 1}}}), InvalidArgument);
    EXPECT_THROW(halo_exchange(u, {{0, {1, kMost}}}), InvalidArgument);
    EXPECT_THROW(halo_exchange(u, {{0, {kMost / 2, kMost / 2, Edge::circular}}}), InvalidArgument);
    EXPECT_THROW(halo_exchange(u, Halo()), InvalidArgument);
    EXPECT_THROW(Halo().exchange(at::zeros({4, 3})), InvalidArgument);
    EXPECT_THROW((void)Halo().needed(), InvalidArgument);
    EXPECT_THROW(Halo(ShardSpec(mesh, {4}, {Shard(0)}), {Edge::zero}, {}), InvalidArgument);
    const Halo halo = halo_of(spec(u), {{0, {1, 1}}});
    EXPECT_THROW(halo.exchange(u), InvalidArgument) << "a ShardTensor where its local is needed";
    EXPECT_THROW(halo.start_exchange(to_local(u)).assemble({}), InvalidArgument);
    EXPECT_THROW(
        Halo(ShardSpec(mesh, {4}, {Partial()}), {Edge::zero}, [](int) { return Box{{0, 4}}; }),
        InvalidArgument);
  });
}

}  // namespace

}  // namespace tessera::test::halo_test
