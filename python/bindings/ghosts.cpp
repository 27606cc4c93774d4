// Ghosts of arrays that are divided by a table of owners.

#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <tuple>

#include "callbacks.h"
#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/ghost_layers.h"
#include "tessera/ops/ghosts/ghost_plan.h"
#include "tessera/ops/ghosts/ghost_transport.h"
#include "tessera/ops/ghosts/neighbor_edges.h"
#include "tessera/ops/ghosts/owned_rows.h"
#include "tessera/ops/ghosts/rebalance.h"
#include "tessera/ops/ghosts/sharded_graph.h"
#include "tessera/partition/partitioners.h"

namespace tessera::python {

namespace {

/// Whole numbers on the host, of any dtype and strides, as ids.
class GivenIds {
 public:
  GivenIds(const at::Tensor& ids, const char* what) {
    if (ids.dim() != 1 || !at::isIntegralType(ids.scalar_type(), false))
      throw InvalidArgument(what, " of dtype ", ids.scalar_type(), " and shape ", ids.sizes(),
                            "; give a list of whole numbers");
    ids_ = ids.to(at::kCPU, at::kLong).contiguous();
  }
  operator std::span<const std::int64_t>() const {
    return {ids_.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(ids_.numel())};
  }

 private:
  at::Tensor ids_;
};

/// Ids of this rank, where what is none on one rank is told to all; `same`: what all must ask for.
std::vector<GivenIds> given_ids(const Group& group, const char* call,
                                const std::vector<std::pair<at::Tensor, const char*>>& all,
                                const std::string& same = "") {
  std::vector<GivenIds> ids;
  agree::all_same(group, call, [&] {
    for (const auto& [given, what] : all) ids.emplace_back(given, what);
    return same;
  });
  return ids;
}

at::Tensor as_tensor(const Numbers& numbers) { return at::tensor(numbers, at::kLong); }

/// Two functions of Python's, called with the rows alone. Who holds it keeps them.
struct PyGhostTransport : torch::CustomClassHolder {
  PyGhostTransport(std::int64_t forward, std::int64_t reverse, const Tensors& of) {
    std::vector<at::ScalarType> dtypes;
    for (const at::Tensor& t : of) dtypes.push_back(t.scalar_type());
    const auto calling = [this](std::int64_t address) {
      const auto function =
          reinterpret_cast<PythonFunction>(address);  // NOLINT(performance-no-int-to-ptr)
      return [function, life = life](const at::Tensor& rows) { ask(function, {}, {rows}); };
    };
    transport = {calling(forward), calling(reverse), std::move(dtypes)};
  }
  /// True while a plan may call them, or a graph that has been recorded with one.
  bool used() const { return life.use_count() > 3; }
  std::shared_ptr<int> life = std::make_shared<int>();
  GhostTransport transport;
};
using GhostTransportPtr = c10::intrusive_ptr<PyGhostTransport>;

struct PyGhostPlan : torch::CustomClassHolder {
  PyGhostPlan(const MeshPtr& over, const Names& axes, const at::Tensor& owned,
              const at::Tensor& needed, const std::optional<GhostTransportPtr>& transport) {
    const DeviceMesh& mesh = over->mesh;
    const std::vector<int> indices = mesh.mesh().indices(axes);
    const auto ids =
        given_ids(mesh.group(indices), "GhostPlan", {{owned, "owned_ids"}, {needed, "needed_ids"}},
                  transport ? "with a transport" : "without a transport");
    plan = transport ? plan_over((*transport)->transport, mesh, indices, ids[0], ids[1])
                     : GhostPlan(mesh, indices, ids[0], ids[1]);
  }
  explicit PyGhostPlan(GhostPlan made) : plan(std::move(made)) {}
  GhostPlan plan;
};
using GhostPlanPtr = c10::intrusive_ptr<PyGhostPlan>;

struct PyGhostLayers : torch::CustomClassHolder {
  PyGhostLayers(const MeshPtr& over, const Names& axes, const at::Tensor& owned,
                const at::Tensor& source, const at::Tensor& target, std::int64_t depth) {
    const DeviceMesh& mesh = over->mesh;
    const std::vector<int> indices = mesh.mesh().indices(axes);
    const auto ids = given_ids(mesh.group(indices), "GhostLayers",
                               {{owned, "owned_ids"}, {source, "sources"}, {target, "targets"}});
    layers = ghost_layers(mesh, indices, ids[0], ids[1], ids[2],
                          static_cast<int>(std::min<std::int64_t>(depth, 1 << 30)));
  }
  GhostLayers layers;
};
using GhostLayersPtr = c10::intrusive_ptr<PyGhostLayers>;

// The table, and the cheapest depth.
std::tuple<std::string, std::int64_t> costs_of(const GhostLayersPtr& self, std::int64_t layers,
                                               double message, double row, double edge) {
  const LayerCosts costs =
      layer_costs(self->layers, static_cast<int>(layers), {message, row, edge});
  return {costs.summary(), costs.cheapest()};
}

struct PyOwnedRows : torch::CustomClassHolder {
  PyOwnedRows(const MeshPtr& over, const Names& axes, const at::Tensor& owned)
      : rows(made(over->mesh, over->mesh.mesh().indices(axes), owned)) {}
  static OwnedRows made(const DeviceMesh& mesh, const std::vector<int>& axes,
                        const at::Tensor& owned) {
    return {mesh, axes, given_ids(mesh.group(axes), "OwnedRows", {{owned, "owned_ids"}})[0]};
  }
  explicit PyOwnedRows(OwnedRows made) : rows(std::move(made)) {}
  OwnedRows rows;
  // Innermost last.
  std::vector<std::unique_ptr<OwnedRowsScope>> scopes;
};
using OwnedRowsPtr = c10::intrusive_ptr<PyOwnedRows>;

at::Tensor numbers_of(const OwnedRowsPtr& self, const at::Tensor& ids) {
  return as_tensor(
      self->rows.numbers(given_ids(self->rows.group(), "OwnedRows.numbers", {{ids, "ids"}})[0]));
}

at::Tensor edges_of(const OwnedRowsPtr& self, const at::Tensor& source, const at::Tensor& target,
                    bool anywhere, const std::optional<at::Tensor>& order) {
  std::vector<std::pair<at::Tensor, const char*>> given{{source, "sources"}, {target, "targets"}};
  if (order) given.emplace_back(*order, "order");
  const auto ids = given_ids(
      self->rows.group(), "OwnedRows.edges", given,
      concat(anywhere ? "anywhere" : "at their targets' owners", order ? ", in an order" : ""));
  std::optional<std::span<const std::int64_t>> numbers;
  if (order) numbers = ids[2];
  return self->rows.edges(ids[0], ids[1], anywhere, numbers);
}

using PyShardedGraph = Held<ShardedGraph>;
using ShardedGraphPtr = c10::intrusive_ptr<PyShardedGraph>;

ShardedGraphPtr graph_of(const MeshPtr& over, const Names& axes, const at::Tensor& owner,
                         const at::Tensor& index, bool ordered) {
  const DeviceMesh& mesh = over->mesh;
  return c10::make_intrusive<PyShardedGraph>(
      shard_graph(mesh, mesh.mesh().indices(axes), owner, index, ordered));
}

using PyRebalanced = Held<Rebalanced>;
using RebalancedPtr = c10::intrusive_ptr<PyRebalanced>;

RebalancedPtr rebalanced_rows(const OwnedRowsPtr& rows, const at::Tensor& places,
                              const at::Tensor& costs, const Tensors& tensors, bool along_curve,
                              double tolerance, const std::optional<at::Tensor>& edges) {
  using By = RebalanceOptions::By;
  return c10::make_intrusive<PyRebalanced>(rebalance(
      rows->rows, places, costs, tensors,
      {along_curve ? By::curve : By::bisection, tolerance, edges.value_or(at::Tensor())}));
}

std::tuple<at::Tensor, at::Tensor> pair_of(NeighborEdges made) {
  return {std::move(made.edges), std::move(made.shift)};
}

std::tuple<at::Tensor, at::Tensor> near_of(const OwnedRowsPtr& points, const at::Tensor& places,
                                           double radius, const std::vector<double>& box,
                                           bool loops) {
  return pair_of(edges_within(points->rows, places, radius, box, loops));
}

std::tuple<at::Tensor, at::Tensor> nearest_of(const OwnedRowsPtr& points, const at::Tensor& places,
                                              const OwnedRowsPtr& queries, const at::Tensor& there,
                                              std::int64_t count, const std::vector<double>& box) {
  return pair_of(nearest_edges(points->rows, places, queries->rows, there,
                               static_cast<int>(std::min<std::int64_t>(count, 1 << 30)), box));
}

// On the host, without a collective.
at::Tensor along_curve(const at::Tensor& places, std::int64_t parts, const at::Tensor& weights) {
  if (places.dim() != 2)
    throw InvalidArgument("places of shape ", places.sizes(), "; give points x dims");
  const at::Tensor all = places.to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor costs = weights.to(at::kCPU, at::kDouble).contiguous();
  const auto span = [](const at::Tensor& t) {
    return std::span(t.const_data_ptr<double>(), static_cast<std::size_t>(t.numel()));
  };
  const auto owner = partition_along_curve(span(all), static_cast<int>(all.size(1)),
                                           static_cast<int>(parts), span(costs));
  return as_tensor({owner.begin(), owner.end()});
}

// The same.
at::Tensor by_metis(std::int64_t nodes, const at::Tensor& edges, std::int64_t parts,
                    const at::Tensor& weights) {
  if (edges.dim() != 2 || edges.size(0) != 2)
    throw InvalidArgument("edges of shape ", edges.sizes(), "; give 2 x edges");
  const at::Tensor all = edges.to(at::kCPU, at::kLong).contiguous();
  const at::Tensor costs = weights.to(at::kCPU, at::kDouble).contiguous();
  const auto count = static_cast<std::size_t>(all.size(1));
  const auto* from = all.const_data_ptr<std::int64_t>();
  const auto owner = partition_by_metis(
      nodes, std::span(from, count), std::span(from + count, count), static_cast<int>(parts),
      std::span(costs.const_data_ptr<double>(), static_cast<std::size_t>(costs.numel())));
  return as_tensor({owner.begin(), owner.end()});
}

std::vector<std::tuple<std::int64_t, std::int64_t>> peers_of(
    const std::vector<GhostRows::Peer>& peers) {
  std::vector<std::tuple<std::int64_t, std::int64_t>> all;
  for (const GhostRows::Peer& peer : peers) all.emplace_back(peer.rank, peer.rows);
  return all;
}

}  // namespace

void register_ghosts(Library& library) {
  library.class_<PyGhostTransport>("GhostTransport")
      .def(torch::init<std::int64_t, std::int64_t, const Tensors&>())
      .def("used", [](const GhostTransportPtr& self) { return self->used(); });
  library.class_<PyGhostPlan>("GhostPlan")
      .def(torch::init<const MeshPtr&, const Names&, const at::Tensor&, const at::Tensor&,
                       const std::optional<GhostTransportPtr>&>())
      .def("owned", [](const GhostPlanPtr& self) { return self->plan.rows().owned; })
      .def("ghosts", [](const GhostPlanPtr& self) { return self->plan.rows().ghosts; })
      .def("sends", [](const GhostPlanPtr& self) { return peers_of(self->plan.rows().sends); })
      .def("receives",
           [](const GhostPlanPtr& self) { return peers_of(self->plan.rows().receives); })
      .def(
          "group",
          [](const GhostPlanPtr& self) { return c10::make_intrusive<PyGroup>(self->plan.group()); })
      .def("summary", [](const GhostPlanPtr& self) { return self->plan.summary(); });
  library.class_<PyGhostLayers>("GhostLayers")
      .def(torch::init<const MeshPtr&, const Names&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&, std::int64_t>())
      .def("nodes",
           [](const GhostLayersPtr& self) {
             return c10::make_intrusive<PyGhostPlan>(self->layers.nodes);
           })
      .def("edges",
           [](const GhostLayersPtr& self) {
             return c10::make_intrusive<PyGhostPlan>(self->layers.edges);
           })
      .def("ghosts", [](const GhostLayersPtr& self) { return as_tensor(self->layers.ghosts); })
      .def("source", [](const GhostLayersPtr& self) { return as_tensor(self->layers.source); })
      .def("target", [](const GhostLayersPtr& self) { return as_tensor(self->layers.target); })
      .def("rows", [](const GhostLayersPtr& self) { return self->layers.rows_of; })
      .def("edge_counts", [](const GhostLayersPtr& self) { return self->layers.edges_of; })
      .def("left_after",
           [](const GhostLayersPtr& self, std::int64_t k, std::int64_t layers) -> std::int64_t {
             return self->layers.left_after(static_cast<int>(k), static_cast<int>(layers));
           })
      .def("costs", costs_of);
  library.class_<PyOwnedRows>("OwnedRows")
      .def(torch::init<const MeshPtr&, const Names&, const at::Tensor&>())
      .def("size", [](const OwnedRowsPtr& self) { return self->rows.size(); })
      .def("begin", [](const OwnedRowsPtr& self) { return self->rows.begin(); })
      .def("sizes", [](const OwnedRowsPtr& self) { return self->rows.sizes(); })
      .def("shard",
           [](const OwnedRowsPtr& self, const at::Tensor& rows) { return self->rows.shard(rows); })
      .def("numbers", numbers_of)
      .def("edges", edges_of)
      .def("enter",
           [](const OwnedRowsPtr& self) {
             self->scopes.push_back(std::make_unique<OwnedRowsScope>(self->rows));
           })
      .def("leave", [](const OwnedRowsPtr& self) { self->scopes.pop_back(); })
      .def("ids", [](const OwnedRowsPtr& self) { return as_tensor(self->rows.ids()); })
      .def("summary", [](const OwnedRowsPtr& self) { return self->rows.summary(); });
  library.class_<PyShardedGraph>("ShardedGraph")
      .def("nodes",
           [](const ShardedGraphPtr& self) {
             return c10::make_intrusive<PyOwnedRows>(self->value.nodes);
           })
      .def("edges", [](const ShardedGraphPtr& self) { return self->value.edges; })
      .def("of_nodes", [](const ShardedGraphPtr& self,
                          const at::Tensor& whole) { return self->value.of_nodes(whole); })
      .def("of_edges", [](const ShardedGraphPtr& self, const at::Tensor& whole) {
        return self->value.of_edges(whole);
      });
  library.def("shard_graph", graph_of);
  library.class_<PyRebalanced>("Rebalanced")
      .def("rows",
           [](const RebalancedPtr& self) {
             return c10::make_intrusive<PyOwnedRows>(self->value.rows);
           })
      .def("moved", [](const RebalancedPtr& self) { return self->value.moved; })
      .def("move",
           [](const RebalancedPtr& self, const at::Tensor& t) { return self->value.move(t); })
      .def("imbalance",
           [](const RebalancedPtr& self) {
             return std::vector<double>{self->value.imbalance_before, self->value.imbalance_after};
           })
      .def("rows_moved", [](const RebalancedPtr& self) { return self->value.rows_moved; })
      .def("summary", [](const RebalancedPtr& self) { return self->value.summary(); });
  library.def("rebalance", rebalanced_rows);
  library.def("ghost_exchange", [](const GhostPlanPtr& plan, const at::Tensor& owned) {
    return ghost_exchange(plan->plan, owned);
  });
  library.def("start_ghost_exchange", [](const GhostPlanPtr& plan, const at::Tensor& owned) {
    return c10::make_intrusive<PyRequest>(start_ghost_exchange(plan->plan, owned));
  });
  library.def("ghost_reduce",
              [](const GhostPlanPtr& plan, const at::Tensor& rows, const std::string& op) {
                return ghost_reduce(plan->plan, rows, reduce_op(op));
              });
  library.def("start_ghost_reduce", [](const GhostPlanPtr& plan, const at::Tensor& rows,
                                       const std::string& op) {
    return c10::make_intrusive<PyRequest>(start_ghost_reduce(plan->plan, rows, reduce_op(op)));
  });
  library.def("edges_within", near_of);
  library.def("nearest_edges", nearest_of);
  library.def("partition_along_curve", along_curve);
  library.def("partition_by_metis", by_metis);
  library.def("ghosts_of", [](const at::Tensor& owned, const at::Tensor& ids) {
    return as_tensor(ghosts_of(GivenIds(owned, "owned_ids"), GivenIds(ids, "ids")));
  });
  library.def("local_rows",
              [](const at::Tensor& owned, const at::Tensor& ghosts, const at::Tensor& ids) {
                return as_tensor(local_rows(GivenIds(owned, "owned_ids"),
                                            GivenIds(ghosts, "needed_ids"), GivenIds(ids, "ids")));
              });
}

}  // namespace tessera::python
