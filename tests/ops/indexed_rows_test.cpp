// Operators by index on nodes and edges that are sharded over the same ranks: plain libtorch, run
// unchanged on sharded tensors, beside one process.

#include <gtest/gtest.h>

#include <functional>

#include "cut_rows.h"
#include "tessera/comm/group/trace.h"
#include "tessera/ops/ghosts/owned_rows.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::indexed_rows_test {
namespace {

// Values of nodes from those of nodes, of edges, and both ends of the edges.
using Layer = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& edges,
                                       const at::Tensor& source, const at::Tensor& target)>;

at::Tensor as_rows(const at::Tensor& index, const at::Tensor& like) {
  return index.view({-1, 1}).expand_as(like);
}

at::Tensor summed(const at::Tensor& x, const at::Tensor& target, const at::Tensor& message) {
  return at::zeros_like(x).index_add(0, target, message);
}

// What `reduce` gives by scatter_reduce, on ones that take part or not.
Layer reduces(const std::string& reduce, bool include_self) {
  return [=](const at::Tensor& x, const at::Tensor& e, const at::Tensor& source,
             const at::Tensor& target) {
    const at::Tensor message = x.index_select(0, source) * e;
    return x.mul(0.5).scatter_reduce(0, as_rows(target, message), message, reduce, include_self);
  };
}

const std::vector<std::pair<std::string, Layer>>& layers() {
  static const std::vector<std::pair<std::string, Layer>> all{
      {"index_select, index_add",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         return x + summed(x, t, (x.index_select(0, s) - x.index_select(0, t)).tanh() * e);
       }},
      {"x[index], scatter_add_",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor message = x.index({s}) * e + x.index({t}).square();
         return x.new_zeros(x.sizes()).scatter_add_(0, as_rows(t, message), message);
       }},
      {"gather, index_add_ with alpha",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         at::Tensor out = x * 2;
         return out.index_add_(0, t, x.gather(0, as_rows(s, e)).sin() * e, -0.5);
       }},
      {"softmax over a node's edges",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor score = x.index_select(0, t) * x.index_select(0, s) + e;
         const at::Tensor most = x.new_zeros(x.sizes()).scatter_reduce(
             0, as_rows(t, score), score.detach(), "amax", false);
         const at::Tensor weight = (score - most.index_select(0, t)).exp();
         const at::Tensor sum = summed(x, t, weight) + 1e-12;
         return summed(x, t, weight / sum.index_select(0, t) * x.index_select(0, s));
       }},
      {"columns",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor columns = x.t();
         return at::zeros_like(columns).index_add(1, t, columns.index_select(1, s) * e.t()).t();
       }},
      {"index_reduce",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor message = x.index_select(0, s) * e;
         return x.index_reduce(0, t, message, "mean").index_reduce(0, t, message, "amax", false);
       }},
      {"numbers of edges, means",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor count =
             e.new_zeros({x.size(0)}).scatter_add_(0, t, e.new_ones({e.size(0)}));
         const at::Tensor message = x.index_select(0, s) * e;
         const at::Tensor sum = message.new_zeros({x.size(0), x.size(1)});
         return sum.scatter_add_(0, as_rows(t, message), message) / count.clamp_min(1).unsqueeze(1);
       }},
      {"zeros made of nothing",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor message = x.index_select(0, s) * e;
         const auto options = at::TensorOptions(at::kDouble);
         at::Tensor sum = at::zeros({x.size(0), 3}, options),
                    count = at::zeros({x.size(0)}, options);
         sum.index_add_(0, t, message);
         count.scatter_add_(0, t, at::ones({t.size(0)}, options));
         return sum / count.clamp_min(1).unsqueeze(1) +
                at::zeros({x.size(0), 3}, options).index_add(0, t, message.sin());
       }},
      {"sum, self too", reduces("sum", true)},
      {"sum", reduces("sum", false)},
      {"mean, self too", reduces("mean", true)},
      {"mean", reduces("mean", false)},
      {"amax, self too", reduces("amax", true)},
      {"amax", reduces("amax", false)},
      {"amin", reduces("amin", false)}};
  return all;
}

