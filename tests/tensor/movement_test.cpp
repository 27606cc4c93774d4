// What redistribution moves: every pair of specs beside the fewest elements that any way of doing
// it must move.

#include <map>
#include <set>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/tensor/spec/detail/redistribution_plan.h"

namespace tessera::test::movement_test {

namespace {

using Shape = std::vector<std::int64_t>;

Shape shape(Draw& draw) {
  Shape s;
  for (int i = draw.between(1, 3); i > 0; --i) s.push_back(draw.between(0, 6));
  return s;
}

std::vector<Axis> axes(Draw& draw, int ranks) {
  if (ranks == 4 && draw.chance(30)) return {{"a", 2}, {"b", 1}, {"c", 2}};
  return draw.axes(ranks);
}

// How often any way must move an element between two ranks, summed over elements. An element whose
// value is over H ranks (a summand on each; H is 1 if nothing is partial) needs H - 1 messages
// before any rank can know it, and one more for each further rank that wants it: Partial targets
// want it on one rank of those that share the summand.
std::int64_t fewest(const ShardSpec& from, const ShardSpec& to) {
  const Sharding &a = from.sharding(), &b = to.sharding();
  const int ranks = a.positions(), axes = from.mesh_dims();
  const auto same_but = [&](int p, int q, const auto& differ) {
    for (int x = 0; x < axes; ++x) {
      if (!differ(x) && a.coordinate(p, x) != a.coordinate(q, x)) return false;
    }
    return true;
  };
  const auto stays = [&](int x) {
    return from.placements()[x].is_partial() && from.placements()[x] == to.placements()[x];
  };
  const auto ends = [&](int x) { return from.placements()[x].is_partial() && !stays(x); };
  const auto starts = [&](int x) { return to.placements()[x].is_partial() && !stays(x); };
  int terms = 1, layers = 1;
  for (int x = 0; x < axes; ++x) {
    if (ends(x)) terms *= a.mesh()[x];
    if (stays(x)) layers *= a.mesh()[x];
  }
  // Axes that stay partial: each of their layers is a tensor of its own, all alike. Look at the
  // first.
  const auto in_layer = [&](int p) {
    for (int x = 0; x < axes; ++x) {
      if (stays(x) && a.coordinate(p, x) != 0) return false;
    }
    return true;
  };
  const auto holds = [](const Box& box, const Shape& index) {
    for (std::size_t d = 0; d < index.size(); ++d) {
      if (!box[d].contains(index[d])) return false;
    }
    return true;
  };
  std::int64_t total = 0;
  Shape index(from.shape().size(), 0);
  for (std::int64_t e = 0; e < from.numel(); ++e) {
    std::int64_t rest = e;
    for (std::size_t d = index.size(); d-- > 0;) {
      index[d] = rest % from.shape()[d];
      rest /= from.shape()[d];
    }
    // wanted: one rank for each set of ranks of which one must have it
    std::vector<int> held, wanted;
    for (int p = 0; p < ranks; ++p) {
      if (!in_layer(p)) continue;
      if (holds(a.box(p), index)) held.push_back(p);
      bool first = true;
      for (int x = 0; x < axes; ++x) first &= !starts(x) || a.coordinate(p, x) == 0;
      if (first && holds(b.box(p), index)) wanted.push_back(p);
    }
    int satisfied = 0;
    for (const int w : wanted) {
      bool has = false;
      for (const int h : held) has |= same_but(w, h, starts);
      satisfied += has;
    }
    const int n = static_cast<int>(wanted.size());
    total += terms == 1 ? n - satisfied : terms - 1 + n - (satisfied > 0);
  }
  return total * layers;
}

// What the calls in a trace moved, summed over all ranks by the caller. In halves, because a
// message is counted by both sides. A rank's own shard in an all-to-all may go through the call or
// past it.
double moved(const CommTrace& trace, const std::map<std::string, int>& sizes, double sent,
             double own) {
  double bytes = 0;
  for (const CommEvent& e : trace.events()) {
    const double n = sizes.at(e.group), given = static_cast<double>(e.bytes);
    if (e.operation == "all_gather" || e.operation == "broadcast") {
      bytes += given * (n - 1);
    } else if (e.operation == "reduce_scatter") {
      bytes += given * (n - 1) / n;
    } else if (e.operation == "all_reduce") {
      bytes += 2 * given * (n - 1) / n;
    } else if (e.operation == "all_to_all") {
      EXPECT_TRUE(given == sent || given == sent + own)
          << given << " of " << sent << " and " << own;
      bytes += sent;
    } else if (e.operation == "exchange") {
      bytes += given / 2;
    } else {
      ADD_FAILURE() << "redistribution called " << e.operation;
    }
  }
  return bytes;
}

// Every partial axis of a kind of its own choice; `alike`: all of one.
ShardSpec with_kinds(Draw& draw, const ShardSpec& spec, bool alike, bool integers = false) {
  const std::vector<ReduceOp::Kind> kinds = {ReduceOp::Kind::sum, ReduceOp::Kind::avg,
                                             ReduceOp::Kind::product, ReduceOp::Kind::min,
                                             ReduceOp::Kind::max};
  const auto any = [&] {
    const auto kind = draw.of(kinds);
    return integers && kind == ReduceOp::Kind::avg ? ReduceOp::Kind::sum : kind;
  };
  const auto one = any();
  auto placements = spec.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Partial(alike ? one : any());
  }
  return spec.with_placements(placements);
}

bool of_two_kinds(const ShardSpec& spec) {
  std::set<ReduceOp::Kind> kinds;
  for (const Placement& p : spec.placements()) {
    if (p.is_partial()) kinds.insert(p.op);
  }
  return kinds.size() > 1;
}

// Partial axes of two kinds do not commute: the summands of a rank are of no use before all others
// of its axis have been added. Each axis is reduced by itself, on everything that a rank holds;
// then the rest is as for a tensor without partial axes.
double fewest_of_two_kinds(const ShardSpec& from, const ShardSpec& to) {
  const Sharding& a = from.sharding();
  ShardSpec reduced = from;
  double total = 0;
  for (int x = 0; x < from.mesh_dims(); ++x) {
    if (!from.placements()[x].is_partial()) continue;
    const double n = a.mesh()[x];
    for (int p = 0; p < a.positions(); ++p)
      total += 2 * (n - 1) / n * static_cast<double>(volume(a.box(p)));
    reduced = reduced.with_placement(x, Replicate());
  }
  return total + static_cast<double>(fewest(reduced, to));
}

struct Counted {
  double bytes = 0;
  std::string calls;
};

Counted count(DistributedManager& manager, const DeviceMesh& mesh, const at::Tensor& x,
              const ShardSpec& to) {
  const ShardSpec from = spec(x);
  std::map<std::string, int> sizes;
  for (int set = 1; set < 1 << mesh.mesh().dims(); ++set) {
    std::vector<int> some;
    for (int a = 0; a < mesh.mesh().dims(); ++a) {
      if (set & 1 << a) some.push_back(a);
    }
    const Group g = mesh.group(some);
    sizes[g.name()] = g.size();
  }
  Counted c;
  at::Tensor total = at::zeros({1}, at::kDouble);
  {
    const CommTraceScope trace(manager);
    const at::Tensor y = redistribute(x, to);
    const auto plan = detail::make_redistribution_plan(from, to);
    double own = 0;
    for (const Box& box : plan.move.transfer.copies) own += static_cast<double>(volume(box)) * 8;
    total[0] = moved(*trace, sizes, static_cast<double>(plan.move.transfer.sent()) * 8, own);
    for (const auto& e : trace->events()) c.calls += e.operation + " ";
  }
  mesh.all().all_reduce(total);
  c.bytes = total.item<double>();
  return c;
}

}  // namespace

