#include "tessera/nn/fully_shard.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/gradient/internal/hooks.h"
#include "tessera/nn/detail/flat_plan.h"
#include "tessera/nn/detail/gather_units.h"
#include "tessera/nn/detail/parameter_gradient.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/dispatch/internal/host_memory.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/no_dispatch.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera {

namespace {

using detail::FlatPlan;
using detail::GatherUnits;

detail::ParameterSources::Found source_of(const at::Tensor& t) {
  const detail::ShardMeta* meta = t.defined() ? detail::meta_of(t) : nullptr;
  if (!meta) return {};
  return detail::context_of(meta->spec())->state->sources.find(meta->local);
}

bool any_matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& p) { return detail::matches(name, p); });
}

bool is_list(const torch::nn::Module& m) {
  return m.as<torch::nn::ModuleListImpl>() || m.as<torch::nn::SequentialImpl>() ||
         m.as<torch::nn::ModuleDictImpl>();
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

// The modules that are units, by name. The whole module, "", is none of them.
class UnitNames {
 public:
  UnitNames(const torch::nn::Module& module, const std::vector<std::string>& patterns)
      : patterns_(patterns), unused_(patterns.begin(), patterns.end()) {
    const std::vector<bool> none(patterns.size(), false);
    if (patterns.empty()) {
      default_units(module, "");
    } else {
      matched_units(module, "", none);
    }
    if (!unused_.empty())
      throw InvalidArgument(concat("fully_shard: no module has a name like ", list(unused_),
                                   "; names are as in named_modules()"));
  }

  /// Of a parameter by its full name: the innermost.
  std::string of(const std::string& parameter) const {
    std::string name = parameter;
    for (std::size_t dot; (dot = name.rfind('.')) != std::string::npos;) {
      name.resize(dot);
      if (names_.contains(name)) return name;
    }
    return "";
  }

 private:
  void default_units(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& child : module.named_children()) {
      const std::string name = joined(prefix, child.key());
      if (is_list(module)) {
        names_.insert(name);
      } else {
        default_units(*child.value(), name);
      }
    }
  }
  void matched_units(const torch::nn::Module& module, const std::string& prefix,
                     const std::vector<bool>& inside) {
    for (const auto& child : module.named_children()) {
      const std::string name = joined(prefix, child.key());
      std::vector<bool> matched = inside;
      for (std::size_t p = 0; p < patterns_.size(); ++p) {
        if (inside[p] || !detail::matches(name, patterns_[p])) continue;
        matched[p] = true;
        unused_.erase(patterns_[p]);
        names_.insert(name);
      }
      matched_units(*child.value(), name, matched);
    }
  }

  const std::vector<std::string>& patterns_;
  std::set<std::string> unused_, names_;
};

bool is_floating(at::ScalarType t) {
  return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble;
}

// Of the units by name.
class UnitPrecisions {
 public:
  explicit UnitPrecisions(const FullyShardOptions& options) : options_(options) {
    check("", options.precision);
    for (const auto& [pattern, precision] : options.unit_precision) {
      check(concat(" of '", pattern, "'"), precision);
      unused_.insert(pattern);
    }
  }

  const UnitPrecision& of(const std::string& unit) {
    for (const auto& [pattern, precision] : options_.unit_precision) {
      if (!detail::matches(unit, pattern)) continue;
      unused_.erase(pattern);
      return precision;
    }
    return options_.precision;
  }
  void check_parameter(const std::string& unit, const NamedTensor& p) {
    const UnitPrecision& precision = of(unit);
    const at::ScalarType dtype = p.tensor.scalar_type();
    if ((precision.parameters || precision.reduce) && !is_floating(dtype))
      throw InvalidArgument(concat(
          "fully_shard: ", p.name, " is ", toString(dtype), ", and its unit '", unit,
          "' has a precision, which is for real floating-point parameters alone: give the unit "
          "another one by unit_precision, or leave the parameter out by ignore"));
    if (precision.output && precision.parameters == dtype)
      throw InvalidArgument(concat("fully_shard: ", p.name, " of unit '", unit, "' is ",
                                   toString(dtype), " already, so that nothing is cast and no ",
                                   "output dtype can be given"));
  }
  void check_used() const {
    if (!unused_.empty())
      throw InvalidArgument(concat("fully_shard: no unit has a name like ", list(unused_),
                                   ", which unit_precision names"));
  }

