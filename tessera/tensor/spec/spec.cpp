#include "tessera/tensor/spec/spec.h"

#include <algorithm>

#include "tessera/base/hash.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/detail/redistribution_plan.h"
#include "tessera/tensor/spec/detail/shard_dims.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera {

std::string to_string(const Placement& p) {
  switch (p.kind) {
    case Placement::Kind::replicate:
      return "Replicate";
    case Placement::Kind::shard:
      return concat("Shard(", p.dim, ")");
    case Placement::Kind::partial:
      return concat("Partial(", to_string(p.op), ")");
  }
  return "unknown";
}

std::ostream& operator<<(std::ostream& out, const Placement& p) { return out << to_string(p); }
std::ostream& operator<<(std::ostream& out, const ShardSpec& spec) {
  return out << spec.to_string();
}

namespace detail {
namespace {

// The contexts of this process, by manager and layout; and the ranks' states, which outlive the
// meshes of their manager. Process-wide, because a DeviceMesh is a value that many callers make
// anew, and all of them must find the same interned specs.
struct Contexts {
  std::mutex mutex;
  std::vector<std::weak_ptr<MeshContext>> contexts;
  std::vector<std::pair<std::weak_ptr<ManagerState>, std::shared_ptr<RankState>>> states;
};

Contexts& contexts() {
  static Contexts all;
  return all;
}

std::shared_ptr<RankState> state_locked(Contexts& all, const DistributedManager& manager) {
  std::erase_if(all.states, [](const auto& entry) { return entry.first.expired(); });
  for (const auto& [owner, state] : all.states)
    if (owner.lock() == manager.state()) return state;
  all.states.emplace_back(manager.state(), std::make_shared<RankState>());
  return all.states.back().second;
}

std::int64_t number_of_elements(const std::vector<std::int64_t>& shape) {
  std::int64_t all = std::ranges::find(shape, 0) == shape.end() ? 1 : 0;
  for (const std::int64_t n : shape)
    if (all != 0 && __builtin_mul_overflow(all, n, &all))
      throw InvalidArgument("a tensor of shape ", list(shape),
                            " has more elements than can be counted");
  return all;
}

std::vector<int> own_coordinate(const DeviceMesh& mesh) {
  if (!mesh.contains_me()) {
    throw InvalidArgument("rank ", mesh.manager().rank(), " is not in the mesh of ranks ",
                          list(mesh.mesh().ranks()), ": only ranks of a mesh can hold its tensors");
  }
  return mesh.coordinate();
}

// Makes negative dims of `placements` non-negative. Throws InvalidArgument unless there is one
// placement per axis, and for one that a tensor of this shape cannot have.
void normalize(const Mesh& mesh, const std::vector<std::int64_t>& shape,
               std::vector<Placement>& placements) {
  const int rank_dims = static_cast<int>(shape.size());
  require_one_per_axis(mesh, placements);
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    Placement& p = placements[axis];
    if (p.is_partial() && p.op == ReduceOp::Kind::premultiplied)
      throw InvalidArgument(
          "Partial(premultiplied) has no meaning: use sum, avg, product, min or max");
    if (!p.is_shard()) continue;
    const int d = p.dim < 0 ? p.dim + rank_dims : p.dim;
    if (d < 0 || d >= rank_dims) {
      const auto allowed = rank_dims == 0
                               ? std::string("it has no dims: give Replicate() or Partial()")
                               : concat("give Shard(0) to Shard(", rank_dims - 1,
                                        "), or Shard(-1) for the last dim");
      throw InvalidArgument(p, " on axis '", mesh.axes()[axis].name,
                            "' asks for a dim that a tensor of shape ", list(shape),
                            " does not have; ", allowed);
    }
    p.dim = d;
  }
}

}  // namespace

std::vector<int> axis_sizes(const Mesh& mesh) { return mapped(mesh.axes(), &Axis::size); }

MeshContext::MeshContext(const DeviceMesh& m)
    : mesh(m),
      sizes(axis_sizes(m.mesh())),
      coordinate(own_coordinate(m)),
      redistributions(std::make_shared<RedistributionPlans>()) {
  for (std::size_t i = 0; i < sizes.size(); ++i) position = position * sizes[i] + coordinate[i];
}

