// The solver's memory as tensors, ghost cells, and what one reads of tensors.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "tessera/c/detail/arrays.h"
#include "tessera/c/detail/call.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/tensor/blob.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::c {
namespace {

using Counts = std::vector<std::int64_t>;

// Below it sums of a dim's cells stay within 64 bits.
constexpr std::int64_t kMostCells = std::int64_t{1} << 58;

Counts counts_of(const std::int64_t* given, int dims, const char* name) {
  if (!given) return Counts(static_cast<std::size_t>(dims), 0);
  Counts counts(given, given + dims);
  for (const auto n : counts)
    if (n < 0 || n > kMostCells)
      refuse(name, " is ", list(counts), ": numbers of cells, at least 0, that memory could hold");
  return counts;
}

std::vector<int> axes_of(const int* given, int dims, const DeviceMesh& mesh) {
  if (dims > 0) need(given, "axes");
  const std::vector<int> axes(given, given + dims);
  for (int d = 0; d < dims; ++d) {
    if (axes[d] < -1 || axes[d] >= mesh.mesh().dims())
      refuse("axes is ", list(axes), ", the mesh has ", mesh.mesh().dims(),
             ": give an axis counted from 0, or -1 for a dim that is not divided");
    if (axes[d] >= 0 && std::ranges::count(axes, axes[d]) > 1)
      refuse("axes is ", list(axes), ": an axis of the mesh divides one dim");
  }
  return axes;
}

// What every rank owns, by position in the mesh. Throws MismatchError, on every rank, where what
// must be the same is not.
std::vector<Counts> gather_owned(const DeviceMesh& mesh, const Counts& same, const Counts& mine) {
  Counts numbers = same;
  numbers.insert(numbers.end(), mine.begin(), mine.end());
  const std::string bytes(reinterpret_cast<const char*>(numbers.data()),
                          numbers.size() * sizeof(std::int64_t));
  const auto all = mesh.all().all_gather_bytes(bytes, {.name = "field"});
  std::vector<Counts> owned;
  for (std::size_t p = 0; p < all.size(); ++p) {
    Counts other(all[p].size() / sizeof(std::int64_t));
    std::copy_n(all[p].data(), all[p].size(), reinterpret_cast<char*>(other.data()));
    if (other.size() != numbers.size() || !std::equal(same.begin(), same.end(), other.begin()))
      throw MismatchError(
          "rank ", mesh.mesh().ranks()[p],
          " gives other dims, dtype, order, axes or ghost cells than this one: they are the same "
          "on all ranks, the sizes alone differ");
    owned.emplace_back(other.begin() + static_cast<std::ptrdiff_t>(same.size()), other.end());
  }
  return owned;
}

// The sizes of the shards of one dim, by coordinate on its axis (-1: one shard).
Sizes sizes_of(const DeviceMesh& mesh, const std::vector<Counts>& owned, int dim, int axis) {
  const Mesh& ranks = mesh.mesh();
  Sizes sizes(static_cast<std::size_t>(axis < 0 ? 1 : ranks.size(axis)), -1);
  for (std::size_t p = 0; p < owned.size(); ++p) {
    const int rank = ranks.ranks()[p];
    const auto at = static_cast<std::size_t>(axis < 0 ? 0 : ranks.coordinate(rank)[axis]);
    const std::int64_t size = owned[p][dim];
    if (sizes[at] >= 0 && sizes[at] != size)
      throw MismatchError("dim ", dim, ": rank ", rank, " owns ", size,
                          " cells, a rank of the same place on the axis that divides it ",
                          sizes[at], ": blocks of one row have one size");
    sizes[at] = size;
  }
  return sizes;
}

ShardSpec spec_of(const DeviceMesh& mesh, const std::vector<Counts>& owned,
                  const std::vector<int>& axes) {
  std::vector<Placement> placements(static_cast<std::size_t>(mesh.mesh().dims()), Replicate());
  ShardSizes shards;
  Counts shape;
  for (int d = 0; d < static_cast<int>(axes.size()); ++d) {
    const Sizes sizes = sizes_of(mesh, owned, d, axes[d]);
    shape.push_back(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
    if (axes[d] < 0) continue;
    placements[axes[d]] = Shard(d);
    shards[d] = sizes;
  }
  return {mesh, shape, placements, shards};
}

std::shared_ptr<TensorObject> make_field(const Call& call, const DeviceMesh& mesh,
                                         const tessera_array& array, const Counts& before,
                                         const Counts& after, const std::vector<int>& axes) {
  const at::Tensor block = tensor_over(&array, "block");
  Counts mine;
  for (int d = 0; d < array.dims; ++d) {
    mine.push_back(array.shape[d] - before[d] - after[d]);
    if (mine.back() < 0)
      refuse("the block is ", block.sizes(), " with ", list(before), " ghost cells before and ",
             list(after), " after: dim ", d, " has fewer cells than that");
  }
  Counts same{array.dims, array.dtype, array.order};
  for (const auto* more : {&before, &after}) same.insert(same.end(), more->begin(), more->end());
  same.insert(same.end(), axes.begin(), axes.end());
  // Whether memory has gaps decides what strides the tensor shows, on all ranks alike.
  mine.push_back(array.strides ? 1 : 0);
  const auto owned = gather_owned(mesh, same, mine);
  const auto sum = [](const Counts& n) { return std::accumulate(n.begin(), n.end(), 0LL); };
  const bool gaps = sum(before) + sum(after) > 0 ||
                    std::ranges::any_of(owned, [](const Counts& one) { return one.back() != 0; });
  BlobMemory memory;
  memory.order =
      array.order == TESSERA_COLUMN_MAJOR ? MemoryOrder::column_major : MemoryOrder::row_major;
  if (gaps) {
    memory.allocated = block.sizes().vec();
    memory.before = before;
    memory.strides = strides_of(array);
    for (auto& s : memory.strides) s = std::max<std::int64_t>(s, 1);
  }
  auto field = std::make_shared<TensorObject>(
      call.job(), from_blob(array.data, spec_of(mesh, owned, axes), memory,
                            at::TensorOptions(block.scalar_type())));
  field->block = block;
  field->before = before;
  field->after = after;
  return field;
}

Edge edge_of(tessera_edge edge, bool may_keep) {
  // In the order of tessera_edge; cells that stay as they are can have any.
  static constexpr Edge kEdges[] = {Edge::zero, Edge::circular, Edge::reflect, Edge::replicate,
                                    Edge::zero};
  const auto number = static_cast<std::size_t>(edge);
  if (number >= std::size(kEdges))
    refuse("edges holds ", static_cast<int>(edge), ", which is no tessera_edge");
  if (edge == TESSERA_EDGE_KEEP && !may_keep)
    refuse("edges: TESSERA_EDGE_KEEP is for tessera_fill_ghosts() alone");
  return kEdges[number];
}

HaloWidths widths_of(const Counts& before, const Counts& after, const tessera_edge* edges,
                     bool may_keep) {
  HaloWidths widths;
  for (std::size_t d = 0; d < before.size(); ++d)
    if (before[d] + after[d] > 0)
      widths[static_cast<int>(d)] = {before[d], after[d],
                                     edge_of(need(edges, "edges")[d], may_keep)};
  return widths;
}

}  // namespace

extern "C" {

tessera_result tessera_field(tessera_mesh mesh, const tessera_array* block, const int64_t* before,
                             const int64_t* after, const int* axes, tessera_tensor* field) {
  return make("tessera_field", Reach::all, field, "field", [&](Call& call) {
    const DeviceMesh& on = call.use<MeshObject>(mesh, "mesh").mesh;
    need(block, "block");
    if (block->dims < 1 || block->dims > TESSERA_MAX_DIMS)
      refuse("block has ", block->dims, " dims: a field has 1 to ",
             static_cast<int>(TESSERA_MAX_DIMS));
    const auto first = counts_of(before, block->dims, "before");
    const auto last = counts_of(after, block->dims, "after");
    return make_field(call, on, *block, first, last, axes_of(axes, block->dims, on));
  });
}

tessera_result tessera_fill_ghosts(tessera_tensor field, const tessera_edge* edges) {
  return run("tessera_fill_ghosts", Reach::all, [&](Call& call) {
    const auto& of = call.use<TensorObject>(field, "field");
    if (!of.block.defined())
      refuse("the tensor is no field with memory of the solver: it has no ghost cells");
    const at::NoGradGuard no_grad;
    const auto widths = widths_of(of.before, of.after, edges, true);
    if (widths.empty()) return;
    at::Tensor filled = halo_exchange(of.value.detach(), widths), block = of.block;
    const ShardSpec where = spec(of.value);
    for (const auto& [d, width] : widths) {
      if (edges[d] != TESSERA_EDGE_KEEP) continue;
      // The block's cells that are inside the whole array.
      const std::int64_t first = where.local_offset()[d] - width.before;
      const std::int64_t begin = std::max<std::int64_t>(0, -first);
      const std::int64_t end = std::min(filled.size(d), where.shape()[d] - first);
      filled = filled.narrow(d, begin, std::max<std::int64_t>(0, end - begin));
      block = block.narrow(d, begin, std::max<std::int64_t>(0, end - begin));
    }
    block.copy_(filled);
  });
}

tessera_result tessera_halo(tessera_tensor field, const int64_t* before, const int64_t* after,
                            const tessera_edge* edges, tessera_tensor* wide) {
  return make("tessera_halo", Reach::all, wide, "wide", [&](Call& call) {
    const at::Tensor& value = call.use<TensorObject>(field, "field").value;
    const int dims = static_cast<int>(value.dim());
    const auto widths =
        widths_of(counts_of(before, dims, "before"), counts_of(after, dims, "after"), edges, false);
    if (!is_sharded(value)) refuse("field is a plain tensor: it has no neighbours");
    return std::make_shared<TensorObject>(call.job(), halo_exchange(value, widths));
  });
}

tessera_result tessera_clone(tessera_tensor tensor, tessera_tensor* copy) {
  return make("tessera_clone", Reach::own, copy, "copy", [&](Call& call) {
    const at::Tensor& value = call.use<TensorObject>(tensor, "tensor").value;
    return std::make_shared<TensorObject>(call.job(), value.detach().clone());
  });
}

tessera_result tessera_arrange(tessera_tensor tensor, int dims, const int* from,
                               tessera_tensor* result) {
  return make("tessera_arrange", Reach::own, result, "arranged", [&](Call& call) {
    const at::Tensor& value = call.use<TensorObject>(tensor, "tensor").value;
    if (dims < value.dim() || dims > TESSERA_MAX_DIMS)
      refuse("dims is ", dims, ", the tensor has ", value.dim(), ": at least these, at most ",
             static_cast<int>(TESSERA_MAX_DIMS));
    const std::vector<int> wanted(need(from, "from"), from + dims);
    Counts old;
    for (const int d : wanted) {
      if (d == -1) continue;
      if (d < 0 || d >= value.dim() || std::ranges::count(wanted, d) != 1)
        refuse("from is ", list(wanted), ", the tensor has ", value.dim(),
               " dims: each of them once, counted from 0, and -1 for new ones");
      old.push_back(d);
    }
    if (static_cast<std::int64_t>(old.size()) != value.dim())
      refuse("from is ", list(wanted), ", the tensor has ", value.dim(),
             " dims: each of them once");
    at::Tensor its = value.permute(old);
    for (int i = 0; i < dims; ++i)
      if (wanted[i] == -1) its = its.unsqueeze(i);
    return std::make_shared<TensorObject>(call.job(), its);
  });
}

tessera_result tessera_copy(tessera_tensor to, tessera_tensor from) {
  return run("tessera_copy", Reach::all, [&](Call& call) {
    const at::Tensor& target = call.use<TensorObject>(to, "to").value;
    const at::Tensor& source = call.use<TensorObject>(from, "from").value;
    if (target.sizes() != source.sizes())
      refuse("to has the shape ", target.sizes(), ", from ", source.sizes(), ": they are the same");
    const at::NoGradGuard no_grad;
    target.copy_(source);
  });
}

tessera_result tessera_value(tessera_tensor tensor, double* value) {
  return run("tessera_value", Reach::all, [&](Call& call) {
    const at::Tensor& its = call.use<TensorObject>(tensor, "tensor").value;
    need(value, "value");
    if (its.numel() != 1)
      refuse("the tensor has the shape ", its.sizes(), ": of one element is it");
    *value = its.item().toDouble();
  });
}

tessera_result tessera_shape(tessera_tensor tensor, int* dims, int64_t* shape) {
  return run("tessera_shape", Reach::own, [&](Call& call) {
    const at::Tensor& its = call.use<TensorObject>(tensor, "tensor").value;
    if (its.dim() > TESSERA_MAX_DIMS) refuse("the tensor has ", its.dim(), " dims");
    if (dims) *dims = static_cast<int>(its.dim());
    if (shape) std::ranges::copy(its.sizes(), shape);
  });
}

tessera_result tessera_local(tessera_tensor tensor, void** data, tessera_dtype* dtype,
                             int64_t* shape, int64_t* strides, int64_t* offset) {
  return run("tessera_local", Reach::own, [&](Call& call) {
    auto& its = call.use<TensorObject>(tensor, "tensor");
    const at::NoGradGuard no_grad;
    const bool sharded = is_sharded(its.value);
    const at::Tensor local = sharded ? to_local(its.value.detach()) : its.value.detach();
    if (local.dim() > TESSERA_MAX_DIMS)
      refuse("the tensor has ", local.dim(), " dims: C reads at most ",
             static_cast<int>(TESSERA_MAX_DIMS));
    const tessera_dtype of = dtype_of(local.scalar_type());
    if (dtype) *dtype = of;
    if (data) *data = local.data_ptr();
    if (shape) std::ranges::copy(local.sizes(), shape);
    if (strides) std::ranges::copy(local.strides(), strides);
    if (offset)
      std::ranges::copy(sharded ? spec(its.value).local_offset() : Counts(local.dim(), 0), offset);
    its.local = local;
  });
}

tessera_result tessera_require_gradient(tessera_tensor tensor) {
  return run("tessera_require_gradient", Reach::own, [&](Call& call) {
    const at::Tensor& its = call.use<TensorObject>(tensor, "tensor").value;
    if (!its.is_leaf() || !its.is_floating_point())
      refuse("a gradient is for a field or a copy of numbers with a fraction");
    its.set_requires_grad(true);
  });
}

tessera_result tessera_gradient(tessera_tensor tensor, tessera_tensor* gradient) {
  return make("tessera_gradient", Reach::own, gradient, "gradient", [&](Call& call) {
    const at::Tensor& its = call.use<TensorObject>(tensor, "tensor").value;
    if (!its.is_leaf() || !its.grad().defined())
      refuse(
          "no gradient has come: tessera_require_gradient() before, tessera_backward() after "
          "what was computed of it");
    return std::make_shared<TensorObject>(call.job(), its.grad());
  });
}
}

}  // namespace tessera::c