// A graph, and how its nodes and edges are cut; the same on every rank that draws it.
struct CutGraph {
  std::int64_t nodes = 0, edges = 0;
  Sizes of_nodes, of_edges;
  at::Tensor source, target;
  CutGraph(Draw& draw, int ranks, bool by_target) {
    nodes = 1 + draw.below(14);
    edges = draw.below(40);
    of_nodes = draw.sizes(nodes, ranks);
    of_edges = draw.sizes(edges, ranks);
    seed(static_cast<std::uint64_t>(draw.below(1 << 20)));
    source = randint(nodes, {edges});
    target = randint(nodes, {edges});
    if (!by_target) return;
    target = std::get<0>(target.sort());
    const Partition rows(of_nodes);
    of_edges.assign(static_cast<std::size_t>(ranks), 0);
    for (std::int64_t e = 0; e < edges; ++e)
      ++of_edges[static_cast<std::size_t>(rows.owner(target[e].item<std::int64_t>()))];
  }
  OwnedRows owned(const DeviceMesh& mesh) const {
    const Interval own = Partition(of_nodes).interval(mesh.all().rank());
    std::vector<std::int64_t> ids;
    for (auto i = own.begin; i < own.end; ++i) ids.push_back(7 * i);
    return {mesh, ids};
  }
  at::Tensor node_rows(const at::Tensor& t, const DeviceMesh& mesh,
                       const std::vector<Placement>& placements) const {
    return distribute_tensor(t, mesh, placements, {{0, of_nodes}});
  }
  at::Tensor edge_rows(const at::Tensor& t, const DeviceMesh& mesh,
                       const std::vector<Placement>& placements) const {
    return distribute_tensor(t, mesh, placements, {{0, of_edges}});
  }
};

// An energy's two derivatives, by nodes and by edges.
Values derivatives(const at::Tensor& y, const at::Tensor& x, const at::Tensor& e) {
  const auto first = torch::autograd::grad({y.pow(2).sum()}, {x, e}, {}, true, true, true);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const at::Tensor& g : first)
    if (g.defined()) loss = loss + g.sin().sum();
  const auto second = torch::autograd::grad({loss}, {x, e}, {}, false, false, true);
  Values all(first.begin(), first.end());
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

void compare(const std::string& what, const Values& got, const Values& expected) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << what << ", value " << i;
    if (got[i].defined()) {
      EXPECT_LT(difference(got[i], expected[i], 1e-3), 1e-11) << what << ", value " << i;
    }
  }
}

class IndexedRows : public ::testing::TestWithParam<int> {};

TEST_P(IndexedRows, AreThoseOfOneProcessInValueAndTwoDerivatives) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < (process() ? 6 : 15); ++n) {
      Draw draw(n * 101 + static_cast<std::uint64_t>(ranks));
      const CutGraph graph(draw, ranks, draw.chance(50));
      const auto& [name, layer] = layers()[(n * 7 + 3) % layers().size()];
      const auto type = draw.chance(30) ? at::kInt : at::kLong;
      const at::Tensor x = randn({graph.nodes, 3}, at::kDouble).requires_grad_(true);
      const at::Tensor e = randn({graph.edges, 3}, at::kDouble).requires_grad_(true);
      // In an edge list of two rows, as networks are given it.
      const at::Tensor list = at::stack({graph.source, graph.target});
      const at::Tensor sharded =
          distribute_tensor(list.to(at::kLong), mesh, {Shard(1)}, {{1, graph.of_edges}});
      const at::Tensor xs = graph.node_rows(x.detach(), mesh, {Shard(0)}).requires_grad_(true);
      const at::Tensor es = graph.edge_rows(e.detach(), mesh, {Shard(0)}).requires_grad_(true);
      const bool narrow = name == layers()[0].first || name == "columns";
      const auto index = [&](const at::Tensor& t) { return narrow ? t.to(type) : t; };
      const OwnedRowsScope rows(graph.owned(mesh));
      const at::Tensor y = layer(x, e, graph.source, graph.target);
      const at::Tensor ys = layer(xs, es, index(sharded.select(0, 0)), index(sharded.select(0, 1)));
      const std::string what =
          concat(name, ", case ", n, " on ", ranks, " ranks: nodes ", tessera::list(graph.of_nodes),
                 ", edges ", tessera::list(graph.of_edges));
      EXPECT_EQ(spec(ys).sizes().at(0), graph.of_nodes) << what << ' ' << spec(ys);
      compare(what, {ys}, {y});
      compare(what, derivatives(ys, xs, es), derivatives(y, x, e));
      // In inference mode what is made of nothing is gathered.
      if (name != "zeros made of nothing") {
        const c10::InferenceMode inference;
        compare(what + ", in inference mode",
                {layer(graph.node_rows(x.detach(), mesh, {Shard(0)}),
                       graph.edge_rows(e.detach(), mesh, {Shard(0)}),
                       graph.edge_rows(graph.source, mesh, {Shard(0)}),
                       graph.edge_rows(graph.target, mesh, {Shard(0)}))},
                {y});
      }
      if (::testing::Test::HasFailure()) return;
    }
  });
}

