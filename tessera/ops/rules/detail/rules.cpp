#include "tessera/ops/rules/detail/rules.h"

#include <ATen/core/function_schema.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <map>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {
namespace {

// What one mesh axis does: how it may be used in a plan.
struct Choice {
  enum class Kind : unsigned char { label, partial, replicate } kind = Kind::replicate;
  int label = kUnsharded;
  int input = -1;  // of the partial input; -1: all
  ReduceOp::Kind op = ReduceOp::Kind::sum;
};

bool has(const std::vector<int>& labels_or_axes, int one) {
  return std::ranges::find(labels_or_axes, one) != labels_or_axes.end();
}
int dim_of(const Labels& labels, int label) {
  return static_cast<int>(std::ranges::find(labels, label) - labels.begin());
}

// True if some output lacks the label and so becomes partial.
bool leaves_partial(const LabelProblem& p, int label) {
  return std::ranges::any_of(p.outputs, [&](const Labels& out) { return !has(out, label); });
}

Placement required(const LabelProblem& p, const Choice& choice, int input) {
  if (choice.kind == Choice::Kind::replicate) return Replicate();
  const bool added = p.additive.contains(input);
  if (choice.kind == Choice::Kind::partial)
    return choice.input < 0 || choice.input == input || added ? Partial(choice.op) : Replicate();
  if (has(p.inputs[input], choice.label)) return Shard(dim_of(p.inputs[input], choice.label));
  return added && leaves_partial(p, choice.label) ? Partial(p.reduce) : Replicate();
}

Placement placed(const LabelProblem& p, const Choice& choice, std::size_t output) {
  if (choice.kind == Choice::Kind::replicate) return Replicate();
  if (choice.kind == Choice::Kind::partial) return Partial(choice.op);
  const Labels& labels = p.outputs[output];
  return has(labels, choice.label) ? Shard(dim_of(labels, choice.label)) : Partial(p.reduce);
}

double cost(const Placement& from, const Placement& to, double numel, int ranks) {
  if (from == to || from.is_replicate()) return 0;
  const double rest = (ranks - 1.0) / ranks;
  if (from.is_partial()) return numel * rest * (to.is_shard() ? 1 : 2);
  return to.is_shard() ? numel * rest / ranks : numel * rest;
}

// Parameters are gathered rather than moving data, unless the operator can work on their shards.
constexpr double kGatherParameter = 1e-4;

std::vector<Choice> choices(const LabelProblem& p, int axis) {
  std::vector<Choice> all;
  const auto& tensors = p.call.tensors();
  std::set<int> seen;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Placement placement = tensors[i].spec.placements()[axis];
    if (placement.is_shard()) {
      const int label = p.inputs[i][placement.dim];
      if (label == kUnsharded || !seen.insert(label).second) continue;
      if (leaves_partial(p, label) && !p.contract.contains(label)) continue;
      all.push_back({Choice::Kind::label, label, -1, p.reduce});
    } else if (placement.is_partial(ReduceOp::Kind::sum) ||
               placement.is_partial(ReduceOp::Kind::avg)) {
      if (p.linear_together) all.push_back({Choice::Kind::partial, kUnsharded, -1, placement.op});
      if (p.linear_in.contains(static_cast<int>(i)))
        all.push_back({Choice::Kind::partial, kUnsharded, static_cast<int>(i), placement.op});
    }
  }
  all.push_back({});
  return all;
}

// Null: not a parameter, or one of a list.
const Layout* layout_of_parameter(const LabelProblem& p, const TensorInfo& t) {
  if (!t.parameter || t.element >= 0) return nullptr;
  const c10::IValue& v = p.call.arguments()[t.argument];
  const ShardMeta* meta = v.isTensor() ? meta_of(v.toTensor()) : nullptr;
  return meta ? meta->layout.get() : nullptr;
}

// Whether the shards of a parameter over this axis are computed with: of a layer that a
// tensor-parallel plan has sharded over it, or one of which fully_shard gathers others.
bool computed_in_shards(const LabelProblem& p, const TensorInfo& t, int axis) {
  const Layout* layout = layout_of_parameter(p, t);
  return layout &&
         (layout->sequence.axis == axis || (layout->unit_axes && !has(*layout->unit_axes, axis)));
}

