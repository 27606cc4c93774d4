// Data parallelism and losses over ranks, halos, and attention over packed documents.

#include <torch/library.h>
#include <torch/nn/module.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "convert.h"
#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "modules.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/file.h"
#include "tessera/gradient/step_weight.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/nn/embedding_table.h"
#include "tessera/nn/experts.h"
#include "tessera/ops/attention/packed.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::python {

namespace {

/// The engine of DistributedDataParallel around a module of Python's.
struct PyDataParallel : torch::CustomClassHolder {
  PyDataParallel(const ModuleTreePtr& tree, const GroupPtr& group, const std::string& reduction,
                 double factor, bool broadcast_buffers, const Names& ignore,
                 std::int64_t first_bucket, std::int64_t bucket, bool overlap, bool view)
      : module(tree->module),
        engine(module, group->group,
               {{first_bucket, bucket, overlap, view},
                reduce_op(reduction, factor),
                broadcast_buffers,
                ignore}) {}
  void before_forward(bool training) {
    module->train(training);
    engine.before_forward();
  }
  std::vector<Numbers> buckets() {
    std::vector<Numbers> all;
    for (const auto& bucket : engine.reducer().buckets())
      all.emplace_back(bucket.begin(), bucket.end());
    return all;
  }
  std::shared_ptr<torch::nn::Module> module;
  detail::DataParallelEngine engine;
};
/// Which tokens go to which experts.
struct PyRouting : torch::CustomClassHolder {
  PyRouting(const at::Tensor& probabilities, std::int64_t chosen, double capacity, bool normalized,
            const std::string& axis, const Numbers& sizes)
      : routing(probabilities, {chosen, capacity, normalized, axis, sizes}) {}
  Routing routing;
};
using RoutingPtr = c10::intrusive_ptr<PyRouting>;

using DataParallelPtr = c10::intrusive_ptr<PyDataParallel>;

struct PyStepWeight : torch::CustomClassHolder {
  PyStepWeight(const GroupPtr& group, const std::string& others)
      : weight(group->group, others == "averaged" ? std::optional(StepWeight::Reduced::averaged)
                             : others == "summed" ? std::optional(StepWeight::Reduced::summed)
                                                  : std::nullopt) {}
  StepWeight weight;
};
using StepWeightPtr = c10::intrusive_ptr<PyStepWeight>;

Edge edge_of(const std::string& name) {
  if (name == "zero") return Edge::zero;
  if (name == "circular") return Edge::circular;
  if (name == "reflect") return Edge::reflect;
  if (name == "replicate") return Edge::replicate;
  throw InvalidArgument("'", name, "' is no edge: 'zero', 'circular', 'reflect', 'replicate'");
}

HaloMethod halo_method(const std::string& name) {
  if (name == "automatic") return HaloMethod::automatic;
  if (name == "point_to_point") return HaloMethod::point_to_point;
  if (name == "all_to_all") return HaloMethod::all_to_all;
  throw InvalidArgument("'", name, "' is no method: 'automatic', 'point_to_point', 'all_to_all'");
}

/// (dim, before, after, edge) each.
using WidthTexts = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::string>>;
at::Tensor halo(const at::Tensor& tensor, const WidthTexts& widths, const std::string& method) {
  HaloWidths all;
  for (const auto& [dim, before, after, edge] : widths)
    all[static_cast<int>(dim)] = {before, after, edge_of(edge)};
  return halo_exchange(tensor, all, {halo_method(method)});
}

struct PyRedistribution : torch::CustomClassHolder {
  explicit PyRedistribution(Pending<at::Tensor> p) : pending(std::move(p)) {}
  Started<at::Tensor> pending;
};
using RedistributionPtr = c10::intrusive_ptr<PyRedistribution>;

at::Tensor made(const std::string& how, const Numbers& shape, const MeshPtr& mesh,
                const Names& where, const SizesDict& parts, double value,
                std::optional<at::ScalarType> dtype) {
  const ShardSpec spec(mesh->mesh, shape, placements(where), sizes(parts));
  const auto options = at::TensorOptions().dtype(dtype);
  if (how == "empty") return empty(spec, options);
  if (how == "zeros") return zeros(spec, options);
  if (how == "ones") return ones(spec, options);
  if (how == "full") return full(spec, value, options);
  if (how == "rand") return rand(spec, options);
  if (how == "randn") return randn(spec, options);
  throw InvalidArgument("no tensor is made by '", how, "'");
}

double clip(const Tensors& parameters, const GroupPtr& group, double max_norm, double norm_type,
            const std::optional<GroupPtr>& disjoint, const Tensors& by_hand,
            const std::vector<GroupPtr>& owners, const Tensors& elsewhere) {
  ClipOptions options{.max_norm = max_norm, .norm_type = norm_type, .elsewhere = elsewhere};
  if (disjoint) options.disjoint = (*disjoint)->group;
  std::vector<OwnedShard> shards;
  for (std::size_t i = 0; i < by_hand.size(); ++i)
    shards.push_back({by_hand[i], owners.at(i)->group});
  return clip_gradients(parameters, group->group, options, shards);
}

void register_experts(Library& library) {
  library.class_<PyRouting>("Routing")
      .def(torch::init<const at::Tensor&, std::int64_t, double, bool, const std::string&,
                       const Numbers&>())
      .def("to_experts",
           [](const RoutingPtr& self, const at::Tensor& t) { return self->routing.to_experts(t); })
      .def("to_tokens",
           [](const RoutingPtr& self, const at::Tensor& t) { return self->routing.to_tokens(t); })
      .def("balance", [](const RoutingPtr& self) { return self->routing.balance(); })
      .def("counts", [](const RoutingPtr& self) { return self->routing.counts(); })
      .def("chosen", [](const RoutingPtr& self) { return self->routing.chosen(); })
      .def("left_out", [](const RoutingPtr& self) { return self->routing.left_out(); });
  library.def("grouped_product",
              [](const at::Tensor& rows, const at::Tensor& weights, const RoutingPtr& routing) {
                return grouped_product(rows, weights, routing->routing);
              });
}

void register_tables(Library& library) {
  library.def("bags_from_local", [](const at::Tensor& indices, const at::Tensor& offsets,
                                    const MeshPtr& mesh, const Names& where) {
    const TableBags bags = bags_from_local(indices, offsets, mesh->mesh, placements(where));
    return std::tuple(bags.indices, bags.offsets);
  });
  library.def("row_state", &detail::row_state);
  library.def("element_state", &detail::element_state);
  library.def("rowwise_adagrad", &detail::rowwise_adagrad);
  library.def(
      "sparse_adam", [](const at::Tensor& table, const at::Tensor& gradient,
                        const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, std::int64_t step,
                        double rate, double beta1, double beta2, double eps) {
        detail::sparse_adam(table, gradient, exp_avg, exp_avg_sq, step, rate, {beta1, beta2}, eps);
      });
}

}  // namespace