// A layer's exchange of ghosts: one forward and one backward, of the bytes of the ghost rows; of
// edges that are cut by their targets. Nothing else is sent once the edges are known.
TEST_P(IndexedRows, MoveGhostsOnceInEachDirection) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < 6; ++n) {
      Draw draw(n * 7 + static_cast<std::uint64_t>(ranks));
      const CutGraph graph(draw, ranks, true);
      const auto source = graph.edge_rows(graph.source, mesh, {Shard(0)});
      const auto target = graph.edge_rows(graph.target, mesh, {Shard(0)});
      const at::Tensor value = randn({graph.nodes, 5}, at::kDouble);
      std::int64_t ghosts = 0, sent = 0;
      const Partition nodes(graph.of_nodes), edges(graph.of_edges);
      for (std::int64_t i = 0; i < graph.nodes; ++i) {
        for (int r = 0; r < ranks; ++r) {
          const at::Tensor of_rank = graph.source.narrow(0, edges.begin(r), edges.size(r));
          if (nodes.owner(i) == r || !of_rank.eq(i).any().item<bool>()) continue;
          ghosts += r == manager.rank();
          sent += nodes.owner(i) == manager.rank();
        }
      }
      for (int again = 0; again < 3; ++again) {
        const at::Tensor x = graph.node_rows(value, mesh, {Shard(0)}).requires_grad_(true);
        CommTraceScope trace(mesh.all());
        // The message of each edge from both of its ends.
        const at::Tensor y =
            summed(x, target, x.index_select(0, source).sin() * x.index_select(0, target).square());
        const auto forward = trace->summary();
        torch::autograd::grad({y}, {x}, {at::ones_like(y)});
        const auto both = trace->summary();
        if (again == 0) continue;  // planned
        std::int64_t calls = 0, bytes = 0, calls_forward = 0;
        for (const CommSummary& call : both) {
          calls += call.count;
          bytes += call.bytes;
        }
        for (const CommSummary& call : forward) calls_forward += call.count;
        const bool travels = ghosts + sent > 0;
        EXPECT_EQ(calls_forward, travels ? 1 : 0) << trace->table();
        EXPECT_EQ(calls, travels ? 2 : 0) << trace->table();
        EXPECT_EQ(bytes, 2 * (ghosts + sent) * 5 * 8);
      }
    }
  });
}

// Over one axis of a mesh, beside samples, features and copies on the other.
TEST_P(IndexedRows, AreCutOverAnyAxisBesideOthers) {
  const int ranks = GetParam();
  on_ranks(2 * ranks, [&](DistributedManager& manager) {
    const bool first = ranks % 2 == 0;
    const auto mesh = first ? manager.mesh({{"domain", ranks}, {"other", 2}})
                            : manager.mesh({{"other", 2}, {"domain", ranks}});
    const auto on = [&](Placement rows, Placement other) {
      return first ? std::vector<Placement>{rows, other} : std::vector<Placement>{other, rows};
    };
    for (std::uint64_t n = 0; n < 8; ++n) {
      Draw draw(n * 13 + static_cast<std::uint64_t>(ranks));
      const CutGraph graph(draw, ranks, draw.chance(50));
      const auto& [name, layer] = layers()[n % 4];
      const Placement features = draw.chance(50) ? Shard(1) : Placement(Replicate());
      const at::Tensor x = randn({graph.nodes, 3}, at::kDouble).requires_grad_(true);
      const at::Tensor e = randn({graph.edges, 3}, at::kDouble).requires_grad_(true);
      const at::Tensor xs = graph.node_rows(x.detach(), mesh, on(Shard(0), features));
      const at::Tensor es = graph.edge_rows(e.detach(), mesh, on(Shard(0), features));
      xs.requires_grad_(true);
      es.requires_grad_(true);
      const auto source = graph.edge_rows(graph.source, mesh, on(Shard(0), Replicate()));
      const auto target = graph.edge_rows(graph.target, mesh, on(Shard(0), Replicate()));
      const at::Tensor y = layer(x, e, graph.source, graph.target);
      const at::Tensor ys = layer(xs, es, source, target);
      const std::string what = concat(name, ", case ", n);
      EXPECT_TRUE(spec(ys) == spec(xs)) << what << ' ' << spec(ys);
      compare(what, {ys}, {y});
      compare(what, derivatives(ys, xs, es), derivatives(y, x, e));
      if (::testing::Test::HasFailure()) return;
    }
  });
}

