#include "tessera/nn/distribute_module.h"

#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <exception>
#include <set>
#include <string_view>
#include <unordered_map>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/gradient/internal/coalesced.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/detail/parameter_gradient.h"
#include "tessera/nn/detail/tape.h"
#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera {

bool detail::matches(std::string_view name, std::string_view pattern) {
  std::size_t n = 0, p = 0, star = std::string_view::npos, after = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++after;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

void detail::agree_on_plan(const DeviceMesh& mesh, const std::string& subject,
                           const std::function<std::string()>& plan) {
  std::exception_ptr refused;
  std::string text;
  try {
    text = plan();
  } catch (const std::exception& e) {
    refused = std::current_exception();
    text = e.what();
  }
  if (const Group ranks = mesh.all(); ranks.size() > 1) agree::same(ranks, subject, text);
  if (refused) std::rethrow_exception(refused);
}

namespace {

using detail::matches;

struct Target {
  NamedTensor entry;
  ShardSpec spec;
  SequenceSharding sequence;
  bool stays = false;
};

// Ranks that drew other initial values would train different models, and nobody would notice.
void broadcast_from_first(const std::vector<Target>& all, const DeviceMesh& mesh) {
  const Group ranks = mesh.all();
  if (ranks.size() == 1) return;
  std::vector<at::Tensor> state;
  for (const Target& to : all)
    if (!is_deferred(to.entry.tensor)) state.push_back(to.entry.tensor.detach());
  const at::NoGradGuard no_grad;
  broadcast_coalesced(state, ranks);
}

void require_rows(const Target& target) {
  if (!target.stays || !target.spec.has_shard()) return;
  for (const Placement& p : target.spec.placements()) {
    if (p.is_shard() && !p.is_shard(0))
      throw InvalidArgument("distribute_module: ", target.entry.name, " is ", target.spec,
                            ", and shall stay: shard its rows (dim 0) alone");
  }
  if (target.sequence)
    throw InvalidArgument("distribute_module: ", target.entry.name,
                          " shall stay, and is of a layer whose data are sharded along "
                          "their sequence: give one of the two");
}

void require_sequence(const Target& target) {
  const auto& [axis, dim] = target.sequence;
  if (axis < 0) return;
  // -1: of a tensor-parallel plan whose data are replicated over the axis between layers
  if (axis >= target.spec.mesh_dims() || dim < -1 || !target.spec.placements()[axis].is_shard())
    throw InvalidArgument("distribute_module: ", target.entry.name, " is ", target.spec,
                          ", and its data shall be sharded along dim ", dim, " over axis ", axis,
                          ": give an axis that shards it, and a dim from 0 on");
}

Target target_of(const NamedTensor& entry, const DeviceMesh& mesh, const ModuleRule& rule) {
  const auto given = rule ? rule(entry.name, entry.tensor) : std::nullopt;
  const ParameterPlacement where =
      given ? *given : ParameterPlacement{std::vector<Placement>(mesh.mesh().dims())};
  try {
    Target target{entry, ShardSpec(mesh, entry.tensor.sizes().vec(), where.placements, where.sizes),
                  where.sequence, where.stays};
    require_sequence(target);
    require_rows(target);
    if (!target.spec.has_partial()) return target;
  } catch (const InvalidArgument& e) {
    throw InvalidArgument("distribute_module: ", entry.name, ": ", e.what());
  }
  throw InvalidArgument("distribute_module: ", entry.name,
                        " cannot be partial: ", list(where.placements));
}

// Each tensor once.
std::vector<NamedTensor> collected(const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> all;
  std::unordered_map<const void*, std::string> impls, memory;
  for (const NamedTensor& entry : tensors) {
    const auto& [name, t, parameter] = entry;
    // one tensor under two names is one tensor
    if (!t.defined() || impls.contains(t.unsafeGetTensorImpl())) continue;
    if (is_sharded(t))
      throw ShardingError("distribute_module: ", name, " is a ShardTensor already: ", spec(t));
    if (!gradient_syncs({t}).empty())
      throw ShardingError("distribute_module: the gradient of ", name,
                          " is reduced already (DistributedDataParallel, GradientReducer, "
                          "attach_gradient_sync): distribute first, and wrap then");
    if (t.grad().defined() || t.grad_fn())
      throw ShardingError("distribute_module: ", name,
                          " has a gradient or a graph: call it before the first backward, "
                          "or zero_grad() with set_to_none");
    if (t.is_meta() && !is_deferred(t))
      throw ShardingError("distribute_module: ", name,
                          " is on the meta device and nothing says what its values are: "
                          "make the module in tessera::deferred(), or call tessera::defer()");
    if (const detail::Recorded* is = detail::recorded(t))
      detail::require_said("distribute_module", *is);
    if (t.numel() > 0) {
      const auto [at, fresh] = memory.emplace(t.storage().unsafeGetStorageImpl(), name);
      if (!fresh)
        throw ShardingError(
            "distribute_module: ", name, " and ", at->second,
            " are different tensors in the same memory: make them one tensor, or copies");
    }
    impls.emplace(t.unsafeGetTensorImpl(), name);
    all.push_back(entry);
  }
  return all;
}

// Where each tensor goes. What one rank refuses is refused on all, before anything has changed;
// `refused`: what this rank refuses already.
std::vector<Target> agreed_targets(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh,
                                   const ModuleRule& rule, const std::exception_ptr& refused) {
  std::vector<Target> targets;
  detail::agree_on_plan(mesh, "the module to distribute", [&] {
    std::string text;
    if (refused) std::rethrow_exception(refused);
    detail::require_no_scope("distribute_module");
    for (const NamedTensor& entry : collected(tensors)) {
      const Target& target = targets.emplace_back(target_of(entry, mesh, rule));
      text +=
          concat(entry.parameter ? "parameter '" : "buffer '", entry.name, "', ", target.spec, ", ",
                 entry.tensor.scalar_type(), entry.tensor.requires_grad() ? ", requires grad" : "");
      if (const auto& [axis, dim] = target.sequence; axis >= 0)
        text += dim < 0 ? concat(", computed in shards over axis ", axis)
                        : concat(", data sharded along dim ", dim, " over axis ", axis);
      if (target.stays) text += ", stays";
      if (const detail::Recorded* is = detail::recorded(entry.tensor))
        text += concat(", deferred ", is->tape->hash(is->value));
      text += "\n";
    }
    return text;
  });
  return targets;
}

void distribute_unless(const std::exception_ptr& refused, const std::vector<NamedTensor>& tensors,
                       const DeviceMesh& mesh, const ModuleRule& rule,
                       const ReducerOptions& options) {
  std::vector<detail::UnitParameter> reduced;
  for (const NamedTensor& entry : detail::place(tensors, mesh, rule, refused)) {
    if (entry.tensor.requires_grad()) reduced.push_back({entry.name, entry.tensor});
  }
  detail::reduce_parameters(reduced, mesh, options);
}

}  // namespace

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const ModuleRule& rule,
                       const ReducerOptions& options) {
  distribute_in_place(named_tensors(module), mesh, rule, options);
}

