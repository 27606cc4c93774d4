// Sums by edges in a named order: plain libtorch on one process, bit by bit, in float32, whatever
// the ranks, what they own and where the edges are.

#include <gtest/gtest.h>

#include <functional>

#include "cut_rows.h"
#include "tessera/comm/group/trace.h"
#include "tessera/ops/ghosts/owned_rows.h"
#include "tessera/ops/ghosts/sharded_graph.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::ordered_sums_test {
namespace {

using OrderedLayer = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& e,
                                              const at::Tensor& source, const at::Tensor& target)>;

at::Tensor spread_over(const at::Tensor& index, const at::Tensor& like) {
  return index.view({-1, 1}).expand_as(like);
}

OrderedLayer ordered_reduce(const std::string& reduce, bool include_self) {
  return [=](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
    const at::Tensor message = x.index_select(0, s) * e;
    return x.mul(0.5).scatter_reduce(0, spread_over(t, message), message, reduce, include_self);
  };
}

// Of operators that round each number alone: libtorch's exp and tanh depend on where in a tensor
// a number is.
const std::vector<std::pair<std::string, OrderedLayer>>& ordered_layers() {
  static const std::vector<std::pair<std::string, OrderedLayer>> all{
      {"index_select, index_add",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor message = (x.index_select(0, s) - x.index_select(0, t)) * e;
         return x + at::zeros_like(x).index_add(0, t, message);
       }},
      {"x[index], scatter_add_",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor message = x.index({s}) * e;
         return x.new_zeros(x.sizes()).scatter_add_(0, spread_over(t, message), message);
       }},
      {"gather, index_add_ with alpha",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         at::Tensor out = x * 2;
         return out.index_add_(0, t, x.gather(0, spread_over(s, e)) * e, -0.5);
       }},
      {"columns",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor columns = x.t();
         return at::zeros_like(columns).index_add(1, t, columns.index_select(1, s) * e.t()).t();
       }},
      {"index_reduce",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         return x.index_reduce(0, t, x.index_select(0, s) * e, "mean");
       }},
      {"sums over numbers of edges",
       [](const at::Tensor& x, const at::Tensor& e, const at::Tensor& s, const at::Tensor& t) {
         const at::Tensor message = x.index_select(0, s) * e;
         const at::Tensor count =
             e.new_zeros({x.size(0)}).scatter_add_(0, t, e.new_ones({e.size(0)}));
         const at::Tensor sum = message.new_zeros({x.size(0), x.size(1)});
         return sum.index_add_(0, t, message) / count.clamp_min(1).unsqueeze(1);
       }},
      {"sum, self too", ordered_reduce("sum", true)},
      {"sum", ordered_reduce("sum", false)},
      {"mean, self too", ordered_reduce("mean", true)},
      {"mean", ordered_reduce("mean", false)},
      {"amax", ordered_reduce("amax", false)}};
  return all;
}

// The value, and two derivatives of its square.
Values ordered_derivatives(const OrderedLayer& layer, const at::Tensor& x, const at::Tensor& e,
                           const at::Tensor& source, const at::Tensor& target) {
  const at::Tensor y = layer(x, e, source, target);
  const auto first = torch::autograd::grad({(y * y).sum()}, {x, e}, {}, true, true, true);
  at::Tensor loss;
  for (const at::Tensor& g : first) {
    if (!g.defined()) continue;
    loss = loss.defined() ? loss + (g * g).sum() : (g * g).sum();
  }
  Values all{y, first[0], first[1]};
  const auto second = torch::autograd::grad({loss}, {x, e}, {}, false, false, true);
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
         a.contiguous().view(at::kInt).equal(b.contiguous().view(at::kInt));
}

// Which rank has each edge, and this rank's, not in their order.
struct CutEdges {
  Sizes sizes;
  Ids mine, source, target, order;
  CutEdges(Draw& draw, const Cut& cut, const Graph& graph, int rank, bool anywhere) {
    const int ranks = static_cast<int>(cut.owned.size());
    sizes.assign(static_cast<std::size_t>(ranks), 0);
    std::vector<int> owner(cut.id.size());
    for (int r = 0; r < ranks; ++r)
      for (const auto i : cut.owned[r]) owner[i] = r;
    for (std::size_t e = 0; e < graph.source.size(); ++e) {
      const int r = anywhere ? draw.below(ranks) : owner[graph.target[e]];
      ++sizes[r];
      if (r == rank)
        mine.insert(mine.begin() + static_cast<std::ptrdiff_t>(mine.size() / 2),
                    static_cast<std::int64_t>(e));
    }
    for (const auto e : mine) {
      source.push_back(cut.id[graph.source[e]]);
      target.push_back(cut.id[graph.target[e]]);
      order.push_back(3 * e + 1);
    }
  }
};