void register_nn(Library& library) {
  register_experts(library);
  register_tables(library);
  register_modules(library);
  library.class_<PyDataParallel>("DistributedDataParallel")
      .def(torch::init<const ModuleTreePtr&, const GroupPtr&, const std::string&, double, bool,
                       const Names&, std::int64_t, std::int64_t, bool, bool>())
      .def("before_forward",
           [](const DataParallelPtr& self, bool training) { self->before_forward(training); })
      .def("syncing", [](const DataParallelPtr& self) { return self->engine.reducer().syncing(); })
      .def("buckets", [](const DataParallelPtr& self) { return self->buckets(); });
  library.class_<PyStepWeight>("StepWeight")
      .def(torch::init<const GroupPtr&, const std::string&>())
      .def("weigh", [](const StepWeightPtr& self, const at::Tensor& loss,
                       double weight) { return self->weight.weigh(loss, weight); })
      .def("weigh_global", [](const StepWeightPtr& self, const at::Tensor& loss,
                              double weight) { return self->weight.weigh_global(loss, weight); })
      .def("finish", [](const StepWeightPtr& self,
                        const Tensors& parameters) { return self->weight.finish(parameters); })
      .def("reset", [](const StepWeightPtr& self) { self->weight.reset(); });
  library.class_<PyRedistribution>("Redistribution")
      .def("done", [](const RedistributionPtr& self) { return self->pending.done(); })
      .def("wait", [](const RedistributionPtr& self) { return self->pending.wait(); });

  library.def("mean_loss", [](const at::Tensor& loss, double samples, const GroupPtr& group,
                              const std::string& reduction) {
    return mean_loss(loss, samples, group->group, reduce_op(reduction));
  });
  library.def("clip_gradients", &clip);
  library.def("halo_exchange", &halo);
  library.def("packed_attention", [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const DocumentLengths& lengths, double dropout, bool causal,
                                     std::optional<double> scale, bool grouped) {
    return packed_attention(q, k, v, lengths, {causal, scale, grouped, dropout});
  });
  library.def("cut_documents", [](const DocumentLengths& lengths, std::int64_t parts, bool causal,
                                  double token_cost, std::int64_t tokens, std::int64_t most) {
    const auto cut =
        cut_documents(lengths, static_cast<int>(parts), {causal, token_cost, tokens, most});
    return std::tuple(cut.sizes, std::vector<double>{cut.imbalance, cut.imbalance_of_even});
  });
  library.def("made", &made);
  library.def("start_redistribute",
              [](const at::Tensor& t, const Names& where, const SizesDict& parts) {
                return c10::make_intrusive<PyRedistribution>(
                    start_redistribute(t, placements(where), sizes(parts)));
              });
  library.def("explain_redistribution", [](const at::Tensor& t, const Names& where,
                                           const SizesDict& parts) {
    const ShardSpec from = spec(t);
    std::vector<std::tuple<std::string, Names, std::int64_t>> all;
    for (const auto& c : explain_redistribution(
             from, ShardSpec(from.mesh(), from.shape(), placements(where), sizes(parts))))
      all.emplace_back(c.operation, c.axes, c.received);
    return all;
  });
  library.def("visualize_sharding", [](const at::Tensor& t, bool svg) {
    return svg ? visualize_sharding_svg(spec(t)) : visualize_sharding(spec(t));
  });
  // Names, tensors, and what did not fit, a sentence each.
  library.def("load_as_saved", [](const MeshPtr& mesh, const std::string& path, bool misfits) {
    std::tuple<Names, Tensors, Names> loaded;
    auto& [names, tensors, words] = loaded;
    for (auto& [name, tensor] : load_as_saved(mesh->mesh, path, misfits ? &words : nullptr)) {
      names.push_back(name);
      tensors.push_back(tensor);
    }
    return loaded;
  });
}

}  // namespace tessera::python