 private:
  static void check(const std::string& where, const UnitPrecision& precision) {
    for (const auto& dtype : {precision.parameters, precision.reduce, precision.output}) {
      if (dtype && !is_floating(*dtype))
        throw InvalidArgument(concat("fully_shard: the precision", where, " names ",
                                     toString(*dtype),
                                     "; give float16, bfloat16, float32 or float64"));
    }
    if (precision.output && !precision.parameters)
      throw InvalidArgument(concat("fully_shard: the precision", where,
                                   " has an output dtype and none to compute in: give "
                                   "`parameters` too"));
  }

  const FullyShardOptions& options_;
  std::set<std::string> unused_;
};

std::string described(const UnitPrecision& precision) {
  const auto name = [](const std::optional<at::ScalarType>& t) {
    return t ? toString(*t) : "its own";
  };
  return concat(name(precision.parameters), "/", name(precision.reduce), "/",
                name(precision.output));
}

// Parameters of one unit, dtype and device, in one flat buffer, which is gathered in one message,
// as their gradients are reduced.
struct Flat {
  std::size_t unit = 0;
  std::vector<NamedTensor> parameters;
  FlatPlan plan;
};

// A parameter that other axes of the mesh shard already.
struct Further {
  NamedTensor parameter;
  // The dim that is sharded further; -1: none can be.
  int dim = -1;
  ShardSpec spec;
};

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

// Rows of another width than the plan was made for: the same rows on each rank, without padding.
void resize_rows(FlatPlan& plan, const std::vector<std::int64_t>& widths) {
  std::int64_t at = 0;
  std::fill(plan.cuts.begin(), plan.cuts.end(), 0);
  for (std::size_t i = 0; i < widths.size(); ++i) {
    plan.offset[i] = at;
    for (std::size_t r = 0; r < plan.rows[i].size(); ++r) {
      const std::int64_t elements = plan.rows[i][r] * widths[i];
      at += elements;
      for (std::size_t c = r + 1; c < plan.cuts.size(); ++c) plan.cuts[c] += elements;
    }
  }
}

// What fully_shard() is going to do: the same on all ranks, nothing has changed yet.
class FullyShardPlan {
 public:
  FullyShardPlan(const torch::nn::Module& module, const DeviceMesh& mesh,
                 const FullyShardOptions& options)
      : mesh_(mesh), options_(options) {
    UnitPrecisions precision(options);
    find_axes();
    find_device();
    if (options.prefetch < 0)
      throw InvalidArgument(
          concat("fully_shard: prefetch is ", options.prefetch, " units, but must be at least 0"));
    if (options.coalesce_bytes < 0)
      throw InvalidArgument(concat("fully_shard: coalesce_bytes is ", options.coalesce_bytes,
                                   ", but must be at least 0"));
    const UnitNames names(module, options.units);
    std::set<std::string> unused(options.ignore.begin(), options.ignore.end());
    const auto ignored = [&](const std::string& name) {
      std::erase_if(unused, [&](const std::string& p) { return detail::matches(name, p); });
      return any_matches(name, options.ignore);
    };
    std::set<std::string> unmatched(options.stay.begin(), options.stay.end());
    // Under any of its names.
    std::unordered_set<const void*> staying;
    for (const auto& p : module.named_parameters()) {
      if (!any_matches(p.key(), options.stay)) continue;
      std::erase_if(unmatched, [&](const auto& s) { return detail::matches(p.key(), s); });
      staying.insert(p.value().unsafeGetTensorImpl());
    }
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
    for (const std::string& unit : units) precisions.push_back(precision.of(unit));
    for (const auto& b : module.named_buffers()) {
      if (!ignored(b.key()) && b.value().defined() && !is_sharded(b.value()))
        all.push_back({b.key(), b.value(), false});
    }
    if (!unused.empty())
      throw InvalidArgument(concat("fully_shard: no parameter or buffer has a name like ",
                                   list(unused), ", which is to be ignored"));
    if (!unmatched.empty())
      throw InvalidArgument(concat("fully_shard: no parameter has a name like ", list(unmatched),
                                   ", which is to stay"));
    precision.check_used();
    cut();
  }