// An index that is expanded over no features names no rows, of however many edges.
TEST_P(IndexedRows, OfNoFeatures) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    Draw draw(static_cast<std::uint64_t>(ranks));
    for (int n = 0; n < 4; ++n) {
      const CutGraph graph(draw, ranks, false);
      const auto& [name, layer] = layers()[static_cast<std::size_t>(n == 0 ? 2 : 9 + n)];
      const at::Tensor x = at::ones({graph.nodes, 0}, at::kDouble);
      const at::Tensor e = at::ones({graph.edges, 0}, at::kDouble);
      const auto cut = [&](const at::Tensor& t) { return graph.edge_rows(t, mesh, {Shard(0)}); };
      const at::Tensor y =
          layer(graph.node_rows(x, mesh, {Shard(0)}), cut(e), cut(graph.source), cut(graph.target));
      compare(concat(name, ", case ", n), {y}, {layer(x, e, graph.source, graph.target)});
    }
  });
}

// More graphs than are kept, and tensors that are new each time.
TEST_P(IndexedRows, HavePlansOfManyGraphs) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    const at::Tensor value = randn({30, 2}, at::kDouble);
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)});
    for (int n = 0; n < 60; ++n) {
      seed(static_cast<std::uint64_t>(n * 7 % 23));
      // On one rank the edges are those of another graph too.
      const at::Tensor index = randint(30, {40});
      if (n % 3 == 0) index.narrow(0, 0, 40 / ranks).fill_(3);
      const at::Tensor got = x.index_select(0, distribute_tensor(index, mesh, {Shard(0)}));
      EXPECT_TRUE(full_tensor(got).equal(value.index_select(0, index)));
    }
  });
}

// Ranks that share rows along one axis of a mesh have graphs of their own along the other.
TEST_P(IndexedRows, HavePlansOfOtherNumbersOfGraphsAlongAnotherAxis) {
  const int ranks = GetParam();
  on_ranks(2 * ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}, {"samples", 2}});
    // The rows that this rank has of a value that is sharded along an axis.
    const auto rows = [&](const at::Tensor& t, int axis) {
      const std::int64_t parts = axis == 0 ? ranks : 2, size = t.size(0) / parts;
      std::vector<Placement> placements(2, Replicate());
      placements[static_cast<std::size_t>(axis)] = Shard(0);
      const ShardSpec spec(mesh, t.sizes().vec(), placements,
                           {{0, Sizes(static_cast<std::size_t>(parts), size)}});
      return from_local(t.narrow(0, spec.local_offset()[0], size), spec);  // without a call
    };
    const at::Tensor value = randn({12, 2}, at::kDouble);
    const at::Tensor index = randint(12, {24});
    const at::Tensor along_samples = rows(index, 1);
    const auto whole = [&](const at::Tensor& at, int axis) {
      return to_local(rows(value, axis).index_select(0, at));
    };
    const at::Tensor before = whole(along_samples, 1);
    if (mesh.coordinate()[1] == 1)
      for (int n = 0; n < 40; ++n) whole(rows(randint(12, {24}), 0), 0);
    EXPECT_TRUE(whole(along_samples, 1).equal(before));
    EXPECT_TRUE(before.equal(value.index_select(0, to_local(along_samples))));
  });
}

TEST_P(IndexedRows, AreRefusedOnEveryRankWhereAGraphChangesOrIsNone) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    // A rank that fails leaves messages, with which MPI cannot be finalised (docs/errors.md).
    if (manager.world().backend() == "mpi") GTEST_SKIP() << "over MPI the job would end with 1";
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"domain", ranks}});
    const at::Tensor value = at::arange(12, at::kDouble).view({6, 2});
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)});
    at::Tensor edges = distribute_tensor(at::arange(8) % 6, mesh, {Shard(0)});
    EXPECT_TRUE(
        full_tensor(x.index_select(0, edges)).equal(value.index_select(0, at::arange(8) % 6)));
    // On all ranks: each says so.
    edges.add_(0);
    x.index_select(0, edges);  // the same values
    edges.fill_(2);
    const std::string all = thrown<InvalidArgument>([&] { x.index_select(0, edges); });
    EXPECT_NE(all.find("was written to since"), std::string::npos) << all;
    EXPECT_NE(all.find("now names row 2"), std::string::npos) << all;
    // On one rank alone: the others learn it.
    edges = distribute_tensor(at::arange(8) % 6, mesh, {Shard(0)});
    x.index_select(0, edges);
    const bool last = manager.rank() == ranks - 1;
    if (last) to_local(edges).fill_(1);
    const std::string one = thrown<Error>([&] {
      x.index_select(0, edges);
      mesh.all().barrier();
    });
    EXPECT_NE(one.find(concat("rank ", ranks - 1)), std::string::npos) << one;
    // Ranks that have caught it go on.
    const at::Tensor again = distribute_tensor(at::arange(8) % 5, mesh, {Shard(0)});
    EXPECT_TRUE(
        full_tensor(x.index_select(0, again)).equal(value.index_select(0, at::arange(8) % 5)));
    // Rows that there are not, and rows from the end.
    const auto wrong = [&](std::int64_t row) {
      at::Tensor index = at::arange(8) % 6;
      index[7] = row;
      return distribute_tensor(index, mesh, {Shard(0)});
    };
    EXPECT_TRUE(full_tensor(x.index({wrong(-1)})).equal(value.index({full_tensor(wrong(-1))})));
    EXPECT_ANY_THROW(full_tensor(x.index_select(0, wrong(6))));
  });
}