// Whether the parameter's unit is gathered over this axis.
bool in_unit(const LabelProblem& p, const TensorInfo& t, int axis) {
  const Layout* layout = layout_of_parameter(p, t);
  return layout && layout->unit_axes && has(*layout->unit_axes, axis);
}

// Whether a choice would compute with shards of a parameter whose unit is gathered over this axis,
// though no data are sharded like them: what comes of it would move instead of the parameter.
// Arithmetic among tensors of the parameter's own dims (an optimizer's) takes the shards.
bool leaves_unit(const LabelProblem& p, const Choice& c, int axis) {
  if (c.kind != Choice::Kind::label) return false;
  const auto& tensors = p.call.tensors();
  std::optional<std::size_t> of_unit;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Placement to = required(p, c, static_cast<int>(i));
    const bool cut = to.is_shard() && tensors[i].spec.placements()[axis] == to;
    if (cut && in_unit(p, tensors[i], axis))
      of_unit = of_unit && p.inputs[*of_unit].size() >= p.inputs[i].size() ? of_unit : i;
    else if (cut && !tensors[i].parameter)
      return false;
    if (tensors[i].written) return false;
  }
  for (std::size_t i = 0; of_unit && i < tensors.size(); ++i)
    if (!tensors[i].parameter && tensors[i].spec.numel() != 1 && p.inputs[i] != p.inputs[*of_unit])
      return true;
  return false;
}

// Whether a parameter would be gathered over this axis so that another input can stay a summand:
// that is reduced instead, which is due and holds for all its uses, if it moves less or the
// parameter is computed with in shards.
bool gathers_for_summand(const LabelProblem& p, const Choice& c, std::size_t i, int axis,
                         double gather, int ranks) {
  const TensorInfo& t = p.call.tensors()[i];
  if (c.kind != Choice::Kind::partial || !t.parameter || gather == 0 || in_unit(p, t, axis))
    return false;
  if (computed_in_shards(p, t, axis)) return true;
  if (c.input < 0) return false;
  const TensorInfo& summand = p.call.tensors()[c.input];
  return gather >= cost(summand.spec.placements()[axis], Shard(0),
                        static_cast<double>(summand.spec.numel()), ranks);
}

Choice best(const LabelProblem& p, int axis, int ranks) {
  const auto& tensors = p.call.tensors();
  Choice chosen;
  double least = std::numeric_limits<double>::infinity();
  for (const Choice& c : choices(p, axis)) {
    if (leaves_unit(p, c, axis)) continue;
    double moved = 0;
    bool possible = true;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Placement from = tensors[i].spec.placements()[axis],
                      to = required(p, c, static_cast<int>(i));
      if (tensors[i].written && !(from == to) && !(from.is_partial() && to.is_replicate()))
        // a partial target can be reduced first
        possible = false;
      // the result must have the target's placement
      if (i == 0 && p.call.in_place() && !p.outputs.empty() && !(placed(p, c, 0) == to))
        possible = false;
      const double gather = cost(from, to, static_cast<double>(tensors[i].spec.numel()), ranks);
      if (from.is_shard() && to.is_replicate() && gathers_for_summand(p, c, i, axis, gather, ranks))
        possible = false;
      moved += tensors[i].parameter ? std::min(gather, kGatherParameter) : gather;
    }
    if (!possible) continue;
    // Among equal costs: sharded before partial before replicated.
    if (c.kind == Choice::Kind::partial ||
        (c.kind == Choice::Kind::label && leaves_partial(p, c.label)))
      moved += 1e-6;
    if (c.kind == Choice::Kind::replicate) moved += 2e-6;
    if (moved < least) {
      least = moved;
      chosen = c;
    }
  }
  if (least == std::numeric_limits<double>::infinity()) {
    std::string text;
    for (const TensorInfo& t : tensors)
      text += concat(text.empty() ? "" : "; ", p.call.schema().arguments()[t.argument].name(), " ",
                     t.spec);
    throw ShardingError(
        p.call.name(), " cannot write its result in place with inputs ", text,
        ". Redistribute the target first, or use the form that returns a new tensor.");
  }
  return chosen;
}

