// Graphs of different sizes as samples: batches of one graph, over data ranks and domain ranks.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "../support/ranks.h"
#include "tessera/data/shard_batch.h"
#include "tessera/ops/ghosts/sharded_graph.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::graph_batch_test {
namespace {

constexpr std::uint64_t kGraphs = 11;

// Graph i: some without edges, one without nodes.
Fields graph(std::uint64_t i) {
  torch::Generator draw = at::detail::createCPUGenerator(i);
  const auto nodes = static_cast<std::int64_t>(i * 5 % 8);
  const std::int64_t edges = nodes == 0 || i % 4 == 1 ? 0 : static_cast<std::int64_t>(3 + i % 5);
  const auto real = at::TensorOptions(at::kDouble);
  return {{"nodes/x", at::rand({nodes, 2}, draw, real)},
          {"nodes/owner", at::randint(0, 2, {nodes}, draw, at::kLong)},
          {"edges/index",
           at::randint(0, std::max<std::int64_t>(nodes, 1), {2, edges}, draw, at::kLong)},
          {"edges/length", at::rand({edges}, draw, real)},
          {"energy", at::rand({1}, draw, real)}};
}

std::shared_ptr<const Dataset> graphs(std::function<Fields(std::uint64_t)> get = graph) {
  return std::make_shared<FunctionDataset>(kGraphs, graph(0).names(), std::move(get));
}

std::shared_ptr<const Order> order_of_graphs(std::uint64_t batch) {
  return std::make_shared<FixedOrder>(
      SampleOrderOptions{.samples = kGraphs, .seed = 4, .last = LastBatch::pad},
      BatchSchedule(batch));
}

Loader loader_of(const BatchMapping& mapping, int process, std::uint64_t batch, int workers = 0) {
  return Loader({graphs()}, order_of_graphs(batch), mapping, process,
                {.workers = workers, .graphs = true});
}

BatchMapping over(int processes) {
  std::vector<int> ranks;
  for (int p = 0; p < processes; ++p) ranks.push_back(p);
  return BatchMapping({processes}, ranks, {0});
}

// The graph of row `row` of a batch, as numbers of its own.
void expect_graph(const LoadedBatch& batch, std::int64_t row, const Fields& expected) {
  const at::Tensor here = batch.field("nodes/graph").eq(row).nonzero().flatten();
  const std::int64_t first = here.numel() > 0 ? here[0].item<std::int64_t>() : 0;
  const at::Tensor index = batch.field("edges/index");
  const at::Tensor edges =
      ((index[1] >= first) & (index[1] < first + here.numel())).nonzero().flatten();
  EXPECT_TRUE(batch.field("nodes/x").index_select(0, here).equal(expected.at("nodes/x")));
  EXPECT_TRUE((index.index_select(1, edges) - first).equal(expected.at("edges/index")));
  EXPECT_TRUE(
      batch.field("edges/length").index_select(0, edges).equal(expected.at("edges/length")));
  EXPECT_TRUE(batch.field("energy")[row].equal(expected.at("energy")));
}

TEST(GraphBatches, AreTheSamplesOfAnyNumberOfProcessesAndGoOnOnAnother) {
  for (const std::uint64_t size : {1u, 3u, 5u, 11u}) {
    std::string state;
    for (int step = 0; step < 6; ++step) {
      const int processes = 1 + step % 4;
      std::string after;
      for (int p = 0; p < processes; ++p) {
        Loader loader = loader_of(over(processes), p, size, step % 3);
        if (!state.empty()) loader.restore(state);
        const LoadedBatch batch = loader.next();
        EXPECT_EQ(batch.step, static_cast<std::uint64_t>(step));
        ASSERT_EQ(batch.names.back(), "nodes/graph");
        EXPECT_EQ(batch.field("edges/index").size(0), 2);
        EXPECT_EQ(batch.field("edges/index").size(1), batch.field("edges/length").size(0));
        EXPECT_EQ(batch.field("energy").sizes(), (std::vector<std::int64_t>{batch.rows, 1}));
        ASSERT_EQ(batch.samples.size(), static_cast<std::size_t>(batch.rows));
        std::int64_t nodes = 0;
        for (std::int64_t row = 0; row < batch.rows; ++row) {
          const Fields expected = graph(batch.samples[static_cast<std::size_t>(row)].index);
          expect_graph(batch, row, expected);
          nodes += expected.at("nodes/x").size(0);
        }
        EXPECT_EQ(batch.field("nodes/x").size(0), nodes);
        after = loader.state();
      }
      state = after;
    }
  }
}

// The number of nodes is that of the last field as well, and of graphs without other fields.
TEST(GraphBatches, MayHaveTheirNodesLast) {
  const auto get = [](std::uint64_t i) {
    const Fields whole = graph(i);
    Fields made;
    for (const char* name : {"edges/index", "nodes/x"}) made.add(name, whole.at(name));
    return made;
  };
  const auto data = std::make_shared<FunctionDataset>(kGraphs, get(0).names(), get);
  Loader loader({data}, order_of_graphs(kGraphs), over(1), 0, {.graphs = true});
  const LoadedBatch batch = loader.next();
  std::vector<at::Tensor> expected;
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    const auto of = batch.samples[static_cast<std::size_t>(row)].index;
    expected.push_back(at::full({get(of).at("nodes/x").size(0)}, row, at::kLong));
  }
  EXPECT_TRUE(batch.field("nodes/graph").equal(at::cat(expected)));
}

