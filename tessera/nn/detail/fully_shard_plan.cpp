#include "tessera/nn/detail/fully_shard_plan.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/nn/detail/agreed_text.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

namespace {

bool any_matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns, [&](const std::string& p) { return matches(name, p); });
}

// Rows of another width than the plan was made for: the same rows on each rank, without padding.
void resize_rows(FlatPlan& plan, const std::vector<std::int64_t>& widths) {
  std::int64_t at = 0;
  std::ranges::fill(plan.cuts, 0);
  for (std::size_t i = 0; i < widths.size(); ++i) {
    plan.offset[i] = at;
    for (std::size_t r = 0; r < plan.rows[i].size(); ++r) {
      const std::int64_t elements = plan.rows[i][r] * widths[i];
      at += elements;
      for (std::size_t c = r + 1; c < plan.cuts.size(); ++c) plan.cuts[c] += elements;
    }
  }
}

}  // namespace

ParameterSources::Found source_of(const at::Tensor& t) {
  const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
  if (!meta) return {};
  return context_of(meta->spec())->state->sources.find(meta->local);
}

FullyShardPlan::FullyShardPlan(const torch::nn::Module& module, const DeviceMesh& mesh,
                               const FullyShardOptions& options)
    : mesh_(mesh), options_(options), unused_(options.ignore.begin(), options.ignore.end()) {
  UnitPrecisions precision(options);
  find_axes();
  find_device();
  check_numbers();
  take_parameters(module, UnitNames(module, options.units), precision);
  for (const std::string& unit : units) precisions.push_back(precision.of(unit));
  take_buffers(module);
  precision.check_used();
  cut();
}

void FullyShardPlan::check_numbers() const {
  if (options_.prefetch < 0)
    throw InvalidArgument("fully_shard: prefetch is ", options_.prefetch,
                          " units, but must be at least 0");
  if (options_.coalesce_bytes < 0)
    throw InvalidArgument("fully_shard: coalesce_bytes is ", options_.coalesce_bytes,
                          ", but must be at least 0");
}

bool FullyShardPlan::ignored(const std::string& name) {
  std::erase_if(unused_, [&](const std::string& p) { return matches(name, p); });
  return any_matches(name, options_.ignore);
}

void FullyShardPlan::take_parameters(const torch::nn::Module& module, const UnitNames& names,
                                     UnitPrecisions& precision) {
  std::set<std::string> unmatched(options_.stay.begin(), options_.stay.end());
  // Under any of its names.
  std::unordered_set<const void*> staying;
  for (const auto& p : module.named_parameters()) {
    if (!any_matches(p.key(), options_.stay)) continue;
    std::erase_if(unmatched, [&](const auto& s) { return matches(p.key(), s); });
    staying.insert(p.value().unsafeGetTensorImpl());
  }
  if (!unmatched.empty())
    throw InvalidArgument("fully_shard: no parameter has a name like ", list(unmatched),
                          ", which is to stay");
  for (const auto& p : module.named_parameters()) {
    if (ignored(p.key()) || source_of(p.value()).first || !first_time(p.value())) continue;
    const NamedTensor entry{p.key(), p.value(), true};
    const std::string unit = names.of(p.key());
    precision.check_parameter(unit, entry);
    if (staying.contains(p.value().unsafeGetTensorImpl())) keep(entry);
    if (is_sharded(p.value()) && lies_here(p.value())) {
      check_further(entry, precision.of(unit));
      further.push_back({entry, -1, spec(p.value())});
    } else {
      all.push_back(entry);
    }
    add(unit, entry);
  }
}

void FullyShardPlan::take_buffers(const torch::nn::Module& module) {
  for (const auto& b : module.named_buffers()) {
    if (!ignored(b.key()) && b.value().defined() && !is_sharded(b.value()))
      all.push_back({b.key(), b.value(), false});
  }
  if (!unused_.empty())
    throw InvalidArgument("fully_shard: no parameter or buffer has a name like ", list(unused_),
                          ", which is to be ignored");
}