void check_inputs(const LabelProblem& p) {
  const auto& tensors = p.call.tensors();
  if (p.inputs.size() != tensors.size())
    throw ShardingError("the rule of ", p.call.name(), " describes ", p.inputs.size(),
                        " inputs of ", tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (static_cast<int>(p.inputs[i].size()) != tensors[i].spec.dims())
      throw InvalidArgument(
          p.call.name(), ": ", p.call.schema().arguments()[tensors[i].argument].name(),
          " of shape ", list(tensors[i].spec.shape()), " has ", tensors[i].spec.dims(),
          " dims, and needs ", p.inputs[i].size(), " with the other arguments as they are");
}

/// The partition of each label: that of the tensor that is written to, else of the largest input
/// that is sharded over the same axes.
std::map<int, DimSharding> partitions(const LabelProblem& p,
                                      const std::map<int, std::vector<int>>& axes_of) {
  const auto& tensors = p.call.tensors();
  std::map<int, DimSharding> parts;
  for (const auto& [label, of] : axes_of) {
    double largest = -1;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!has(p.inputs[i], label)) continue;
      const DimSharding& d = tensors[i].spec.dim(dim_of(p.inputs[i], label));
      const double weight = tensors[i].written ? std::numeric_limits<double>::infinity()
                                               : static_cast<double>(tensors[i].spec.numel());
      if (d.axes == of && weight > largest) {
        largest = weight;
        parts[label] = d;
      }
    }
  }
  return parts;
}

}  // namespace

Plan solve(const LabelProblem& p) {
  const auto& tensors = p.call.tensors();
  check_inputs(p);
  const auto& context = context_of(tensors[0].spec);
  const int axes = tensors[0].spec.mesh_dims();
  std::vector<Choice> chosen;
  std::map<int, std::vector<int>> axes_of;  // label -> axes
  for (int axis = 0; axis < axes; ++axis) {
    chosen.push_back(best(p, axis, context->sizes[axis]));
    if (chosen.back().kind == Choice::Kind::label) axes_of[chosen.back().label].push_back(axis);
  }
  const auto parts = partitions(p, axes_of);
  const auto spec_of = [&](const Labels& labels, const std::vector<std::int64_t>& shape,
                           std::vector<Placement> placements) {
    if (labels.size() != shape.size())
      throw RuleError("the rule of ", p.call.name(), " gives ", labels.size(),
                      " labels to a result of shape ", list(shape));
    std::vector<const DimSharding*> dims(labels.size(), nullptr);
    for (std::size_t d = 0; d < labels.size(); ++d) {
      const auto it = parts.find(labels[d]);
      if (it != parts.end()) dims[d] = &it->second;
    }
    return make_spec(context, shape, std::move(placements), dims);
  };
  Plan plan;
  plan.linear = std::ranges::any_of(
      chosen, [](const Choice& c) { return c.kind == Choice::Kind::partial && c.input >= 0; });
  for (std::size_t i = 0; i < tensors.size(); ++i)
    plan.inputs.push_back(spec_of(
        p.inputs[i], tensors[i].spec.shape(),
        mapped(chosen, [&](const Choice& c) { return required(p, c, static_cast<int>(i)); })));
  const auto* inferred = p.output_shapes.empty() ? p.call.outputs() : nullptr;
  if (p.output_shapes.empty() && !inferred && !p.call.in_place())
    throw ShardingError("the rule of ", p.call.name(), " does not know the shape of its result");
  // Of a target that is written in place no shape is given: it has its spec.
  const std::size_t given = inferred ? inferred->size() : p.output_shapes.size();
  for (std::size_t o = 0; o < std::min(given, p.outputs.size()); ++o) {
    if (inferred && !(*inferred)[o].defined) {
      plan.outputs.push_back({});
      continue;
    }
    const Shape& shape = inferred ? (*inferred)[o].shape : p.output_shapes[o];
    plan.outputs.push_back({spec_of(
        p.outputs[o], shape, mapped(chosen, [&](const Choice& c) { return placed(p, c, o); }))});
  }
  return plan;
}

