#include "tessera/nn/tensor_parallel.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/partition/partition.h"

namespace tessera {

namespace {

std::string described(const LayerSharding& s) {
  const std::string of = s.units > 0 ? concat(" of ", s.units, " units") : "";
  switch (s.kind) {
    case LayerSharding::Kind::column:
      return "column" + of;
    case LayerSharding::Kind::row:
      return "row" + of;
    case LayerSharding::Kind::vocabulary:
      return "vocabulary" + of;
    case LayerSharding::Kind::replicated:
      return "replicated";
    case LayerSharding::Kind::sharded:
      return concat("sharded along dim ", s.dim, of);
  }
  return "";
}

// Where the parameters of a module go, one after the other.
struct Planner {
  const int axis, axes, ranks;
  const std::optional<int> sequence_dim;

  ParameterPlacement whole() const { return {std::vector<Placement>(axes)}; }

  ParameterPlacement along(const std::string& name, const at::Tensor& t, int dim,
                           std::int64_t units) const {
    if (dim < 0 || dim >= t.dim())
      throw InvalidArgument("tensor_parallel: ", name, " of shape ", t.sizes(), " has no dim ", dim,
                            " to shard");
    const std::int64_t extent = t.size(dim), blocks = units > 0 ? units : extent;
    if (units < 0 || (blocks > 0 && extent % blocks != 0))
      throw InvalidArgument("tensor_parallel: the ", extent, " features of ", name, " (dim ", dim,
                            " of ", t.sizes(), ") do not divide into ", units,
                            " units of one size");
    Sizes sizes = Partition::even(blocks, ranks).sizes();
    for (std::int64_t& n : sizes) n *= blocks > 0 ? extent / blocks : 0;
    ParameterPlacement where = whole();
    where.placements[axis] = Shard(dim);
    where.sizes = {{dim, std::move(sizes)}};
    return where;
  }

  // `name` is that of the parameter, `own` its name within its layer.
  ParameterPlacement of_layer(const std::string& name, const std::string& own, const at::Tensor& t,
                              const LayerSharding& s) const {
    if (s.kind == LayerSharding::Kind::replicated) return whole();
    if (s.kind == LayerSharding::Kind::sharded)
      throw InvalidArgument(
          "tensor_parallel: sharded() names a parameter itself, and the "
          "pattern matches the layer of ",
          name);
    const bool weight = own == "weight" && t.dim() == 2, bias = own == "bias" && t.dim() == 1;
    if (!weight && !bias)
      throw InvalidArgument("tensor_parallel: ", described(s), " of a layer with ", name,
                            " of shape ", t.sizes(),
                            ": it knows layers of a weight [out, in] and a bias [out]; "
                            "name the parameter itself and say sharded(dim)");
    if (bias && s.kind == LayerSharding::Kind::row) return whole();
    ParameterPlacement where = along(name, t, s.kind == LayerSharding::Kind::row ? 1 : 0, s.units);
    // Without a dim of the data the weight is marked all the same: nothing gathers it on the axis.
    if (weight) where.sequence = {axis, sequence_dim.value_or(-1)};
    return where;
  }
};

std::int64_t elements_on(const TensorParallelPlan::Parameter& p, int axis, int rank) {
  std::int64_t n = 1;
  for (const std::int64_t extent : p.shape) n *= extent;
  for (std::size_t a = 0; a < p.placement.placements.size() && n > 0; ++a) {
    const Placement& where = p.placement.placements[a];
    if (!where.is_shard()) continue;
    const Sizes& sizes = p.placement.sizes.at(where.dim);
    n = n / p.shape[where.dim] *
        (static_cast<int>(a) == axis ? sizes[rank] : *std::ranges::max_element(sizes));
  }
  return n;
}

// Along the largest dim that is not sharded yet.
void shard_further(ParameterPlacement& where, const std::vector<std::int64_t>& shape, int axis,
                   int ranks) {
  int largest = -1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (where.sizes.contains(static_cast<int>(d))) continue;
    if (largest < 0 || shape[d] > shape[largest]) largest = static_cast<int>(d);
  }
  if (largest < 0) return;
  where.placements[axis] = Shard(largest);
  where.sizes[largest] = Partition::even(shape[largest], ranks).sizes();
}

// The first pattern that matches the parameter or its layer counts; a later one that does as well
// is not unused.
struct Patterns {
  explicit Patterns(const LayerShardings& given) : layers(given) {
    for (const auto& [pattern, sharding] : layers) unused.insert(pattern);
  }
  // The sharding, or null, and whether it names the parameter itself.
  std::pair<const LayerSharding*, bool> find(const std::string& layer, const std::string& name) {
    std::pair<const LayerSharding*, bool> found;
    for (const auto& [pattern, sharding] : layers) {
      const bool itself = detail::matches(name, pattern);
      if (!itself && !detail::matches(layer, pattern)) continue;
      unused.erase(pattern);
      if (!found.first) found = {&sharding, itself};
    }
    return found;
  }
  const LayerShardings& layers;
  std::set<std::string> unused;
};

// `again`: another name of the tensor of `p`. It is held once, and what either layer asks for
// holds.
void lie_in_one_way(TensorParallelPlan::Parameter& p, TensorParallelPlan::Parameter& again) {
  const auto way_of = [](const TensorParallelPlan::Parameter& one) {
    return one.how.empty() ? std::string("as no pattern of the plan says") : one.how;
  };
  if (p.placement.placements != again.placement.placements ||
      p.placement.sizes != again.placement.sizes)
    throw InvalidArgument("tensor_parallel: ", again.name, " and ", p.name,
                          " are one tensor, and lie in two ways: ", way_of(again), " and ",
                          way_of(p), ". Give both layers one sharding");
  std::ranges::fill(again.elements, 0);
  if (!again.placement.sequence) again.placement.sequence = p.placement.sequence;
  p.placement.sequence = again.placement.sequence;
}

}  // namespace

