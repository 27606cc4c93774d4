// A layer of a message-passing network, forward and backward, written in plain libtorch: on nodes
// and edges that two ranks share, beside the same code on plain tensors of the whole graph on one
// rank; and of this rank's part alone on a mesh of one rank, beside plain tensors. One thread a
// rank.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <optional>

#include "backend.h"
#include "cut_graph.h"
#include "device.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"

namespace {

using tessera::bench::CutGraph, tessera::bench::kNeighbors;
using tessera::bench::Report, tessera::bench::seconds_of;

constexpr int kFeatures = 32;

struct Options {
  std::string backend = "gloo";
  tessera::bench::Output output{.shared = true};
  std::vector<std::int64_t> edges{10'000, 100'000, 1'000'000};
};

struct Layer {
  at::Tensor x, edges, weight;
  // Gradients of the nodes and the weight.
  std::vector<at::Tensor> operator()() const {
    const at::Tensor source = edges.select(0, 0), target = edges.select(0, 1);
    const at::Tensor ends = at::cat({x.index_select(0, source), x.index_select(0, target)}, 1);
    const at::Tensor message = ends.mm(weight).tanh();
    const at::Tensor y = x + at::zeros_like(x).index_add(0, target, message);
    return torch::autograd::grad({y.square().mean()}, {x, weight});
  }
};

Layer sharded(const tessera::DeviceMesh& mesh, const CutGraph& graph, const at::Tensor& x,
              const at::Tensor& weight, const std::vector<std::int64_t>& sizes) {
  const tessera::ShardSizes nodes{{0, sizes}};
  tessera::ShardSizes edges{{1, {}}};
  // Ten edges for each node, by target.
  for (const auto n : sizes) edges[1].push_back(n * kNeighbors);
  return {
      tessera::distribute_tensor(x, mesh, {tessera::Shard(0)}, nodes).detach().requires_grad_(true),
      tessera::distribute_tensor(graph.edges, mesh, {tessera::Shard(1)}, edges),
      tessera::distribute_tensor(weight, mesh, {tessera::Replicate()})
          .detach()
          .requires_grad_(true)};
}

int run(const Options& o) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = o.backend;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw tessera::InvalidArgument(
        tessera::concat("bench_graph runs on 2 ranks, and there are ", manager.world_size()));
  const std::string backend = tessera::bench::backend_of(o.backend, manager);
  std::optional<tessera::bench::AwakeCores> awake;
  if (backend == "gloo") awake.emplace();
  const auto world = manager.world();
  const auto both = manager.mesh({{"domain", 2}});
  const auto alone = manager.mesh(tessera::Mesh({{"alone", 1}}, {manager.rank()}));
  Report report("graph", o.output, manager.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("threads_per_rank", at::get_num_threads());
  bool once_each_way = true;
  for (const std::int64_t count : o.edges) {
    const CutGraph graph(alone, count);
    const std::int64_t nodes = graph.places.size(0);
    const at::Tensor x = at::randn({nodes, kFeatures}),
                     weight = at::randn({2 * kFeatures, kFeatures}) / 8;
    const Layer plain{x.clone().requires_grad_(true), graph.edges,
                      weight.clone().requires_grad_(true)};
    const Layer ours = sharded(both, graph, x, weight, graph.sizes),
                single = sharded(alone, graph, x, weight, {nodes});
    const auto measure = [&](const std::string& what, const Layer& of, double at_most) {
      const std::string name = tessera::concat(what, " E=", count, " ", backend);
      if (!report.wants(name)) return;
      for (int i = 0; i < 2; ++i) {
        of();
        plain();
      }
      report.time(name,
                  tessera::bench::alternate(
                      31, [&] { return seconds_of(world, 1, [&] { of(); }); },
                      // The whole graph on one rank; the other has nothing to do.
                      [&] {
                        return seconds_of(world, 1, [&] {
                          if (manager.rank() == 0 || &of == &single) plain();
                        });
                      }),
                  "plain", at_most);
    };
    // 1.8 times as fast as one rank, where there is much to compute.
    measure("2 ranks", ours, count >= 1'000'000 ? 1 / 1.8 : 1000);
    measure("1 rank", single, 1.05);
    ours();  // plans the index, where no case has
    tessera::CommTraceScope trace(manager);
    ours();
    std::int64_t exchanges = 0;
    for (const auto& call : trace->summary())
      exchanges += call.operation == "exchange" ? call.count : 0;
    once_each_way &= exchanges == 2;
  }
  world.barrier();
  int status = 0;
  if (manager.rank() == 0) {
    status = report.finish();
    std::printf("ghosts were exchanged %s\n",
                once_each_way ? "once in each direction" : "MORE THAN once in each direction");
  }
  return status != 0 || once_each_way ? status : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A layer of a graph network on two ranks beside plain libtorch");
  Options o;
  tessera::bench::add_backend(app, o.backend);
  tessera::bench::add_output(app, o.output);
  app.add_option("--edges", o.edges, "numbers of edges")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return tessera::bench::guarded("bench_graph", [&] { return run(o); });
}