  ParameterPlacement placement(const std::string& name) const {
    const auto at = rows_.find(name);
    std::vector<Placement> placements(mesh_.layout().dims());
    if (at != rows_.end()) {
      for (const int axis : axes) placements[axis] = Shard(0);
    }
    const bool stays = staying_.contains(name);
    if (at == rows_.end() || at->second.empty() || axes.empty())
      return {.placements = placements, .stays = stays};
    return {placements, {{0, at->second}}};
  }
  /// Gradients of equal numbers are reduced together.
  std::size_t message_of(const at::Tensor& parameter) const {
    const void* key = parameter.unsafeGetTensorImpl();
    const auto at = message_of_.find(key);
    return at == message_of_.end() ? flats.size() + unit_of.at(key) : at->second;
  }
  std::string describe() const {
    return concat(
        "units ", list(units), ", axes ", list(axes), ", reshard_after_forward ", reshard,
        ", reshard_axes ", list(kept_axes), ", prefetch ", options_.prefetch, ", coalesce_bytes ",
        options_.coalesce_bytes, ", bucket_bytes ", options_.reducer.bucket_bytes,
        ", first_bucket_bytes ", options_.reducer.first_bucket_bytes, ", learn_order ",
        options_.reducer.learn_order, ", overlap ", options_.reducer.overlap, ", precisions ",
        list(described_precisions()), ", offload ",
        device ? concat("from ", device->type()) : std::string("none"), "\n", described_further());
  }

  std::vector<NamedTensor> all;
  std::vector<Further> further;
  std::vector<int> axes;
  // Those over which units stay sharded after forward; empty: all.
  std::vector<int> kept_axes;
  bool reshard = true;
  // Shards lie in host memory, and units are gathered on this device.
  std::optional<c10::Device> device;
  std::vector<std::string> units;
  std::vector<UnitPrecision> precisions;
  std::vector<Flat> flats;
  std::unordered_map<const void*, std::size_t> unit_of;

