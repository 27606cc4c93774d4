#include "tessera/nn/detail/fully_shard_plan.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
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

std::int64_t global_bytes(const NamedTensor& p) {
  return static_cast<std::int64_t>(p.tensor.nbytes());
}

std::int64_t global_bytes(const Flat& flat) {
  std::int64_t bytes = 0;
  for (const NamedTensor& p : flat.parameters) bytes += global_bytes(p);
  return bytes;
}

// The dim whose slices are cheapest to gather of those that no axis shards; -1: there is none.
int dim_to_cut(const at::Tensor& p) {
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

bool is_floating(at::ScalarType t) {
  return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble;
}

void check_dtypes(const std::string& where, const UnitPrecision& precision) {
  for (const auto& dtype : {precision.parameters, precision.reduce, precision.output}) {
    if (dtype && !is_floating(*dtype))
      throw InvalidArgument("fully_shard: the precision", where, " names ", toString(*dtype),
                            "; give float16, bfloat16, float32 or float64");
  }
  if (precision.output && !precision.parameters)
    throw InvalidArgument("fully_shard: the precision", where,
                          " has an output dtype and none to compute in: give "
                          "`parameters` too");
}

// "Half/Float/its own": what is computed in, reduced in and returned.
std::string precision_text(const UnitPrecision& precision) {
  const auto name = [](const std::optional<at::ScalarType>& t) {
    return t ? toString(*t) : "its own";
  };
  return concat(name(precision.parameters), "/", name(precision.reduce), "/",
                name(precision.output));
}

// Makes the plan of this rank, step by step.
struct UnitPlanner {
  const DeviceMesh& mesh;
  const FullyShardOptions& options;
  FullyShardPlan plan = {};
  // One tensor under two names is one tensor.
  std::unordered_set<const void*> seen = {};
  std::map<std::string, std::size_t> unit_index = {};
  // Patterns of `ignore` that have matched nothing so far.
  std::set<std::string> unused{options.ignore.begin(), options.ignore.end()};
  // And of `unit_precision`.
  std::set<std::string> unused_precisions = {};

  FullyShardPlan make(const torch::nn::Module& module) {
    plan.mesh_dims = mesh.mesh().dims();
    check_dtypes("", options.precision);
    for (const auto& [pattern, precision] : options.unit_precision) {
      check_dtypes(concat(" of '", pattern, "'"), precision);
      unused_precisions.insert(pattern);
    }
    find_axes();
    if (options.offload.to_host) find_device();
    if (options.prefetch < 0)
      throw InvalidArgument("fully_shard: prefetch is ", options.prefetch,
                            " units, but must be at least 0");
    if (options.coalesce_bytes < 0)
      throw InvalidArgument("fully_shard: coalesce_bytes is ", options.coalesce_bytes,
                            ", but must be at least 0");
    take_parameters(module, unit_names(module, options.units));
    for (const std::string& unit : plan.units) plan.precisions.push_back(precision_of(unit));
    for (const auto& b : module.named_buffers()) {
      if (!ignored(b.key()) && b.value().defined() && !is_sharded(b.value()))
        plan.all.push_back({b.key(), b.value(), false});
    }
    if (!unused.empty())
      throw InvalidArgument("fully_shard: no parameter or buffer has a name like ", list(unused),
                            ", which is to be ignored");
    if (!unused_precisions.empty())
      throw InvalidArgument("fully_shard: no unit has a name like ", list(unused_precisions),
                            ", which unit_precision names");
    cut();
    return std::move(plan);
  }

  // Whether the name is to be ignored; notes which patterns were used.
  bool ignored(const std::string& name) {
    std::erase_if(unused, [&](const std::string& p) { return matches(name, p); });
    return any_matches(name, options.ignore);
  }

  const UnitPrecision& precision_of(const std::string& unit) {
    for (const auto& [pattern, precision] : options.unit_precision) {
      if (!matches(unit, pattern)) continue;
      unused_precisions.erase(pattern);
      return precision;
    }
    return options.precision;
  }

  void check_precision(const std::string& unit, const NamedTensor& p) {
    const UnitPrecision& precision = precision_of(unit);
    const at::ScalarType dtype = p.tensor.scalar_type();
    if ((precision.parameters || precision.reduce) && !is_floating(dtype))
      throw InvalidArgument(
          "fully_shard: ", p.name, " is ", toString(dtype), ", and its unit '", unit,
          "' has a precision, which is for real floating-point parameters alone: give the unit "
          "another one by unit_precision, or leave the parameter out by ignore");
    if (precision.output && precision.parameters == dtype)
      throw InvalidArgument("fully_shard: ", p.name, " of unit '", unit, "' is ", toString(dtype),
                            " already, so that nothing is cast and no output dtype can be given");
  }

  // By name, in mesh order. `use`: "to shard over".
  std::vector<int> find(const std::vector<std::string>& names, std::string_view use) const {
    const Mesh& layout = mesh.mesh();
    std::set<int> found;
    for (const std::string& name : names) {
      if (!layout.has_axis(name))
        throw InvalidArgument("fully_shard: the mesh ", layout.to_string(), " has no axis '", name,
                              "' ", use);
      found.insert(layout.index(name));
    }
    return {found.begin(), found.end()};
  }

  void find_axes() {
    const Mesh& layout = mesh.mesh();
    std::vector<int>& axes = plan.axes;
    std::vector<int>& kept = plan.kept_axes;
    axes = find(options.axes, "to shard over");
    for (int a = 0; options.axes.empty() && a < layout.dims(); ++a) axes.push_back(a);
    kept = find(options.reshard_axes, "to stay sharded over after forward");
    if (!kept.empty() && !options.reshard_after_forward)
      throw InvalidArgument(
          "fully_shard: reshard_axes says over what units stay sharded after forward, and "
          "reshard_after_forward, which is false, that they do not: give one of the two");
    for (const int axis : kept) {
      if (std::ranges::find(axes, axis) == axes.end())
        throw InvalidArgument("fully_shard: '", layout.axes()[axis].name,
                              "' is among reshard_axes, and not among the axes that "
                              "parameters are sharded over");
    }
    // Nothing is sharded over one rank, where an operator might still choose to move its data.
    const auto has_one_rank = [&](int a) { return layout.axes()[a].size == 1; };
    std::erase_if(axes, has_one_rank);
    std::erase_if(kept, has_one_rank);
    // Sharded over one rank is not sharded.
    plan.reshard = options.reshard_after_forward &&
                   (options.reshard_axes.empty() || axes.empty() || !kept.empty());
    if (kept == axes) kept.clear();
  }

  void find_device() {
    const DistributedManager& manager = mesh.manager();
    c10::Device device = options.offload.device.value_or(manager.device());
    if (device.is_cpu())
      throw InvalidArgument(
          "fully_shard: offload is from a device to host memory, and the device is the CPU (",
          options.offload.device ? "as offload.device says" : "the manager's",
          "): give ManagerOptions::device or offload.device");
    const Group ranks = mesh.all();
    if (!c10::impl::hasDeviceGuardImpl(device.type()))
      throw NotAvailable("fully_shard: offload from ", device, ", of which this libtorch has none");
    if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    plan.device = device;
    if (ranks.size() == 1) return;
    ranks.backend(device.type());  // throws where there is none
    if (const c10::Device own = manager.device(); own.type() == device.type() && own != device)
      throw InvalidArgument("fully_shard: offload from ", device, ", but groups serve ", own,
                            ", the manager's device, on this rank");
  }

  void take_parameters(const torch::nn::Module& module, const std::set<std::string>& names) {
    std::set<std::string> unmatched(options.stay.begin(), options.stay.end());
    // Under any of its names.
    std::unordered_set<const void*> staying;
    for (const auto& p : module.named_parameters()) {
      if (!any_matches(p.key(), options.stay)) continue;
      std::erase_if(unmatched, [&](const auto& s) { return matches(p.key(), s); });
      staying.insert(p.value().unsafeGetTensorImpl());
    }
    if (!unmatched.empty())
      throw InvalidArgument("fully_shard: no parameter has a name like ", list(unmatched),
                            ", which is to stay");
    for (const auto& p : module.named_parameters()) {
      const at::Tensor& t = p.value();
      if (ignored(p.key()) || source_of(t).first || !t.defined() ||
          !seen.insert(t.unsafeGetTensorImpl()).second)
        continue;
      const NamedTensor entry{p.key(), t, true};
      const std::string unit = unit_of(names, p.key());
      check_precision(unit, entry);
      if (staying.contains(t.unsafeGetTensorImpl())) keep(entry);
      if (is_sharded(t) && context_of(spec(t)) == MeshContext::of(mesh)) {
        check_further(entry, precision_of(unit));
        plan.further.push_back({entry, -1, spec(t)});
      } else {
        plan.all.push_back(entry);
      }
      add(unit, entry);
    }
  }

  void keep(const NamedTensor& p) {
    if (p.tensor.dim() == 0 || p.tensor.numel() == 0 || is_sharded(p.tensor))
      throw InvalidArgument("fully_shard: ", p.name, " of shape ", p.tensor.sizes(),
                            " shall stay, and has no rows to shard, or is sharded already");
    plan.staying.insert(p.name);
  }

  void check_further(const NamedTensor& p, const UnitPrecision& of_unit) const {
    const ShardSpec have = spec(p.tensor);
    bool fits = !have.has_partial();
    for (const int axis : plan.axes) fits &= have.placements()[axis].is_replicate();
    if (!fits)
      throw ShardingError("fully_shard: ", p.name, " is ", have,
                          " already: over the axes that are to shard it, it must be "
                          "replicated");
    if (p.tensor.grad().defined() || p.tensor.grad_fn())
      throw ShardingError("fully_shard: ", p.name,
                          " has a gradient or a graph: call it before the first backward, "
                          "or zero_grad() with set_to_none");
    if (of_unit.reduce)
      throw InvalidArgument("fully_shard: ", p.name,
                            " is a ShardTensor, whose gradient is reduced as what made it "
                            "one was told: no dtype to reduce in can be given");
  }

  void add(const std::string& unit, const NamedTensor& p) {
    const auto [at, fresh] = unit_index.try_emplace(unit, plan.units.size());
    if (fresh) plan.units.push_back(unit);
    plan.unit_of.emplace(p.tensor.unsafeGetTensorImpl(), at->second);
    if (dim_to_cut(p.tensor) < 0) return;
    const bool known =
        !plan.further.empty() && plan.further.back().parameter.tensor.is_same(p.tensor);
    if (is_sharded(p.tensor) && !known) return;  // refused when it is placed
    if ((!known && !p.tensor.is_contiguous()) || plan.staying.contains(p.name)) {
      plan.rows.emplace(p.name, Sizes());
      return;
    }
    std::vector<Flat>& flats = plan.flats;
    auto flat = std::ranges::find_if(flats, [&](const Flat& f) {
      const at::Tensor& like = f.parameters.front().tensor;
      return f.unit == at->second && like.scalar_type() == p.tensor.scalar_type() &&
             like.device() == p.tensor.device();
    });
    if (flat == flats.end()) flat = flats.insert(flats.end(), Flat{at->second, {}, {}});
    flat->parameters.push_back(p);
  }

  void cut() {
    const int ranks = mesh.mesh().group_size(plan.axes);
    // Nothing is gathered of one rank's parameters, unless they are to be copied to the device.
    if (ranks == 1 && !plan.device) plan.flats.clear();
    divide(ranks);
    for (Flat& flat : plan.flats) {
      std::vector<FlatRows> rows;
      for (const NamedTensor& p : flat.parameters) {
        const std::int64_t n = p.tensor.size(dim_to_cut(p.tensor));
        rows.push_back({n, p.tensor.numel() / n});
      }
      flat.plan = plan_flat(rows, ranks);
      for (std::size_t i = 0; i < rows.size(); ++i)
        plan.rows.emplace(flat.parameters[i].name, flat.plan.rows[i]);
      cut_further(flat);
    }
  }

  // A flat buffer becomes up to four, of which no rank holds little: backward has the gradients of
  // one of them rather than of the unit, and sends sooner, evenly to all ranks. By the bytes of the
  // global tensors, from the last parameter, whose gradient comes first.
  void divide(int ranks) {
    constexpr std::int64_t kMessages = 4, kLeastOfRank = 32 << 10;
    std::vector<Flat> divided;
    for (const Flat& flat : plan.flats) {
      std::int64_t left = global_bytes(flat), taken = 0;
      const std::int64_t least = std::max(left / kMessages, kLeastOfRank * ranks);
      std::vector<Flat> parts{Flat{flat.unit, {}, {}}};
      for (auto p = flat.parameters.rbegin(); p != flat.parameters.rend(); ++p) {
        if (taken >= least && left >= least / 2) {
          parts.push_back({flat.unit, {}, {}});
          taken = 0;
        }
        parts.back().parameters.insert(parts.back().parameters.begin(), *p);
        taken += global_bytes(*p);
        left -= global_bytes(*p);
      }
      divided.insert(divided.end(), parts.rbegin(), parts.rend());
    }
    plan.flats = std::move(divided);
    // Small ones are reduced together.
    std::size_t message = 0;
    std::int64_t taken = 0;
    for (std::size_t f = 0; f < plan.flats.size(); ++f) {
      const std::int64_t bytes = global_bytes(plan.flats[f]);
      if (f == 0 || taken + bytes >= options.coalesce_bytes) {
        message = f;
        taken = 0;
      }
      taken += bytes;
      for (const NamedTensor& p : plan.flats[f].parameters)
        plan.messages.emplace(p.tensor.unsafeGetTensorImpl(), message);
    }
  }

  // The ranks of the other axes cut alike, whatever they hold of a row.
  void cut_further(Flat& flat) {
    bool any = false;
    std::vector<std::int64_t> widths;
    for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
      const at::Tensor& p = flat.parameters[i].tensor;
      const int dim = dim_to_cut(p);
      widths.push_back(p.numel() / p.size(dim));
      const auto at = std::ranges::find_if(
          plan.further, [&](const Further& f) { return f.parameter.tensor.is_same(p); });
      if (at == plan.further.end()) continue;
      any = true;
      widths.back() = at->spec.local_numel() / p.size(dim);
      auto placements = at->spec.placements();
      for (const int axis : plan.axes) placements[axis] = Shard(dim);
      ShardSizes sizes = at->spec.sizes();
      if (!plan.axes.empty()) sizes[dim] = flat.plan.rows[i];
      at->dim = dim;
      at->spec = ShardSpec(mesh, at->spec.shape(), placements, sizes);
    }
    if (any) resize_rows(flat.plan, widths);
  }
};

