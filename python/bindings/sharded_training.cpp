// Fully sharded and tensor-parallel training, and optimizers with sharded states.

#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "convert.h"
#include "library.h"
#include "mesh.h"
#include "modules.h"
#include "tessera/base/text.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/sharded_optimizer.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera::python {

namespace {

using Dtype = std::optional<at::ScalarType>;

/// What does not fit stays out of range.
int to_int(std::int64_t number) {
  return static_cast<int>(std::clamp<std::int64_t>(number, std::numeric_limits<int>::min(),
                                                   std::numeric_limits<int>::max()));
}

struct PyFullyShardOptions : torch::CustomClassHolder {
  PyFullyShardOptions(const Names& units, const Names& axes, const Names& ignore, const Names& stay,
                      bool reshard_after_forward, const Names& reshard_axes, std::int64_t prefetch,
                      std::int64_t coalesce_bytes)
      : options{.units = units,
                .axes = axes,
                .ignore = ignore,
                .stay = stay,
                .reshard_after_forward = reshard_after_forward,
                .reshard_axes = reshard_axes,
                .prefetch = to_int(prefetch),
                .coalesce_bytes = coalesce_bytes} {}
  void reduce(std::int64_t first_bucket, std::int64_t bucket, bool overlap, bool learn_order) {
    options.reducer = {.first_bucket_bytes = first_bucket,
                       .bucket_bytes = bucket,
                       .overlap = overlap,
                       .learn_order = learn_order};
  }
  /// Of the units that a pattern names; without one of all others.
  void precision(const std::optional<std::string>& units, Dtype parameters, Dtype reduce,
                 Dtype output) {
    const UnitPrecision given{parameters, reduce, output};
    if (units) {
      options.unit_precision.emplace_back(*units, given);
    } else {
      options.precision = given;
    }
  }
  /// "": the manager's device.
  void offload(const std::string& device, bool pin_memory) {
    options.offload = {.to_host = true, .pin_memory = pin_memory};
    if (!device.empty()) options.offload.device = c10::Device(device);
  }
  FullyShardOptions options;
};
using FullyShardOptionsPtr = c10::intrusive_ptr<PyFullyShardOptions>;

/// A layer of a plan as Python gives it: pattern, kind, units and dim.
using Layer = std::tuple<std::string, std::string, std::tuple<std::int64_t, std::int64_t>>;

LayerSharding layer_sharding(const Layer& layer) {
  const auto& [pattern, kind, numbers] = layer;
  const auto& [units, dim] = numbers;
  if (kind == "column") return column(units);
  if (kind == "row") return row(units);
  if (kind == "vocabulary") return vocabulary();
  if (kind == "replicated") return replicated();
  if (kind == "sharded") return sharded(to_int(dim), units);
  throw InvalidArgument(
      "tensor_parallel: '", pattern, "' is given '", kind,
      "', which is no kind of layer: column, row, vocabulary, replicated or sharded");
}

using PyTensorParallelPlan = Held<TensorParallelPlan>;
using PlanPtr = c10::intrusive_ptr<PyTensorParallelPlan>;

/// Name, how, shape, placements, sizes, axis and dim of the sequence, elements on each rank.
using Planned = std::tuple<std::string, std::string, Numbers, Names, SizesDict, std::int64_t,
                           std::int64_t, Numbers>;

std::vector<Planned> planned(const TensorParallelPlan& plan) {
  std::vector<Planned> all;
  for (const auto& p : plan.parameters())
    all.emplace_back(p.name, p.how, p.shape, texts(p.placement.placements),
                     sizes(p.placement.sizes), p.placement.sequence.axis, p.placement.sequence.dim,
                     p.elements);
  return all;
}

/// `distributes`: makes the plan with all ranks and distributes the module by it; else it is looked
/// at alone.
PlanPtr tensor_parallel_plan(const ModuleTreePtr& tree, const MeshPtr& mesh,
                             const std::vector<Layer>& layers, const std::string& axis,
                             const std::string& sharded_axis,
                             std::optional<std::int64_t> sequence_dim, std::int64_t first_bucket,
                             std::int64_t bucket, bool overlap, bool learn_order,
                             bool distributes) {
  LayerShardings shardings;
  for (const Layer& layer : layers)
    shardings.emplace_back(std::get<0>(layer), layer_sharding(layer));
  TensorParallelOptions options{.axis = axis, .sharded_axis = sharded_axis};
  if (sequence_dim) options.sequence_dim = to_int(*sequence_dim);
  options.reducer = {.first_bucket_bytes = first_bucket,
                     .bucket_bytes = bucket,
                     .overlap = overlap,
                     .learn_order = learn_order};
  return c10::make_intrusive<PyTensorParallelPlan>(
      distributes ? tensor_parallel(*tree->module, mesh->mesh, shardings, options)
                  : TensorParallelPlan(*tree->module, mesh->mesh, shardings, options));
}

struct PyOptimizerShards : torch::CustomClassHolder {
  explicit PyOptimizerShards(const MeshPtr& mesh) : shards(mesh->mesh, std::int64_t{25} << 20) {}
  detail::OptimizerShards shards;
};
using ShardsPtr = c10::intrusive_ptr<PyOptimizerShards>;

}  // namespace

void register_modules(Library& library) {
  library.class_<PyModuleTree>("ModuleTree")
      .def(torch::init<const Names&, const Names&, const Names&, const Tensors&, std::int64_t>());
  library.class_<PyFullyShardOptions>("FullyShardOptions")
      .def(torch::init<const Names&, const Names&, const Names&, const Names&, bool, const Names&,
                       std::int64_t, std::int64_t>())
      .def("reduce", &PyFullyShardOptions::reduce)
      .def("precision", &PyFullyShardOptions::precision)
      .def("offload", &PyFullyShardOptions::offload);
  library.class_<PyTensorParallelPlan>("TensorParallelPlan")
      .def("text", [](const PlanPtr& self) { return self->value.to_string(); })
      .def("parameters", [](const PlanPtr& self) { return planned(self->value); });
  library.class_<PyOptimizerShards>("OptimizerShards")
      .def(torch::init<const MeshPtr&>())
      .def("plan", [](const ShardsPtr& self, const Tensors& all) { return self->shards.plan(all); })
      .def("shards",
           [](const ShardsPtr& self, const Tensors& all) { return self->shards.shards(all); })
      .def("shard_state",
           [](const ShardsPtr& self, const at::Tensor& parameter, const at::Tensor& state) {
             return self->shards.shard_state(parameter, state);
           })
      .def("gather", [](const ShardsPtr& self) { self->shards.gather(); });

  library.def("fully_shard", [](const ModuleTreePtr& tree, const MeshPtr& mesh,
                                const FullyShardOptionsPtr& options) {
    fully_shard(*tree->module, mesh->mesh, options->options);
  });
  library.def("gather_parameters",
              [](const ModuleTreePtr& tree) { gather_parameters(*tree->module); });
  library.def("release_parameters",
              [](const ModuleTreePtr& tree) { release_parameters(*tree->module); });
  library.def("tensor_parallel_plan", &tensor_parallel_plan);
}

}  // namespace tessera::python