std::vector<NamedTensor> detail::place(const std::vector<NamedTensor>& tensors,
                                       const DeviceMesh& mesh, const ModuleRule& rule,
                                       const std::exception_ptr& refused) {
  // Whatever is refused is refused before anything is changed.
  const std::vector<Target> targets = agreed_targets(tensors, mesh, rule, refused);
  broadcast_from_first(targets, mesh);
  std::vector<at::Tensor> values;
  for (const auto& [entry, to, sequence, stays] : targets) {
    const at::NoGradGuard no_grad;
    const Recorded* deferred = recorded(entry.tensor);
    at::Tensor& sharded = values.emplace_back(
        deferred ? deferred->tape->placed(deferred->value, to, mesh.manager().device())
                 : distribute_tensor(entry.tensor.detach(), to));
    if (!deferred && spec(sharded).has_shard())
      sharded = sharded.clone();  // a slice would keep the full tensor alive
    if (spec(sharded).has_shard() && entry.parameter) {
      const ShardMeta& meta = *meta_of(sharded);
      const ParameterMarks marks = stays ? ParameterMarks{.stays = true}
                                         : ParameterMarks{.parameter = true, .sequence = sequence};
      install(sharded, meta.local, marked(meta.layout, marks));
    }
  }
  std::vector<NamedTensor> placed;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const NamedTensor& entry = placed.emplace_back(targets[i].entry);
    if (is_deferred(entry.tensor))
      fill_in(entry.tensor, values[i]);
    else
      entry.tensor.set_data(values[i]);
  }
  return placed;
}

void distribute_in_place(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh,
                         const ModuleRule& rule, const ReducerOptions& options) {
  distribute_unless(nullptr, tensors, mesh, rule, options);
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                       const NamedPlacements& patterns, const ReducerOptions& options) {
  const std::vector<NamedTensor> all = named_tensors(module);
  std::set<std::string> unused;
  for (const auto& [pattern, placement] : patterns) unused.insert(pattern);
  for (const NamedTensor& entry : all)
    std::erase_if(unused, [&](const std::string& pattern) { return matches(entry.name, pattern); });
  std::exception_ptr refused;
  if (!unused.empty())
    refused = std::make_exception_ptr(InvalidArgument(
        concat("distribute_module: no parameter or buffer has a name like ", list(unused),
               "; names are as in named_parameters() and named_buffers()")));
  distribute_unless(
      refused, all, mesh,
      [&](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
        for (const auto& [pattern, placement] : patterns) {
          if (matches(name, pattern)) return placement;
        }
        return std::nullopt;
      },
      options);
}

NoSync no_sync(const torch::nn::Module& module) { return NoSync(module.parameters()); }

void reduce_gradients(const torch::nn::Module& module) { reduce_gradients(module.parameters()); }

at::Tensor copy_parameter(const at::Tensor& parameter) {
  spec(parameter);  // throws for a plain one
  const at::NoGradGuard no_grad;
  at::Tensor copy = parameter.detach().clone();
  const detail::ShardMeta& meta = *detail::meta_of(copy);
  detail::install(copy, meta.local,
                  detail::marked(meta.layout, detail::meta_of(parameter)->layout->marks()));
  return copy.requires_grad_(parameter.requires_grad());
}

void reduce_copies(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const ReducerOptions& options) {
  std::vector<std::pair<DeviceMesh, std::vector<detail::UnitParameter>>> by_mesh;
  for (const auto& [name, parameter] : parameters) {
    const DeviceMesh mesh = spec(parameter).mesh();
    auto at = std::ranges::find_if(by_mesh, [&](const auto& of) { return of.first == mesh; });
    if (at == by_mesh.end()) at = by_mesh.insert(at, {mesh, {}});
    at->second.push_back({name, parameter});
  }
  for (const auto& [mesh, of] : by_mesh) detail::reduce_parameters(of, mesh, options);
}

void distribute_module(torch::jit::Module& module, const DeviceMesh& mesh, const ModuleRule& rule,
                       const ReducerOptions& options) {
  std::vector<NamedTensor> all;
  for (const auto& p : module.named_parameters(/*recurse=*/true))
    all.push_back({p.name, p.value, true});
  for (const auto& b : module.named_buffers(/*recurse=*/true))
    all.push_back({b.name, b.value, false});
  distribute_in_place(all, mesh, rule, options);
}

}  // namespace tessera