TEST(GraphBatches, NameTheSampleThatIsNoGraph) {
  const auto refused = [](const std::string& part, const std::string& field, const at::Tensor& by) {
    const auto bad = [&](std::uint64_t i) {
      const Fields good = graph(i);
      Fields made;
      for (const std::string& name : good.names())
        made.add(name, i == 6 && name == field ? by : good.at(name));
      return made;
    };
    Loader loader({graphs(bad)}, order_of_graphs(kGraphs), over(1), 0, {.graphs = true});
    try {
      loader.next();
      ADD_FAILURE() << "nothing was thrown for " << field;
    } catch (const SampleError& e) {
      EXPECT_EQ(e.index(), 6u);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  // Graph 6 has 6 nodes and 4 edges.
  refused("an edge names a node that there is not", "edges/index", at::full({2, 4}, 6, at::kLong));
  refused("give int64, 2 x edges", "edges/index", at::zeros({4, 2}, at::kLong));
  refused("give int64, 2 x edges", "edges/index", at::zeros({2, 4}, at::kInt));
  refused("a row for each node", "nodes/owner", at::zeros({5}, at::kLong));
  refused("a row for each edge", "edges/length", at::zeros({}, at::kDouble));
  refused("that of the first sample", "nodes/x", at::zeros({6, 3}, at::kDouble));
  refused("that of the first sample", "energy", at::zeros({1}, at::kFloat));

  const auto numbers = std::make_shared<TensorDataset>(Fields{{"x", at::ones({11, 2})}});
  EXPECT_THROW(Loader({numbers}, order_of_graphs(2), over(1), 0, {.graphs = true}),
               InvalidArgument);
  const auto collate = [](const std::vector<Sample>& samples) { return samples.front(); };
  EXPECT_THROW(
      Loader({graphs()}, order_of_graphs(2), over(1), 0, {.collate = collate, .graphs = true}),
      InvalidArgument);
  const auto packed =
      std::make_shared<PackedOrder>(std::vector<std::uint64_t>(kGraphs, 1), 2, 4, 1);
  EXPECT_THROW(Loader({graphs()}, packed, over(1), 0, {.graphs = true}).next(), InvalidArgument);
}

// Energies of the graphs of a batch, plain torch.
at::Tensor energies(const at::Tensor& x, const at::Tensor& length, const at::Tensor& edges,
                    const at::Tensor& of, std::int64_t graphs, const at::Tensor& weight) {
  const at::Tensor message = (x.index_select(0, edges[0]) * length.unsqueeze(1)).matmul(weight);
  const at::Tensor h = x + at::zeros_like(x).index_add(0, edges[1], message);
  return at::zeros({graphs}, at::kDouble).index_add_(0, of, h.square().sum(1));
}

// Batches of graphs over data ranks, and each over the ranks of a domain at the same time.
TEST(GraphBatches, OverDataRanksAndRanksOfADomainTrainAsOneProcess) {
  const at::Tensor start = at::arange(1, 5, at::TensorOptions(at::kDouble)).view({2, 2}) / 4;
  test::on_ranks(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    // The graphs of data ranks are others: a mesh for each.
    const auto domain = manager.mesh(mesh.mesh().submesh({"domain"}, manager.rank()));
    Loader loader = loader_of(batch_mapping(mesh.mesh(), {"data"}), manager.rank(), 3, 1),
           alone = loader_of(over(1), 0, 3);
    loader.require_agreement(manager.world());
    for (int step = 0; step < 5; ++step) {
      const LoadedBatch all = alone.next();
      const at::Tensor weight = start.clone().requires_grad_();
      const at::Tensor counts =
          all.mask.defined() ? all.mask.to(at::kDouble) : at::ones({3}, at::kDouble);
      const at::Tensor expected =
          energies(all.field("nodes/x"), all.field("edges/length"), all.field("edges/index"),
                   all.field("nodes/graph"), all.rows, weight);
      ((expected - all.field("energy").flatten()).square() * counts).sum().backward();

      const LoadedBatch batch = loader.next();
      EXPECT_THROW(shard_batch(batch, mesh, {"data"}), InvalidArgument);
      const auto g =
          shard_graph(domain, {0}, batch.field("nodes/owner"), batch.field("edges/index"));
      const at::Tensor own = distribute_tensor(start, domain, {Replicate()}).requires_grad_();
      const at::Tensor got =
          energies(g.of_nodes(batch.field("nodes/x")), g.of_edges(batch.field("edges/length")),
                   g.edges, g.of_nodes(batch.field("nodes/graph")), batch.rows, own);
      const at::Tensor real =
          batch.mask.defined() ? batch.mask.to(at::kDouble) : at::ones({batch.rows}, at::kDouble);
      ((got - batch.field("energy").flatten()).square() * real).sum().backward();
      at::Tensor gradient = own.grad().defined() ? full_tensor(own.grad()) : at::zeros_like(start);
      mesh.group("data").all_reduce(gradient, ReduceOp::sum);
      EXPECT_TRUE(at::allclose(gradient, weight.grad(), 1e-10, 1e-12)) << step;
    }
  });
}

}  // namespace
}  // namespace tessera::graph_batch_test
