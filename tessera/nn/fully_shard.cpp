#include "tessera/nn/fully_shard.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/gradient/internal/hooks.h"
#include "tessera/nn/detail/fully_shard_plan.h"
#include "tessera/nn/detail/gather_units.h"
#include "tessera/nn/detail/parameter_gradient.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera {

namespace {

using detail::Flat;
using detail::FullyShardPlan;
using detail::Further;
using detail::GatherUnits;
using detail::source_of;

// The strides of a tensor of which `dim` is the slowest, so that its slices are intervals.
detail::Dims slowest(const std::vector<std::int64_t>& shape, int dim) {
  detail::Dims strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (static_cast<int>(d) == dim) continue;
    strides[d] = step;
    step *= std::max<std::int64_t>(shape[d], 1);
  }
  strides[dim] = step;
  return strides;
}

// The locals of a unit's parameters move into the flat buffer of which this rank keeps an interval.
void make_flat(const Flat& flat, int rank, const std::vector<Further>& further,
               const std::shared_ptr<GatherUnits>& units) {
  const at::NoGradGuard no_grad;
  const Sizes sizes = flat.plan.sizes();
  const detail::ShardMeta& front = *detail::meta_of(flat.parameters.front().tensor);
  const c10::Device device = front.layout->device;
  const at::TensorOptions options = front.local.options().requires_grad(false);
  const at::Tensor memory =
      at::zeros({std::max<std::int64_t>(sizes[rank], 1)}, options.pinned_memory(units->pins()));
  const std::size_t buffer = units->add_buffer(flat.unit, memory.narrow(0, 0, sizes[rank]), sizes);
  const std::int64_t width = memory.element_size(), begin = flat.plan.cuts[rank];
  for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
    const at::Tensor& parameter = flat.parameters[i].tensor;
    const auto known = std::ranges::find_if(
        further, [&](const Further& f) { return f.parameter.tensor.is_same(parameter); });
    const bool fresh = known == further.end();
    const detail::ShardMeta& meta = *detail::meta_of(parameter);
    const ShardSpec to = fresh ? meta.spec() : known->spec;
    const SequenceSharding sequence = meta.layout->sequence;
    const int dim = fresh ? 0 : known->dim;
    const at::Tensor local =
        fresh ? meta.local : detail::redistribute_local(meta.local, meta.spec(), to);
    const detail::Dims strides = slowest(to.shape(), dim);
    const std::int64_t at =
        local.numel() > 0 ? std::max<std::int64_t>(flat.plan.offset[i] - begin, 0) : 0;
    // A storage of its own, by which the parameter and its views are known; it keeps the units.
    const at::Tensor place = at::from_blob(
        static_cast<char*>(memory.data_ptr()) + at * width, local.sizes(),
        detail::strides_in_order(local.sizes(), strides), [memory, units](void*) {}, options);
    place.copy_(local);
    bool elsewhere = false;
    for (int d = 0; d < to.dims(); ++d) elsewhere |= d != dim && to.is_sharded(d);
    detail::install(
        parameter, place,
        detail::marked(detail::make_layout(to, strides, 0, parameter.scalar_type(), device),
                       {.parameter = true, .sequence = sequence}));
    units->add_parameter(flat.unit, buffer, flat.plan.offset[i], place, elsewhere ? to.numel() : 0);
  }
}

// The local of a parameter that lies in no flat buffer, in a storage that keeps the units.
at::Tensor keep_units(const at::Tensor& parameter, const std::shared_ptr<GatherUnits>& units) {
  const at::NoGradGuard no_grad;
  const detail::ShardMeta& meta = *detail::meta_of(parameter);
  const at::Tensor local = meta.local;
  const at::TensorOptions options = local.options().requires_grad(false);
  // Of a rank that has no rows of it, too: all ranks know its unit's precision.
  const at::Tensor memory = local.numel() > 0 ? local : at::zeros({1}, options);
  at::Tensor place = at::from_blob(
      memory.data_ptr(), local.sizes(), local.strides(), [memory, units](void*) {}, options);
  detail::install(parameter, place, meta.layout);
  return place;
}