ParameterPlacement FullyShardPlan::placement(const std::string& name) const {
  const auto at = rows_.find(name);
  std::vector<Placement> placements(mesh_.mesh().dims());
  if (at != rows_.end()) {
    for (const int axis : axes) placements[axis] = Shard(0);
  }
  const bool stays = staying_.contains(name);
  if (at == rows_.end() || at->second.empty() || axes.empty())
    return {.placements = placements, .stays = stays};
  return {placements, {{0, at->second}}};
}

std::size_t FullyShardPlan::message_of(const at::Tensor& parameter) const {
  const void* key = parameter.unsafeGetTensorImpl();
  const auto at = message_of_.find(key);
  return at == message_of_.end() ? flats.size() + unit_of.at(key) : at->second;
}

std::string FullyShardPlan::describe() const {
  return concat(
      "units ", list(units), ", axes ", list(axes), ", reshard_after_forward ", reshard,
      ", reshard_axes ", list(kept_axes), ", prefetch ", options_.prefetch, ", coalesce_bytes ",
      options_.coalesce_bytes, ", bucket_bytes ", options_.reducer.bucket_bytes,
      ", first_bucket_bytes ", options_.reducer.first_bucket_bytes, ", learn_order ",
      options_.reducer.learn_order, ", overlap ", options_.reducer.overlap, ", precisions ",
      list(described_precisions()), ", offload ",
      device ? concat("from ", device->type()) : std::string("none"), "\n", described_further());
}

std::vector<std::string> FullyShardPlan::described_precisions() const {
  std::vector<std::string> all;
  for (const UnitPrecision& p : precisions) all.push_back(described(p));
  return all;
}

std::string FullyShardPlan::described_further() const {
  std::string text;
  for (const Further& f : further) text += concat(f.parameter.name, ": ", f.spec, "\n");
  return text;
}

bool FullyShardPlan::lies_here(const at::Tensor& p) const {
  return context_of(spec(p)) == MeshContext::of(mesh_);
}

void FullyShardPlan::check_further(const NamedTensor& p, const UnitPrecision& precision) const {
  const ShardSpec have = spec(p.tensor);
  bool fits = !have.has_partial();
  for (const int axis : axes) fits &= have.placements()[axis].is_replicate();
  if (!fits)
    throw ShardingError("fully_shard: ", p.name, " is ", have,
                        " already: over the axes that are to shard it, it must be "
                        "replicated");
  if (p.tensor.grad().defined() || p.tensor.grad_fn())
    throw ShardingError("fully_shard: ", p.name,
                        " has a gradient or a graph: call it before the first backward, "
                        "or zero_grad() with set_to_none");
  if (precision.reduce)
    throw InvalidArgument("fully_shard: ", p.name,
                          " is a ShardTensor, whose gradient is reduced as what made it "
                          "one was told: no dtype to reduce in can be given");
}

int FullyShardPlan::dim_to_cut(const at::Tensor& p) {
  if (p.dim() == 0 || p.numel() == 0) return -1;
  if (!is_sharded(p)) return 0;
  const ShardSpec have = spec(p);
  if (!have.is_sharded(0)) return 0;
  int largest = -1;
  for (int d = 1; d < have.dims(); ++d) {
    if (!have.is_sharded(d) && (largest < 0 || have.shape()[d] > have.shape()[largest]))
      largest = d;
  }
  return largest;
}