// Ids of any kind become rows, and a network of plain libtorch runs on them.
TEST_P(IndexedRows, AreNumberedByOwnerAndRenumberEdges) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < 10; ++n) {
      Draw draw(n * 19 + static_cast<std::uint64_t>(ranks));
      const std::int64_t first = draw.chance(50) ? 0 : std::int64_t{1} << 40;
      const int nodes = draw.between(1, 15), all_edges = draw.below(30);
      std::vector<int> owner;
      std::vector<std::int64_t> owned, order, source, target;
      for (int i = 0; i < nodes; ++i) owner.push_back(draw.below(ranks));
      for (int r = 0; r < ranks; ++r)
        for (int i = nodes; i-- > 0;)
          if (owner[i] == r) order.push_back(i);
      for (const auto i : order)
        if (owner[i] == manager.rank()) owned.push_back(first + 3 * i);
      const bool anywhere = draw.chance(40);
      at::Tensor list = at::zeros({2, all_edges}, at::kLong);
      for (int e = 0; e < all_edges; ++e) {
        list[0][e] = draw.below(nodes);
        const int to = draw.below(nodes);
        list[1][e] = to;
        if ((anywhere ? e % ranks : owner[to]) != manager.rank()) continue;
        source.push_back(first + 3 * list[0][e].item<std::int64_t>());
        target.push_back(first + 3 * to);
      }
      const OwnedRows rows(mesh, owned);
      EXPECT_EQ(rows.size(), nodes);
      EXPECT_NE(rows.summary().find(concat(nodes, " rows on ", ranks, " ranks")),
                std::string::npos);
      seed(n);
      const at::Tensor value = randn({nodes, 2}, at::kDouble);
      const at::Tensor by_row = value.index_select(0, at::tensor(order));
      const at::Tensor x =
          rows.shard(by_row.narrow(0, rows.begin(), static_cast<std::int64_t>(owned.size())));
      EXPECT_TRUE(full_tensor(x).equal(by_row));
      const at::Tensor edges = rows.edges(source, target, anywhere);
      const at::Tensor got =
          summed(x, edges.select(0, 1), x.index_select(0, edges.select(0, 0)).tanh());
      const at::Tensor expected = summed(value, list[1], value.index_select(0, list[0]).tanh());
      EXPECT_LT(difference(got, expected.index_select(0, at::tensor(order))), 1e-13);
    }
  });
}

TEST_P(IndexedRows, AreNotNumberedFromAWrongPartition) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"domain", ranks}});
    const std::int64_t me = manager.rank(), other = (me + 1) % ranks;
    const OwnedRows rows(mesh, Ids{10 + me});
    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      const std::string text = thrown<InvalidArgument>(call);
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    refused("99 (needed by rank", [&] { rows.numbers(Ids{99}); });
    refused("sources of edges", [&] { rows.edges(Ids{10, 10}, Ids{10}); });
    refused("this rank owns 1", [&] { rows.shard(at::ones({2 + me})); });
    if (ranks > 1) {
      refused("ids that two ranks own: 5", [&] { OwnedRows(mesh, Ids{5}); });
      refused(concat(10, " -> ", 11, " (edge 0; rank 1 owns 11)"),
              [&] { rows.edges(Ids{10}, Ids{11}); });
      EXPECT_NO_THROW(rows.edges(Ids{10 + me}, Ids{10 + other}, true));
    }
    // A graph of another partition: its rows are others.
    const at::Tensor x = distribute_tensor(at::ones({3, 2}), mesh, {Shard(0)});
    const at::Tensor index = distribute_tensor(at::full({4}, 7, at::kLong), mesh, {Shard(0)});
    EXPECT_ANY_THROW(x.index_select(0, index));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, IndexedRows, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera::test::indexed_rows_test