 private:
  std::vector<std::string> described_precisions() const {
    std::vector<std::string> all;
    for (const UnitPrecision& p : precisions) all.push_back(described(p));
    return all;
  }
  std::string described_further() const {
    std::string text;
    for (const Further& f : further) text += concat(f.parameter.name, ": ", f.spec, "\n");
    return text;
  }
  bool lies_here(const at::Tensor& p) const {
    return detail::context_of(spec(p)) == detail::MeshContext::of(mesh_);
  }
  void check_further(const NamedTensor& p, const UnitPrecision& precision) const {
    const ShardSpec have = spec(p.tensor);
    bool fits = !have.has_partial();
    for (const int axis : axes) fits &= have.placements()[axis].is_replicate();
    if (!fits)
      throw ShardingError(concat("fully_shard: ", p.name, " is ", have,
                                 " already: over the axes that are to shard it, it must be "
                                 "replicated"));
    if (p.tensor.grad().defined() || p.tensor.grad_fn())
      throw ShardingError(concat("fully_shard: ", p.name,
                                 " has a gradient or a graph: call it before the first backward, "
                                 "or zero_grad() with set_to_none"));
    if (precision.reduce)
      throw InvalidArgument(concat("fully_shard: ", p.name,
                                   " is a ShardTensor, whose gradient is reduced as what made it "
                                   "one was told: no dtype to reduce in can be given"));
  }
  // The one whose slices are cheapest to gather of those that no axis shards.
  static int dim_to_cut(const at::Tensor& p) {
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
  // By name, in mesh order. `use`: "to shard over".
  std::vector<int> find(const std::vector<std::string>& names, std::string_view use) const {
    const Mesh& layout = mesh_.layout();
    const auto& known = layout.axes();
    std::vector<int> found;
    for (const std::string& name : names) {
      if (std::none_of(known.begin(), known.end(), [&](const Axis& a) { return a.name == name; }))
        throw InvalidArgument(concat("fully_shard: the mesh ", layout.to_string(), " has no axis '",
                                     name, "' ", use));
      found.push_back(layout.index(name));
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }
  void find_axes() {
    const Mesh& layout = mesh_.layout();
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
  void find_device() {
    if (!options_.offload.to_host) return;
    const DistributedManager& manager = mesh_.manager();
    device = options_.offload.device.value_or(manager.device());
    if (device->is_cpu())
      throw InvalidArgument(concat(
          "fully_shard: offload is from a device to host memory, and the device is the CPU (",
          options_.offload.device ? "as offload.device says" : "the manager's",
          "): give ManagerOptions::device or offload.device"));
    const Group ranks = mesh_.all();
    if (!c10::impl::hasDeviceGuardImpl(device->type()))
      throw NotAvailable(
          concat("fully_shard: offload from ", *device, ", of which this libtorch has none"));
    if (!device->has_index()) device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
    if (ranks.size() == 1) return;
    ranks.backend(device->type());  // throws where there is none
    if (const c10::Device own = manager.device(); own.type() == device->type() && own != *device)
      throw InvalidArgument(concat("fully_shard: offload from ", *device, ", but groups serve ",
                                   own, ", the manager's device, on this rank"));
  }
  void find_kept_axes() {
    kept_axes = find(options_.reshard_axes, "to stay sharded over after forward");
    if (!kept_axes.empty() && !options_.reshard_after_forward)
      throw InvalidArgument(
          "fully_shard: reshard_axes says over what units stay sharded after forward, and "
          "reshard_after_forward, which is false, that they do not: give one of the two");
    for (const int axis : kept_axes) {
      if (std::find(axes.begin(), axes.end(), axis) == axes.end())
        throw InvalidArgument(concat("fully_shard: '", mesh_.layout().axes()[axis].name,
                                     "' is among reshard_axes, and not among the axes that "
                                     "parameters are sharded over"));
    }
  }
  // One tensor under two names is one tensor.
  bool first_time(const at::Tensor& t) {
    return t.defined() && seen_.insert(t.unsafeGetTensorImpl()).second;
  }
  void keep(const NamedTensor& p) {
    if (p.tensor.dim() == 0 || p.tensor.numel() == 0 || is_sharded(p.tensor))
      throw InvalidArgument(concat("fully_shard: ", p.name, " of shape ", p.tensor.sizes(),
                                   " shall stay, and has no rows to shard, or is sharded already"));
    staying_.insert(p.name);
  }
  void add(const std::string& unit, const NamedTensor& p) {
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
    auto flat = std::find_if(flats.begin(), flats.end(), [&](const Flat& f) {
      const at::Tensor& like = f.parameters.front().tensor;
      return f.unit == at->second && like.scalar_type() == p.tensor.scalar_type() &&
             like.device() == p.tensor.device();
    });
    if (flat == flats.end()) flat = flats.insert(flats.end(), Flat{at->second, {}, {}});
    flat->parameters.push_back(p);
  }
  void cut() {
    int ranks = 1;
    for (const int axis : axes) ranks *= mesh_.layout().axes()[axis].size;
    // Nothing is gathered of one rank's parameters, unless they are to be copied to the device.
    if (ranks == 1 && !device) flats.clear();
    divide(ranks);
    for (Flat& flat : flats) {
      std::vector<detail::FlatRows> rows;
      for (const NamedTensor& p : flat.parameters) {
        const std::int64_t n = p.tensor.size(dim_to_cut(p.tensor));
        rows.push_back({n, p.tensor.numel() / n});
      }
      flat.plan = detail::plan_flat(rows, ranks);
      for (std::size_t i = 0; i < rows.size(); ++i)
        rows_.emplace(flat.parameters[i].name, flat.plan.rows[i]);
      cut_further(flat);
    }
  }
  // Of the global tensor.
  static std::int64_t bytes_of(const NamedTensor& p) {
    return static_cast<std::int64_t>(p.tensor.numel() * p.tensor.element_size());
  }
  // A flat buffer becomes up to four, of which no rank holds little: backward has the gradients of
  // one of them rather than of the unit, and sends sooner, evenly to all ranks. By the bytes of the
  // global tensors, from the last parameter, whose gradient comes first.
  void divide(int ranks) {
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
  // The ranks of the other axes cut alike, whatever they hold of a row.
  void cut_further(Flat& flat) {
    bool any = false;
    std::vector<std::int64_t> widths;
    for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
      const at::Tensor& p = flat.parameters[i].tensor;
      const int dim = dim_to_cut(p);
      widths.push_back(p.numel() / p.size(dim));
      const auto at = std::find_if(further.begin(), further.end(),
                                   [&](const Further& f) { return f.parameter.tensor.is_same(p); });
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

  const DeviceMesh& mesh_;
  const FullyShardOptions& options_;
  std::unordered_map<const void*, std::size_t> message_of_;
  std::unordered_set<const void*> seen_;
  std::map<std::string, std::size_t> unit_index_;
  // By name of a parameter that is sharded: rows of each rank, or none for even ones.
  std::map<std::string, Sizes> rows_;
  std::set<std::string> staying_;
};

FullyShardPlan agreed_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const FullyShardOptions& options) {
  std::optional<FullyShardPlan> plan;
  std::exception_ptr refused;
  std::string text;
  try {
    plan.emplace(module, mesh, options);
    text = plan->describe();
  } catch (const std::exception& e) {
    refused = std::current_exception();
    text = e.what();
  }
  if (const Group ranks = mesh.all(); ranks.size() > 1)
    agree::same(ranks, "the module to shard fully", text);
  if (refused) std::rethrow_exception(refused);
  return std::move(*plan);
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
    const auto known = std::find_if(further.begin(), further.end(), [&](const Further& f) {
      return f.parameter.tensor.is_same(parameter);
    });
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
        detail::as_parameter(detail::make_layout(to, strides, 0, parameter.scalar_type(), device),
                             sequence));
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
  detail::LayoutPtr layout =
      detail::make_layout(have.spec, have.strides, have.offset, have.dtype, device);
  if (have.parameter) layout = detail::as_parameter(layout, have.sequence);
  if (have.stays) layout = detail::as_staying(layout);
  at::Tensor local;
  {
    const detail::LocalCallGuard guard;
    local = entry.parameter ? detail::to_host(meta.local, pinned) : meta.local.to(device);
  }
  at::Tensor tensor = entry.tensor;
  tensor.set_data(detail::wrap_shown(std::move(local), std::move(layout), device));
}

struct AccumulatedInUnit final : detail::ChainedHook {
  explicit AccumulatedInUnit(const std::shared_ptr<GatherUnits>& u) : units(u) {}
  void accumulated(const at::Tensor&) override {
    if (const auto of = units.lock()) of->accumulated();
  }
  std::weak_ptr<GatherUnits> units;
};

template <class Call>
void of_units(const torch::nn::Module& module, std::string_view name, const Call& call) {
  // In the order of the parameters, which all ranks share.
  std::vector<std::pair<std::shared_ptr<GatherUnits>, std::size_t>> all;
  for (const at::Tensor& p : module.parameters()) {
    const auto [source, index] = source_of(p);
    const auto units = std::dynamic_pointer_cast<GatherUnits>(source);
    if (!units) continue;
    const std::pair unit(units, units->unit_of(index));
    if (std::find(all.begin(), all.end(), unit) == all.end()) all.push_back(unit);
  }
  if (all.empty())
    throw InvalidArgument(
        concat(name, ": no parameter of the module has been sharded by fully_shard()"));
  for (const auto& [units, unit] : all) call(*units, unit);
}

}  // namespace

void fully_shard(torch::nn::Module& module, const DeviceMesh& mesh,
                 const FullyShardOptions& options) {
  const FullyShardPlan plan = agreed_plan(module, mesh, options);
  const std::vector<NamedTensor> placed = detail::place(
      plan.all, mesh,
      [&](const std::string& name, const at::Tensor&) { return plan.placement(name); });
  const auto context = detail::MeshContext::of(mesh);
  const bool pinned = plan.device && plan.device->is_cuda() && options.offload.pin_memory;
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
  std::vector<detail::UnitParameter> reduced;
  const auto add = [&](const NamedTensor& entry) {
    const std::size_t unit = plan.unit_of.at(entry.tensor.unsafeGetTensorImpl());
    if (!source_of(entry.tensor).first)
      units->add_parameter(unit, GatherUnits::kNoBuffer, 0, keep_units(entry.tensor, units));
    if (entry.tensor.requires_grad())
      detail::add_hook_after(entry.tensor, std::make_unique<AccumulatedInUnit>(units));
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