std::vector<int> FullyShardPlan::find(const std::vector<std::string>& names,
                                      std::string_view use) const {
  const Mesh& layout = mesh_.mesh();
  const auto& known = layout.axes();
  std::vector<int> found;
  for (const std::string& name : names) {
    if (std::ranges::none_of(known, [&](const Axis& a) { return a.name == name; }))
      throw InvalidArgument("fully_shard: the mesh ", layout.to_string(), " has no axis '", name,
                            "' ", use);
    found.push_back(layout.index(name));
  }
  std::ranges::sort(found);
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void FullyShardPlan::find_axes() {
  const Mesh& layout = mesh_.mesh();
  axes = find(options_.axes, "to shard over");
  for (int a = 0; options_.axes.empty() && a < layout.dims(); ++a) axes.push_back(a);
  find_kept_axes();
  // Nothing is sharded over one rank, where an operator might still choose to move its data.
  const auto has_one_rank = [&](int a) { return layout.axes()[a].size == 1; };
  std::erase_if(axes, has_one_rank);
  std::erase_if(kept_axes, has_one_rank);
  // Sharded over one rank is not sharded.
  reshard = options_.reshard_after_forward &&
            (options_.reshard_axes.empty() || axes.empty() || !kept_axes.empty());
  if (kept_axes == axes) kept_axes.clear();
}

void FullyShardPlan::find_device() {
  if (!options_.offload.to_host) return;
  const DistributedManager& manager = mesh_.manager();
  device = options_.offload.device.value_or(manager.device());
  if (device->is_cpu())
    throw InvalidArgument(
        "fully_shard: offload is from a device to host memory, and the device is the CPU (",
        options_.offload.device ? "as offload.device says" : "the manager's",
        "): give ManagerOptions::device or offload.device");
  const Group ranks = mesh_.all();
  if (!c10::impl::hasDeviceGuardImpl(device->type()))
    throw NotAvailable("fully_shard: offload from ", *device, ", of which this libtorch has none");
  if (!device->has_index()) device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
  if (ranks.size() == 1) return;
  ranks.backend(device->type());  // throws where there is none
  if (const c10::Device own = manager.device(); own.type() == device->type() && own != *device)
    throw InvalidArgument("fully_shard: offload from ", *device, ", but groups serve ", own,
                          ", the manager's device, on this rank");
}

void FullyShardPlan::find_kept_axes() {
  kept_axes = find(options_.reshard_axes, "to stay sharded over after forward");
  if (!kept_axes.empty() && !options_.reshard_after_forward)
    throw InvalidArgument(
        "fully_shard: reshard_axes says over what units stay sharded after forward, and "
        "reshard_after_forward, which is false, that they do not: give one of the two");
  for (const int axis : kept_axes) {
    if (std::ranges::find(axes, axis) == axes.end())
      throw InvalidArgument("fully_shard: '", mesh_.mesh().axes()[axis].name,
                            "' is among reshard_axes, and not among the axes that "
                            "parameters are sharded over");
  }
}

bool FullyShardPlan::first_time(const at::Tensor& t) {
  return t.defined() && seen_.insert(t.unsafeGetTensorImpl()).second;
}

void FullyShardPlan::keep(const NamedTensor& p) {
  if (p.tensor.dim() == 0 || p.tensor.numel() == 0 || is_sharded(p.tensor))
    throw InvalidArgument("fully_shard: ", p.name, " of shape ", p.tensor.sizes(),
                          " shall stay, and has no rows to shard, or is sharded already");
  staying_.insert(p.name);
}

void FullyShardPlan::add(const std::string& unit, const NamedTensor& p) {
  const auto [at, fresh] = unit_index_.try_emplace(unit, units.size());
  if (fresh) units.push_back(unit);
  unit_of.emplace(p.tensor.unsafeGetTensorImpl(), at->second);
  if (dim_to_cut(p.tensor) < 0) return;
  const bool known = !further.empty() && further.back().parameter.tensor.is_same(p.tensor);
  if (is_sharded(p.tensor) && !known) return;  // refused when it is placed
  if ((!known && !p.tensor.is_contiguous()) || staying_.contains(p.name)) {
    rows_.emplace(p.name, Sizes());
    return;
  }
  auto flat = std::ranges::find_if(flats, [&](const Flat& f) {
    const at::Tensor& like = f.parameters.front().tensor;
    return f.unit == at->second && like.scalar_type() == p.tensor.scalar_type() &&
           like.device() == p.tensor.device();
  });
  if (flat == flats.end()) flat = flats.insert(flats.end(), Flat{at->second, {}, {}});
  flat->parameters.push_back(p);
}

void FullyShardPlan::cut() {
  int ranks = 1;
  for (const int axis : axes) ranks *= mesh_.mesh().axes()[axis].size;
  // Nothing is gathered of one rank's parameters, unless they are to be copied to the device.
  if (ranks == 1 && !device) flats.clear();
  divide(ranks);
  for (Flat& flat : flats) {
    std::vector<FlatRows> rows;
    for (const NamedTensor& p : flat.parameters) {
      const std::int64_t n = p.tensor.size(dim_to_cut(p.tensor));
      rows.push_back({n, p.tensor.numel() / n});
    }
    flat.plan = plan_flat(rows, ranks);
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows_.emplace(flat.parameters[i].name, flat.plan.rows[i]);
    cut_further(flat);
  }
}

std::int64_t FullyShardPlan::bytes_of(const NamedTensor& p) {
  return static_cast<std::int64_t>(p.tensor.numel() * p.tensor.element_size());
}

void FullyShardPlan::divide(int ranks) {
  constexpr std::int64_t kMessages = 4, kLeastOfRank = 32 << 10;
  std::vector<Flat> divided;
  for (const Flat& flat : flats) {
    std::int64_t left = 0;
    for (const NamedTensor& p : flat.parameters) left += bytes_of(p);
    const std::int64_t least = std::max(left / kMessages, kLeastOfRank * ranks);
    std::vector<Flat> parts{Flat{flat.unit, {}, {}}};
    std::int64_t taken = 0;
    for (auto p = flat.parameters.rbegin(); p != flat.parameters.rend(); ++p) {
      if (taken >= least && left >= least / 2) {
        parts.push_back({flat.unit, {}, {}});
        taken = 0;
      }
      parts.back().parameters.insert(parts.back().parameters.begin(), *p);
      taken += bytes_of(*p);
      left -= bytes_of(*p);
    }
    divided.insert(divided.end(), parts.rbegin(), parts.rend());
  }
  flats = std::move(divided);
  // Small ones are reduced together.
  std::size_t message = 0;
  std::int64_t taken = 0;
  for (std::size_t f = 0; f < flats.size(); ++f) {
    std::int64_t bytes = 0;
    for (const NamedTensor& p : flats[f].parameters) bytes += bytes_of(p);
    if (f == 0 || taken + bytes >= options_.coalesce_bytes) {
      message = f;
      taken = 0;
    }
    taken += bytes;
    for (const NamedTensor& p : flats[f].parameters)
      message_of_.emplace(p.tensor.unsafeGetTensorImpl(), message);
  }
}

void FullyShardPlan::cut_further(Flat& flat) {
  bool any = false;
  std::vector<std::int64_t> widths;
  for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
    const at::Tensor& p = flat.parameters[i].tensor;
    const int dim = dim_to_cut(p);
    widths.push_back(p.numel() / p.size(dim));
    const auto at = std::ranges::find_if(
        further, [&](const Further& f) { return f.parameter.tensor.is_same(p); });
    if (at == further.end()) continue;
    any = true;
    widths.back() = at->spec.local_numel() / p.size(dim);
    auto placements = at->spec.placements();
    for (const int axis : axes) placements[axis] = Shard(dim);
    ShardSizes sizes = at->spec.sizes();
    if (!axes.empty()) sizes[dim] = flat.plan.rows[i];
    at->dim = dim;
    at->spec = ShardSpec(mesh_, at->spec.shape(), placements, sizes);
  }
  if (any) resize_rows(flat.plan, widths);
}

FullyShardPlan agreed_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const FullyShardOptions& options) {
  std::optional<FullyShardPlan> plan;
  agree_on_plan(mesh, "the module to shard fully",
                [&] { return plan.emplace(module, mesh, options).describe(); });
  return std::move(*plan);
}

}  // namespace tessera::detail