std::shared_ptr<MeshContext> MeshContext::of(const DeviceMesh& mesh) {
  Contexts& all = contexts();
  const std::lock_guard lock(all.mutex);
  std::shared_ptr<MeshContext> found;
  std::erase_if(all.contexts, [&](const auto& weak) {
    const auto context = weak.lock();
    if (context && context->mesh.manager().state() == mesh.manager().state() &&
        context->mesh.mesh() == mesh.mesh())
      found = context;
    return !context;
  });
  if (found) return found;
  found = std::make_shared<MeshContext>(mesh);
  found->state = state_locked(all, mesh.manager());
  all.contexts.push_back(found);
  return found;
}

std::shared_ptr<RankState> rank_state(const DistributedManager& manager) {
  Contexts& all = contexts();
  const std::lock_guard lock(all.mutex);
  return state_locked(all, manager);
}

ShardSpec make_spec(const std::shared_ptr<MeshContext>& context, std::vector<std::int64_t> shape,
                    std::vector<Placement> placements, std::vector<DimSharding> dims) {
  Hash hash;
  for (const auto n : shape) hash.number(n);
  for (const Placement& p : placements) {
    hash.number(static_cast<std::uint64_t>(p.kind) | (p.is_shard() ? p.dim << 8 : 0) |
                (p.is_partial() ? static_cast<std::uint64_t>(p.op) << 40 : 0));
  }
  for (const DimSharding& d : dims) {
    if (d.axes.empty()) continue;
    for (int i = 0; i < d.partition.parts(); ++i) hash.number(d.partition.size(i));
  }
  auto data = std::make_shared<SpecData>(
      SpecData{context,
               std::move(placements),
               Sharding(std::move(shape), context->sizes, std::move(dims)),
               {},
               {}});
  for (const Interval& i : data->sharding.box(context->position)) {
    data->local_shape.push_back(i.size());
    data->local_offset.push_back(i.begin);
  }
  data->local_numel = number_of_elements(data->local_shape);
  data->numel = number_of_elements(data->sharding.shape());
  for (const Placement& p : data->placements) {
    data->replicated &= p.is_replicate();
    data->partial |= p.is_partial();
    data->shard |= p.is_shard();
  }
  data->hash = hash.value();
  return ShardSpec(context->specs.intern(hash.value(), std::move(data)));
}

ShardSpec make_spec(const std::shared_ptr<MeshContext>& context, std::vector<std::int64_t> shape,
                    std::vector<Placement> placements,
                    const std::vector<const DimSharding*>& parts) {
  std::vector<DimSharding> dims(shape.size());
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (placements[axis].is_shard())
      dims[placements[axis].dim].axes.push_back(static_cast<int>(axis));
  for (std::size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].axes.empty()) continue;
    int n = 1;
    for (const int axis : dims[d].axes) n *= context->sizes[axis];
    const DimSharding* given = d < parts.size() ? parts[d] : nullptr;
    const bool fits = given && given->axes == dims[d].axes && given->partition.parts() == n &&
                      given->partition.extent() == shape[d];
    dims[d].partition = fits ? given->partition : Partition::even(shape[d], n);
  }
  return make_spec(context, std::move(shape), std::move(placements), std::move(dims));
}

}  // namespace detail

void detail::require_one_per_axis(const Mesh& mesh, const std::vector<Placement>& placements) {
  if (placements.size() != mesh.axes().size())
    throw InvalidArgument(counted(placements.size(), "placement"), ' ', list(placements),
                          " for a mesh of ", counted(mesh.axes().size(), "axis", "axes"),
                          ": give one per axis");
}

std::vector<DimSharding> detail::shard_dims(const Mesh& mesh,
                                            const std::vector<std::int64_t>& shape,
                                            std::vector<Placement>& normal,
                                            const ShardSizes& sizes) {
  const int rank_dims = static_cast<int>(shape.size());
  normalize(mesh, shape, normal);
  std::vector<DimSharding> dims(shape.size());
  for (std::size_t axis = 0; axis < normal.size(); ++axis)
    if (normal[axis].is_shard()) dims[normal[axis].dim].axes.push_back(static_cast<int>(axis));
  std::map<int, const Sizes*> given;
  for (const auto& [dim, list_of_sizes] : sizes) {
    const int d = dim < 0 ? dim + rank_dims : dim;
    if (d < 0 || d >= rank_dims || dims[d].axes.empty())
      throw InvalidArgument("sizes are given for dim ", dim,
                            ", which no axis shards: ", list(normal));
    given[d] = &list_of_sizes;
  }
  for (int d = 0; d < rank_dims; ++d) {
    if (dims[d].axes.empty()) continue;
    int parts = 1;
    for (const int axis : dims[d].axes) parts *= mesh.size(axis);
    const auto it = given.find(d);
    if (it == given.end()) {
      dims[d].partition = Partition::even(shape[d], parts);
      continue;
    }
    dims[d].partition = Partition(std::span<const std::int64_t>(*it->second));
    if (dims[d].partition.parts() != parts || dims[d].partition.extent() != shape[d]) {
      throw InvalidArgument("sizes ", list(*it->second), " of dim ", d, " have ",
                            dims[d].partition.parts(), " shards and sum ",
                            dims[d].partition.extent(), ": the mesh needs ", parts,
                            " shards and the shape ", list(shape), " the sum ", shape[d]);
    }
  }
  return dims;
}