class OrderedSums : public ::testing::TestWithParam<int> {};

TEST_P(OrderedSums, AreThoseOfOneProcessToTheBitInTwoDerivatives) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < (process() ? 11 : 44); ++n) {
      Draw draw(n * 89 + static_cast<std::uint64_t>(ranks));
      const Cut cut(draw, ranks);
      const Graph graph(draw, static_cast<std::int64_t>(cut.id.size()));
      const bool anywhere = draw.chance(40);
      const CutEdges own(draw, cut, graph, manager.rank(), anywhere);
      const auto& [name, layer] = ordered_layers()[n % ordered_layers().size()];
      seed(n);
      const std::int64_t width = draw.between(1, 3);
      const auto rows = static_cast<std::int64_t>(cut.id.size()),
                 edges = static_cast<std::int64_t>(graph.source.size());
      const at::Tensor x = randn({rows, width}, at::kFloat).requires_grad_();
      const at::Tensor e = randn({edges, width}, at::kFloat).requires_grad_();
      const Values expected =
          ordered_derivatives(layer, x, e, index_of(graph.source), index_of(graph.target));
      const OwnedRows nodes(mesh, cut.ids(cut.owned[manager.rank()]));
      const at::Tensor owned = index_of(cut.owned[manager.rank()]), mine = index_of(own.mine);
      const at::Tensor ends = nodes.edges(own.source, own.target, anywhere, own.order);
      const at::Tensor xs = nodes.shard(x.detach().index_select(0, owned)).requires_grad_();
      const at::Tensor es =
          from_local(e.detach().index_select(0, mine), mesh, {Shard(0)}, {{0, own.sizes}})
              .requires_grad_();
      const OwnedRowsScope scope(nodes);
      const Values got = ordered_derivatives(layer, xs, es, ends[0], ends[1]);
      for (std::size_t i = 0; i < got.size(); ++i) {
        const std::string what = concat(name, ", case ", n, ", value ", i);
        ASSERT_EQ(got[i].defined(), expected[i].defined()) << what;
        if (!got[i].defined()) continue;
        const at::Tensor of = expected[i].index_select(0, i == 0 || i % 2 == 1 ? owned : mine);
        EXPECT_TRUE(same_bits(to_local(got[i]), of)) << what << '\n'
                                                     << to_local(got[i]) << "\nexpected\n"
                                                     << of;
      }
      const c10::InferenceMode inference;
      const at::Tensor in =
          layer(nodes.shard(x.detach().index_select(0, owned)), es.detach(), ends[0], ends[1]);
      EXPECT_TRUE(same_bits(to_local(in), expected[0].index_select(0, owned))) << name << ' ' << n;
      if (::testing::Test::HasFailure()) return;
    }
  });
}

// A row for each edge whose source is another rank's, on the way back.
TEST_P(OrderedSums, SendARowForEachEdgeBetweenRanks) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    const int me = manager.rank();
    // Each rank owns two rows; to its first one lead three edges from the last row of the others.
    const OwnedRows nodes(mesh, Ids{2 * me, 2 * me + 1});
    Ids source, target, order;
    for (int r = 0; r < ranks; ++r)
      for (int k = 0; k < 3 && r != me; ++k) {
        source.push_back(2 * r + 1);
        target.push_back(2 * me);
        order.push_back((r * ranks + me) * 3 + k);
      }
    const at::Tensor ends = nodes.edges(source, target, false, order);
    const at::Tensor rows = nodes.shard(at::ones({2, 5}));
    const auto step = [&] {
      const at::Tensor x = rows.detach().requires_grad_();
      torch::autograd::grad(
          {at::zeros_like(x).index_add(0, ends[1], x.index_select(0, ends[0])).sum()}, {x});
    };
    step();  // planned
    CommTraceScope trace(mesh.all());
    step();
    std::int64_t bytes = 0;
    for (const CommSummary& call : trace->summary()) bytes += call.bytes;
    // One ghost of each other rank, and back three rows.
    EXPECT_EQ(bytes, 2 * (1 + 3) * (ranks - 1) * 5 * 4) << trace->table();
  });
}

// Segment sums whose rows are with their segments are in the order of the rows as they are.
TEST_P(OrderedSums, OfSegmentsAreInTheOrderOfRows) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < 12; ++n) {
      Draw draw(n * 41 + static_cast<std::uint64_t>(ranks));
      const int count = draw.between(1, 9);
      const Sizes of_segments = draw.sizes(count, ranks);
      Sizes length, of_rows(static_cast<std::size_t>(ranks), 0);
      for (int i = 0; i < count; ++i) {
        length.push_back(draw.below(9));
        of_rows[static_cast<std::size_t>(Partition(of_segments).owner(i))] += length.back();
      }
      seed(n);
      const at::Tensor x = randn({Partition(of_rows).extent(), 3}, at::kFloat);
      const at::Tensor got = at::segment_reduce(
          distribute_tensor(x, mesh, {Shard(0)}, {{0, of_rows}}), "sum",
          distribute_tensor(index_of(length), mesh, {Shard(0)}, {{0, of_segments}}));
      EXPECT_TRUE(same_bits(full_tensor(got), at::segment_reduce(x, "sum", index_of(length)))) << n;
    }
  });
}