// What all ranks must plan alike.
std::string text_of(const FullyShardPlan& plan, const FullyShardOptions& options) {
  std::string text = concat(
      "units ", list(plan.units), ", axes ", list(plan.axes), ", reshard_after_forward ",
      plan.reshard, ", reshard_axes ", list(plan.kept_axes), ", prefetch ", options.prefetch,
      ", coalesce_bytes ", options.coalesce_bytes, ", bucket_bytes ", options.reducer.bucket_bytes,
      ", first_bucket_bytes ", options.reducer.first_bucket_bytes, ", learn_order ",
      options.reducer.learn_order, ", overlap ", options.reducer.overlap, ", precisions ",
      list(mapped(plan.precisions, precision_text)), ", offload ",
      plan.device ? concat("from ", plan.device->type()) : std::string("none"), "\n");
  for (const Further& f : plan.further) text += concat(f.parameter.name, ": ", f.spec, "\n");
  return text;
}

}  // namespace

ParameterSources::Found source_of(const at::Tensor& t) {
  const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
  if (!meta) return {};
  return context_of(meta->spec())->state->sources.find(meta->local);
}

ParameterPlacement FullyShardPlan::placement(const std::string& name) const {
  const auto at = rows.find(name);
  std::vector<Placement> placements(mesh_dims);
  if (at != rows.end()) {
    for (const int axis : axes) placements[axis] = Shard(0);
  }
  const bool stays = staying.contains(name);
  if (at == rows.end() || at->second.empty() || axes.empty())
    return {.placements = placements, .stays = stays};
  return {placements, {{0, at->second}}};
}

std::size_t FullyShardPlan::message_of(const at::Tensor& parameter) const {
  const void* key = parameter.unsafeGetTensorImpl();
  const auto at = messages.find(key);
  return at == messages.end() ? flats.size() + unit_of.at(key) : at->second;
}

FullyShardPlan agreed_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const FullyShardOptions& options) {
  FullyShardPlan plan;
  agree_on_plan(mesh, "the module to shard fully", [&] {
    plan = UnitPlanner{mesh, options}.make(module);
    return text_of(plan, options);
  });
  return plan;
}

}  // namespace tessera::detail