Labels all_labels(std::int64_t n) {
  return numbers_below(static_cast<int>(std::max<std::int64_t>(n, 0)));
}

int normal_dim(std::int64_t dim, std::int64_t dims) {
  const std::int64_t n = std::max<std::int64_t>(dims, 1);
  if (dim < -n || dim >= n) throw InvalidArgument("dim ", dim, " of a tensor of ", dims, " dims");
  return static_cast<int>(dim < 0 ? dim + n : dim);
}

Labels first_dims_free(int n, int free) {
  Labels labels = all_labels(n);
  for (int d = std::max(free, 0); d < n; ++d) labels[d] = kUnsharded;
  return labels;
}
Labels last_dims_unsharded(int n, int whole) { return first_dims_free(n, n - whole); }
Labels unsharded_labels(const TensorInfo& tensor) { return Labels(tensor.spec.dims(), kUnsharded); }

void label_arguments(LabelProblem& problem,
                     const std::vector<std::pair<const char*, Labels>>& labels) {
  for (const TensorInfo& t : problem.call.tensors()) {
    Labels own = unsharded_labels(t);
    for (const auto& [name, given] : labels)
      if (problem.call.find(name) == &t && static_cast<int>(given.size()) == t.spec.dims())
        own = given;
    problem.inputs.push_back(std::move(own));
  }
}

bool summands_keep_type(const OpCall& call, const TensorInfo& t) {
  const auto* out = call.outputs();
  const auto from = t.dtype, to = out && !out->empty() ? (*out)[0].dtype : call.tensor(0).dtype;
  if (from == at::kBool) return false;
  const auto whole_number = [](at::ScalarType t) { return at::isIntegralType(t, true); };
  return from == to || from == at::kLong || (!whole_number(from) && !whole_number(to));
}

bool all_summands_keep_type(const OpCall& call) {
  return std::ranges::all_of(call.tensors(),
                             [&](const TensorInfo& t) { return summands_keep_type(call, t); });
}

std::set<int> first_dims(int n) {
  const Labels dims = all_labels(n);
  return {dims.begin(), dims.end()};
}

std::vector<at::Tensor> coordinates(at::Tensor positions, const Shape& sizes) {
  std::vector<at::Tensor> all(sizes.size());
  for (std::size_t d = sizes.size(); d-- > 0;) {
    all[d] = d > 0 ? positions.remainder(sizes[d]) : positions;
    if (d > 0) positions = positions.div(sizes[d], "floor");
  }
  return all;
}

Plan per_sample(const OpCall& call) {
  const auto* outputs = call.outputs();
  if (!outputs) return on_gathered(call);
  const std::int64_t count = call.tensor(0).spec.dims() > 0 ? call.tensor(0).spec.shape()[0] : 0;
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    p.inputs.push_back(first_dims_free(t.spec.dims(), 1));
    if (t.spec.dims() == 0 || t.spec.shape()[0] != count) return on_gathered(call);
  }
  for (const OutputInfo& out : *outputs) {
    if (out.defined && (out.shape.empty() || out.shape[0] != count)) return on_gathered(call);
    p.outputs.push_back(first_dims_free(static_cast<int>(out.shape.size()), 1));
  }
  return solve(p);
}

Plan on_gathered(const OpCall&) { return {.gathered = true}; }

ShardSpec mapped_spec(const ShardSpec& like, const std::vector<std::int64_t>& shape,
                      const std::vector<int>& from, bool partial,
                      const std::vector<std::pair<int, Partition>>& parts) {
  std::vector<Placement> placements;
  for (const Placement& p : like.placements())
    placements.push_back(p.is_partial() && partial ? p : Replicate());
  std::vector<DimSharding> dims(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (from[d] < 0 || !like.is_sharded(from[d])) continue;
    dims[d] = like.dim(from[d]);
    for (const int axis : dims[d].axes) placements[axis] = Shard(static_cast<int>(d));
    for (const auto& [dim, partition] : parts)
      if (dim == static_cast<int>(d)) dims[d].partition = partition;
  }
  return make_spec(context_of(like), shape, std::move(placements), std::move(dims));
}