// Moves a parameter to host memory, and shows the device; a buffer lies there.
void offload(const NamedTensor& entry, c10::Device device, bool pinned) {
  const at::NoGradGuard no_grad;
  const detail::ShardMeta& meta = *detail::meta_of(entry.tensor);
  const detail::Layout& have = *meta.layout;
  detail::LayoutPtr layout = detail::marked(
      detail::make_layout(have.spec, have.strides, have.offset, have.dtype, device), have.marks());
  at::Tensor local;
  {
    const detail::LocalCallGuard guard;
    local = entry.parameter ? detail::to_host(meta.local, pinned) : meta.local.to(device);
  }
  at::Tensor tensor = entry.tensor;
  tensor.set_data(detail::wrap_shown(std::move(local), std::move(layout), device));
}

template <class Call>
void of_units(const torch::nn::Module& module, std::string_view name, const Call& call) {
  // In the order of the parameters, which all ranks share.
  std::vector<std::pair<std::shared_ptr<GatherUnits>, std::size_t>> all;
  for (const at::Tensor& p : module.parameters()) {
    const auto [source, index] = source_of(p);
    const auto units = std::dynamic_pointer_cast<GatherUnits>(source);
    if (!units) continue;
    const std::pair unit(units, units->unit_of(index));
    if (std::ranges::find(all, unit) == all.end()) all.push_back(unit);
  }
  if (all.empty())
    throw InvalidArgument(name, ": no parameter of the module has been sharded by fully_shard()");
  for (const auto& [units, unit] : all) call(*units, unit);
}

}  // namespace

void fully_shard(torch::nn::Module& module, const DeviceMesh& mesh,
                 const FullyShardOptions& options) {
  const FullyShardPlan plan = detail::agreed_plan(module, mesh, options);
  const std::vector<NamedTensor> placed = detail::place(
      plan.all, mesh,
      [&](const std::string& name, const at::Tensor&) { return plan.placement(name); });
  const auto context = detail::MeshContext::of(mesh);
  const bool pinned = plan.device && options.offload.pin_memory;
  if (plan.device) {
    for (const NamedTensor& entry : placed) offload(entry, *plan.device, pinned);
    for (const Further& f : plan.further) offload(f.parameter, *plan.device, pinned);
  }
  const auto units = std::make_shared<GatherUnits>(
      context, plan.axes,
      // What is copied to the device is gathered from there, unit by unit.
      GatherUnits::Options{plan.reshard, options.prefetch, plan.device ? 0 : options.coalesce_bytes,
                           plan.kept_axes, plan.device, pinned});
  // Made here, by all ranks at once, rather than in the middle of a forward.
  if (!plan.kept_axes.empty()) context->mesh.group(plan.kept_axes);
  for (std::size_t u = 0; u < plan.units.size(); ++u)
    units->add_unit(plan.units[u], {plan.precisions[u].parameters, plan.precisions[u].output});
  const int rank = mesh.group(plan.axes).rank();
  for (const Flat& flat : plan.flats) make_flat(flat, rank, plan.further, units);
  const auto accumulated = [weak = std::weak_ptr(units)](const at::Tensor&) {
    if (const auto of = weak.lock()) of->accumulated();
  };
  std::vector<detail::UnitParameter> reduced;
  const auto add = [&](const NamedTensor& entry) {
    const std::size_t unit = plan.unit_of.at(entry.tensor.unsafeGetTensorImpl());
    if (!source_of(entry.tensor).first)
      units->add_parameter(unit, GatherUnits::kNoBuffer, 0, keep_units(entry.tensor, units));
    const detail::ShardMeta& meta = *detail::meta_of(entry.tensor);
    detail::ParameterMarks marks = meta.layout->marks();
    marks.unit_axes = plan.axes;
    detail::install(entry.tensor, meta.local, detail::marked(meta.layout, marks));
    if (entry.tensor.requires_grad()) detail::add_hook_after(entry.tensor, accumulated);
    return unit;
  };
  for (const NamedTensor& entry : placed) {
    if (!entry.parameter) continue;
    const std::size_t unit = add(entry);
    if (entry.tensor.requires_grad())
      reduced.push_back(
          {entry.name, entry.tensor, plan.message_of(entry.tensor), plan.precisions[unit].reduce});
  }
  // Their gradients are reduced already, to whatever their placements are.
  for (const Further& f : plan.further) add(f.parameter);
  detail::reduce_parameters(reduced, mesh, options.reducer);
}

void gather_parameters(const torch::nn::Module& module) {
  of_units(module, "gather_parameters",
           [](GatherUnits& units, std::size_t unit) { units.hold(unit); });
}

void release_parameters(const torch::nn::Module& module) {
  of_units(module, "release_parameters",
           [](GatherUnits& units, std::size_t unit) { units.let_go(unit); });
}

}  // namespace tessera