ShardSpec::ShardSpec(const DeviceMesh& mesh, const std::vector<std::int64_t>& shape,
                     const std::vector<Placement>& placements, const ShardSizes& sizes) {
  for (const std::int64_t n : shape)
    if (n < 0) throw InvalidArgument("a tensor of shape ", list(shape));
  const auto context = detail::MeshContext::of(mesh);
  std::vector<Placement> normal = placements;
  auto dims = detail::shard_dims(mesh.mesh(), shape, normal, sizes);
  data_ = detail::make_spec(context, shape, std::move(normal), std::move(dims)).data_;
}

ShardSpec ShardSpec::replicated(const DeviceMesh& mesh, const std::vector<std::int64_t>& shape) {
  return ShardSpec(mesh, shape, std::vector<Placement>(mesh.mesh().dims()));
}

namespace {
const detail::SpecData& data_of(const ShardSpec& spec) {
  if (!spec)
    throw InvalidArgument(
        "a ShardSpec that was made without arguments says nothing: give a mesh, "
        "a shape and placements");
  return *spec.data();
}
}  // namespace

const DeviceMesh& ShardSpec::mesh() const { return data_of(*this).context->mesh; }
const std::vector<std::int64_t>& ShardSpec::shape() const {
  return data_of(*this).sharding.shape();
}
const std::vector<Placement>& ShardSpec::placements() const { return data_of(*this).placements; }
const DimSharding& ShardSpec::dim(int d) const {
  const auto& all = data_of(*this).sharding.dims();
  if (d < 0 || d >= static_cast<int>(all.size()))
    throw InvalidArgument("dim ", d, " of a tensor of ", all.size(), " dims ", *this);
  return all[d];
}
bool ShardSpec::is_replicated() const { return data_of(*this).replicated; }
bool ShardSpec::has_partial() const { return data_of(*this).partial; }
bool ShardSpec::has_shard() const { return data_of(*this).shard; }
const std::vector<std::int64_t>& ShardSpec::local_shape() const {
  return data_of(*this).local_shape;
}
const std::vector<std::int64_t>& ShardSpec::local_offset() const {
  return data_of(*this).local_offset;
}
std::int64_t ShardSpec::numel() const { return data_of(*this).numel; }
std::int64_t ShardSpec::local_numel() const { return data_of(*this).local_numel; }
const Sharding& ShardSpec::sharding() const { return data_of(*this).sharding; }

ShardSizes ShardSpec::sizes() const {
  ShardSizes all;
  for (int d = 0; d < dims(); ++d)
    if (is_sharded(d)) all[d] = dim(d).partition.sizes();
  return all;
}

ShardSpec ShardSpec::with_placements(const std::vector<Placement>& placements) const {
  std::vector<Placement> normal = placements;
  detail::normalize(mesh().mesh(), shape(), normal);
  std::vector<const DimSharding*> parts;
  for (int d = 0; d < dims(); ++d) parts.push_back(&dim(d));
  return detail::make_spec(data_->context, shape(), std::move(normal), parts);
}

ShardSpec ShardSpec::with_placement(int axis, Placement placement) const {
  std::vector<Placement> all = placements();
  if (axis < 0 || axis >= mesh_dims())
    throw InvalidArgument("axis ", axis, " of a mesh of ", counted(mesh_dims(), "axis", "axes"));
  all[axis] = placement;
  return with_placements(all);
}

std::string ShardSpec::to_string() const {
  if (!data_) return "(no spec)";
  std::string text = list(shape());
  const auto& axes = mesh().mesh().axes();
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const Placement& p = placements()[i];
    text += concat(" ", axes[i].name, "=", p);
    if (p.is_shard()) text += list(dim(p.dim).partition.sizes());
  }
  return text;
}

}  // namespace tessera