LayerSharding column(std::int64_t units) { return {LayerSharding::Kind::column, units}; }
LayerSharding row(std::int64_t units) { return {LayerSharding::Kind::row, units}; }
LayerSharding vocabulary() { return {LayerSharding::Kind::vocabulary}; }
LayerSharding replicated() { return {}; }
LayerSharding sharded(int dim, std::int64_t units) {
  return {LayerSharding::Kind::sharded, units, dim};
}

TensorParallelPlan::TensorParallelPlan(const torch::nn::Module& module, const DeviceMesh& mesh,
                                       const LayerShardings& layers,
                                       const TensorParallelOptions& options)
    : axes_(mesh.mesh().names()), sequence_dim_(options.sequence_dim) {
  const Mesh& layout = mesh.mesh();
  if (sequence_dim_ && *sequence_dim_ < 0)
    throw InvalidArgument("tensor_parallel: sequence_dim is ", *sequence_dim_,
                          "; count from the first dim of the data");
  const int axis = axis_ = layout.index(options.axis);
  const int further = options.sharded_axis.empty() ? -1 : layout.index(options.sharded_axis);
  if (further == axis)
    throw InvalidArgument("tensor_parallel: ", options.axis,
                          " is the axis of the plan and its sharded_axis: give two axes");
  const Planner planner{axis, layout.dims(), layout.size(axis), sequence_dim_};
  Patterns patterns(layers);
  // One tensor may be a parameter of two layers.
  std::unordered_map<const void*, std::size_t> known;
  std::vector<std::string> seen;
  const std::function<void(const std::string&, const torch::nn::Module&)> visit =
      [&](const std::string& layer, const torch::nn::Module& m) {
        const auto own_parameters = m.named_parameters(/*recurse=*/false);
        if (!own_parameters.is_empty()) seen.push_back(layer);
        for (const auto& item : own_parameters) {
          const at::Tensor& t = item.value();
          const std::string name = dotted(layer, item.key());
          const auto [sharding, itself] = patterns.find(layer, name);
          Parameter p{name, "", t.sizes().vec(), planner.whole(), {}};
          if (sharding) {
            p.placement = itself && sharding->kind == LayerSharding::Kind::sharded
                              ? planner.along(name, t, sharding->dim, sharding->units)
                              : planner.of_layer(name, item.key(), t, *sharding);
            p.how = described(*sharding);
          }
          if (further >= 0 && !p.placement.sizes.empty())
            shard_further(p.placement, p.shape, further, layout.size(further));
          for (int r = 0; r < planner.ranks; ++r) p.elements.push_back(elements_on(p, axis, r));
          const auto [at, fresh] = known.emplace(t.unsafeGetTensorImpl(), parameters_.size());
          if (!fresh) lie_in_one_way(parameters_[at->second], p);
          parameters_.push_back(std::move(p));
        }
        for (const auto& child : m.named_children())
          visit(dotted(layer, child.key()), *child.value());
      };
  visit("", module);
  if (!patterns.unused.empty())
    throw InvalidArgument(
        "tensor_parallel: no layer with parameters, and no parameter, has "
        "a name like ",
        list(patterns.unused), "; there are ", list(seen), " and their parameters");
}

ModuleRule TensorParallelPlan::rule() const {
  std::map<std::string, ParameterPlacement> by_name;
  for (const Parameter& p : parameters_) by_name.emplace(p.name, p.placement);
  return [by_name = std::move(by_name)](const std::string& name,
                                        const at::Tensor&) -> std::optional<ParameterPlacement> {
    const auto it = by_name.find(name);
    return it == by_name.end() ? std::nullopt : std::optional(it->second);
  };
}

std::string TensorParallelPlan::to_string() const {
  TextStream out;
  out << "tensor parallel over " << axes_[axis_];
  if (sequence_dim_) out << ", data sharded along dim " << *sequence_dim_ << " between layers";
  out << '\n';
  std::vector<std::int64_t> elements;
  std::int64_t others = 0;
  for (const Parameter& p : parameters_) {
    elements.resize(p.elements.size());
    for (std::size_t r = 0; r < p.elements.size(); ++r) elements[r] += p.elements[r];
    if (p.placement.sizes.empty()) {
      ++others;
      continue;
    }
    out << "  " << p.name << ' ' << list(p.shape) << ": " << (p.how.empty() ? "replicated" : p.how);
    for (std::size_t a = 0; a < axes_.size(); ++a) {
      const Placement& where = p.placement.placements[a];
      if (!where.is_shard()) continue;
      out << ", " << where << ' ' << list(p.placement.sizes.at(where.dim));
      if (static_cast<int>(a) != axis_) out << " over " << axes_[a];
    }
    out << '\n';
  }
  out << "  replicated: " << others << " parameters\n  elements on each rank: " << list(elements)
      << '\n';
  return std::move(out).str();
}

TensorParallelPlan tensor_parallel(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const LayerShardings& layers,
                                   const TensorParallelOptions& options) {
  std::optional<TensorParallelPlan> plan;
  detail::agree_on_plan(mesh, "the tensor-parallel plan",
                        [&] { return plan.emplace(module, mesh, layers, options).to_string(); });
  distribute_module(module, mesh, plan->rule(), options.reducer);
  return std::move(*plan);
}

}  // namespace tessera