// Nothing that shards could be terms of two kinds of: the value is made whole on those axes, and
// one rank of each keeps it.
ShardSpec aim(const ShardSpec& from, const ShardSpec& to) {
  if (!of_two_kinds(to)) return to;
  ShardSpec whole = to;
  for (int x = 0; x < to.mesh_dims(); ++x) {
    if (to.placements()[x].is_partial() && !(from.placements()[x] == to.placements()[x]))
      whole = whole.with_placement(x, Replicate());
  }
  return whole;
}

// However the summands are reduced, a message carries one summand or one result, so that the bound
// is one for all kinds. Terms of one kind may meet in any order and attain it; those of two kinds
// must be combined axis by axis: how much more that moves is known, and not more does.
TEST(Movement, NoPairMovesMoreThanItMust) {
  for (const int ranks : {1, 2, 3, 4}) {
    int pairs = 0, exact = 0, reductions = 0, two_kinds = 0;
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(500 + ranks);
      for (int i = 0; i < 150; ++i) {
        const auto mesh = manager.mesh(draw.mapped(axes(draw, ranks)));
        const auto s = shape(draw);
        test::seed(i);
        const at::Tensor value = randn(s, at::kDouble);
        const bool alike = draw.chance(80);
        const ShardSpec from = with_kinds(draw, draw.spec(mesh, s), alike),
                        to = with_kinds(draw, draw.spec(mesh, s), alike);
        const at::Tensor x = leaf(value, from, false);
        ASSERT_LT(difference(redistribute(x, to), value), 1e-13) << from << " to " << to;
        const Counted c = count(manager, mesh, x, to);
        const std::int64_t bound = fewest(from, to) * 8;
        bool reduces = false;
        for (int a = 0; a < from.mesh_dims(); ++a)
          reduces |=
              from.placements()[a].is_partial() && !(from.placements()[a] == to.placements()[a]);
        // A reduction may need one step more for what ends up elsewhere than where its terms are; a
        // nested cut that becomes terms, too.
        if (of_two_kinds(from)) {
          ASSERT_NEAR(c.bytes, fewest_of_two_kinds(from, aim(from, to)) * 8, 1e-6)
              << from << " to " << to << ": " << c.calls;
        } else if (reduces || (to.has_partial() && !from.has_partial())) {
          const std::int64_t most = fewest(from, aim(from, to)) * 8 + from.numel() * 8;
          ASSERT_LE(c.bytes, static_cast<double>(most) + 1e-6)
              << from << " to " << to << ": " << c.calls;
        } else {
          ASSERT_NEAR(c.bytes, static_cast<double>(bound), 1e-6)
              << from << " to " << to << ": " << c.calls;
        }
        ASSERT_GE(c.bytes, static_cast<double>(bound) - 1e-6)
            << from << " to " << to << ": " << c.calls << ": the bound is wrong";
        if (manager.rank() == 0) {
          ++pairs;
          reductions += reduces;
          two_kinds += of_two_kinds(from);
          exact += c.bytes < static_cast<double>(bound) + 0.5;
        }
      }
    });
    if (process() && pairs == 0) continue;  // on other ranks
    ASSERT_GT(pairs, 0);
    std::cout << ranks << " ranks: " << pairs << " pairs, " << exact << " at the bound, "
              << reductions << " with a reduction, " << two_kinds << " of terms of two kinds\n";
    EXPECT_GT(exact, pairs * 9 / 10);
  }
}