// Graphs that all ranks have read: parts by any owners, in the order of their edges.
TEST_P(OrderedSums, OfGraphsThatRanksHaveRead) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < 10; ++n) {
      Draw draw(n * 61 + static_cast<std::uint64_t>(ranks));
      const std::int64_t nodes = 1 + draw.below(12);
      const Graph graph(draw, nodes);
      Ids owner;
      for (std::int64_t i = 0; i < nodes; ++i) owner.push_back(draw.below(ranks));
      seed(n);
      const at::Tensor x = randn({nodes, 2}, at::kFloat);
      const at::Tensor e = randn({static_cast<std::int64_t>(graph.source.size()), 2}, at::kFloat);
      const at::Tensor index = at::stack({index_of(graph.source), index_of(graph.target)});
      const auto g = shard_graph(mesh, {0}, index_of(owner), index, true);
      const auto& layer = ordered_layers()[n % 3].second;
      const at::Tensor y = layer(x, e, index[0], index[1]);
      const at::Tensor ys = layer(g.of_nodes(x), g.of_edges(e), g.edges[0], g.edges[1]);
      EXPECT_TRUE(same_bits(to_local(ys), y.index_select(0, index_of(g.nodes.ids())))) << n;
    }
    const auto refused = [&](const std::string& part, const at::Tensor& owner,
                             const at::Tensor& index) {
      const auto text = thrown<InvalidArgument>([&] { shard_graph(mesh, {0}, owner, index); });
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    const bool last = manager.rank() == ranks - 1;
    const at::Tensor none = at::zeros({2, 0}, at::kLong), two = index_of({0, 0});
    refused("rank 9 (place 1)", last ? index_of({0, 9}) : two, none);
    refused("node 2 (place 0)", two, last ? index_of({2, 0}).view({2, 1}) : none);
    refused("2 x edges", two, last ? at::zeros({3, 0}, at::kLong) : none);
    if (ranks > 1) refused("a graph of hash", last ? index_of({0, 1}) : two, none);
    const auto g = shard_graph(mesh, {0}, two, none);
    EXPECT_NE(
        thrown<InvalidArgument>([&] { g.of_nodes(at::ones({last ? 3 : 2})); }).find("2 nodes"),
        std::string::npos);
  });
}

TEST_P(OrderedSums, RefuseWhatIsNoOrder) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    const int me = manager.rank();
    const bool last = me == ranks - 1;
    const OwnedRows nodes(mesh, Ids{me});
    const Ids to{me, me};
    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      const auto text = thrown<InvalidArgument>(call);
      EXPECT_NE(text.find(part), std::string::npos) << text;
      manager.world().barrier();
    };
    refused("an order of 1",
            [&] { nodes.edges(to, to, false, last ? Ids{7} : Ids{2 * me, 2 * me + 1}); });
    refused("the order of edges",
            [&] { nodes.edges(to, to, false, Ids{2 * me, last ? 2 * me : 2 * me + 1}); });
    refused("the order of edges",
            [&] { nodes.edges(to, to, false, Ids{2 * me, last ? -1 : 2 * me + 1}); });
    if (ranks > 1)
      refused("with an order", [&] {
        last ? nodes.edges(to, to) : nodes.edges(to, to, false, Ids{2 * me, 2 * me + 1});
      });
    const at::Tensor ends = nodes.edges(to, to, false, Ids{2 * me, 2 * me + 1});
    const at::Tensor x = nodes.shard(at::ones({1, 2}));
    refused("by edges that have an order", [&] { x.index_select(0, ends.narrow(1, 0, 1)[0]); });
    if (ranks > 1) {
      const at::Tensor own = to_local(ends);
      const at::Tensor mixed = from_local(last ? own.clone() : own, mesh, {Shard(1)});
      refused("an order on some ranks alone", [&] { x.index_select(0, mixed[0]); });
    }
    const at::Tensor whole = at::zeros({ranks, 2});
    refused("OwnedRowsScope",
            [&] { whole.clone().index_add_(0, ends[1], x.index_select(0, ends[0])); });
    const OwnedRowsScope scope(nodes);
    const at::Tensor y = whole.clone().index_add_(0, ends[1], x.index_select(0, ends[0]));
    EXPECT_TRUE(to_local(y).equal(at::full({1, 2}, 2.0)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OrderedSums, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera::test::ordered_sums_test