ShardSpec with_unsharded_dims(const ShardSpec& spec, const std::set<int>& dims) {
  auto placements = spec.placements();
  for (Placement& p : placements)
    if (p.is_shard() && dims.contains(p.dim)) p = Replicate();
  return spec.with_placements(placements);
}

void register_rules(std::initializer_list<const char*> ops, const Rule& rule,
                    const RuleOptions& options) {
  for (const char* op : ops) register_rule(op, rule, options);
}

// ---- empty shards ----

namespace {

bool empty_here(const OpCall& call, const Plan& plan) {
  for (std::size_t i = 0; i < call.tensors().size(); ++i) {
    const ShardSpec& spec =
        i < plan.inputs.size() && plan.inputs[i] ? *plan.inputs[i] : call.tensor(i).spec;
    if (spec.local_numel() == 0 && spec.numel() > 0) return true;
  }
  return false;
}

}  // namespace

Rule guarded(Rule rule) {
  return [rule = std::move(rule)](const OpCall& call) {
    Plan plan = rule(call);
    if (plan.gathered || call.in_place() || !empty_here(call, plan)) return plan;
    struct Made {
      Shape shape;
      std::optional<at::ScalarType> dtype;
    };
    std::vector<std::optional<Made>> made(plan.outputs.size());  // nullopt: undefined
    const auto* known = call.outputs();
    for (std::size_t o = 0; o < made.size(); ++o) {
      const ShardSpec& spec = plan.outputs[o].spec;
      if (!spec) continue;
      // the rank has a value here: the kernel must compute it
      if (spec.local_numel() > 0 && !spec.has_partial()) return plan;
      made[o] = Made{spec.local_shape(), std::nullopt};
      if (known && o < known->size()) made[o]->dtype = (*known)[o].dtype;
    }
    plan.local = [made](const OperatorHandle&, const Stack& arguments) {
      const auto tensor = std::ranges::find_if(
          arguments, [](const c10::IValue& v) { return v.isTensor() && v.toTensor().defined(); });
      const at::TensorOptions options =
          tensor == arguments.end() ? at::TensorOptions() : tensor->toTensor().options();
      Stack results;
      for (const auto& m : made)
        results.emplace_back(m ? at::zeros(m->shape, m->dtype ? options.dtype(m->dtype) : options)
                               : at::Tensor());
      return results;
    };
    return plan;
  };
}

LocalFunction zeros_of(const Plan& plan, at::ScalarType (*of_others)(const Stack&)) {
  const auto shapes = mapped(plan.outputs, [](const auto& out) { return out.spec.local_shape(); });
  return [shapes, of_others](const OperatorHandle&, Stack a) {
    const at::TensorOptions first = a[0].toTensor().options();
    Stack results;
    for (const Shape& shape : shapes)
      results.emplace_back(at::zeros(shape, results.empty() ? first : first.dtype(of_others(a))));
    return results;
  };
}

// ---- decompositions ----

at::Tensor zeros_along(const at::Tensor& like, std::int64_t dim, c10::SymIntArrayRef sizes) {
  const at::Tensor slice =
      like.size(dim) == 0 ? like.new_zeros({}).reshape(std::vector<std::int64_t>(like.dim(), 1))
                          : like.narrow(dim, 0, 1);
  return at::zeros_like(slice.expand_symint(sizes));
}

torch::Library& decompositions_above_autograd() {
  static torch::Library library(torch::Library::IMPL, "aten", kShardAutogradKey, __FILE__,
                                __LINE__);
  return library;
}

torch::Library& decompositions_below_autograd() {
  static torch::Library library(torch::Library::IMPL, "aten", kShardKey, __FILE__, __LINE__);
  return library;
}

}  // namespace tessera::detail