TEST(Movement, EveryKindOfReductionKeepsTheValue) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(700 + ranks);
      for (int i = 0; i < 150; ++i) {
        const auto mesh = manager.mesh(draw.mapped(axes(draw, ranks)));
        const auto s = shape(draw);
        test::seed(i);
        const bool integers = draw.chance(30);
        const at::Tensor value = integers ? randint(20, s).sub(10) : randn(s, at::kDouble);
        const ShardSpec from = with_kinds(draw, draw.spec(mesh, s), false, integers),
                        to = with_kinds(draw, draw.spec(mesh, s), false, integers);
        const at::Tensor x = redistribute(
            distribute_tensor(value, mesh, std::vector<Placement>(mesh.mesh().dims())), from);
        ASSERT_EQ(spec(x), from);
        ASSERT_LT(difference(redistribute(x, to), value), 1e-13) << from << " to " << to;
      }
      const auto mesh = manager.mesh({{"x", ranks}});
      const at::Tensor truth = at::arange(6).remainder(2).to(at::kBool);
      for (const auto kind : {ReduceOp::Kind::sum, ReduceOp::Kind::product, ReduceOp::Kind::min,
                              ReduceOp::Kind::max}) {
        const at::Tensor x =
            redistribute(distribute_tensor(truth, mesh, {Shard(0)}), {Partial(kind)});
        EXPECT_EQ(difference(redistribute(x, {Shard(0)}), truth), 0) << Partial(kind);
      }
    });
  }
}

TEST(Movement, TheBestCallForEach) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    const auto calls = [&](const std::vector<Placement>& from, const std::vector<Placement>& to,
                           const ShardSizes& from_sizes = {}, const ShardSizes& to_sizes = {}) {
      const at::Tensor x = distribute_tensor(at::ones({8, 8}, at::kDouble), mesh, from, from_sizes);
      return count(manager, mesh, x, ShardSpec(mesh, {8, 8}, to, to_sizes)).calls;
    };
    const auto r = Replicate(), p = Partial();
    EXPECT_EQ(calls({r, r}, {Shard(0), Shard(1)}), "") << "a slice is local";
    EXPECT_EQ(calls({Shard(0), r}, {p, r}), "") << "a shard is a term";
    EXPECT_EQ(calls({Shard(0), Shard(1)}, {r, r}), "all_gather ") << "two axes in one call";
    EXPECT_EQ(calls({Shard(0), Shard(0)}, {Shard(0), r}), "all_gather ");
    EXPECT_EQ(calls({p, p}, {r, r}), "all_reduce ");
    EXPECT_EQ(calls({p, p}, {Shard(0), Shard(1)}), "reduce_scatter ");
    EXPECT_EQ(calls({p, r}, {r, Shard(1)}), "all_reduce ") << "of the slice";
    EXPECT_EQ(calls({p, Shard(0)}, {r, Shard(1)}), "reduce_scatter exchange ");
    EXPECT_EQ(calls({Shard(0), r}, {Shard(1), r}), "all_to_all ");
    EXPECT_EQ(calls({Shard(0), Shard(0)}, {Shard(0), Shard(0)}, {}, {{0, {3, 1, 2, 2}}}),
              manager.rank() < 2 ? "exchange " : "")
        << "neighbours only";
    EXPECT_EQ(calls({Shard(0), Shard(0)}, {r, r}, {{0, {0, 8, 0, 0}}}), "broadcast ");
  });
}

TEST(Movement, PlansAreMadeOnce) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    detail::RedistributionPlans plans;
    const ShardSpec rows(mesh, {6, 4}, {Shard(0)}), columns(mesh, {6, 4}, {Shard(1)}),
        uneven(mesh, {6, 4}, {Shard(1)}, {{1, {3, 1}}});
    const auto plan = plans.of(rows, columns);
    EXPECT_EQ(plans.of(rows, columns), plan);
    EXPECT_NE(plans.of(rows, uneven), plan);
    EXPECT_NE(plans.of(columns, rows), plan);
  });
}

}  // namespace tessera::test::movement_test
