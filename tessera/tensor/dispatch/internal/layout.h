#pragma once
// Layout: everything about a sharded tensor but its values: spec, the strides that plain libtorch
// would show for the global tensor, dtype, device. ShardMeta holds the local tensor and the layout
// on an ordinary TensorImpl. Both are immutable (except that a meta records what it was reduced
// to); layouts are interned, so that the key under which an operator's plan is cached is one
// pointer per tensor.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <vector>

#include "tessera/tensor/dispatch/internal/view_copy.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/placement.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

// PrivateUse1 is left to real out-of-tree devices
inline constexpr auto kShardKey = c10::DispatchKey::PrivateUse2;
inline constexpr auto kShardAutogradKey = c10::DispatchKey::AutogradPrivateUse2;

using Dims = std::vector<std::int64_t>;

/// What a layout says of a parameter, or of a view of one.
struct ParameterMarks {
  // a sharded parameter: gathered where it is used, rather than moving the data
  bool parameter = false;
  // a sharded parameter that is not: what is needed of it moves
  bool stays = false;
  // of a weight: what its layer does with data that are sharded along their sequence
  SequenceSharding sequence = {};
  // of a parameter in a unit of fully_shard: the axes over which the unit is gathered; operators
  // compute with its shards over others
  std::optional<std::vector<int>> unit_axes = {};

  bool operator==(const ParameterMarks&) const = default;
};

struct Layout : ParameterMarks {
  ShardSpec spec;
  Dims strides;             // global
  std::int64_t offset = 0;  // global storage offset
  at::ScalarType dtype = at::kFloat;
  c10::Device device = c10::Device(c10::kCPU);

  // Derived by make_layout:
  // non-overlapping and dense, so that local_strides determines the memory order of a fresh local
  bool dense = true;
  Dims local_strides = {};
  // sizes, strides and keys as a wrapper shows them, computed once
  c10::intrusive_ptr<c10::TensorImpl> shown = {};

  const Dims& sizes() const { return spec.shape(); }
  const ParameterMarks& marks() const { return *this; }
  bool same(const Layout& o) const {
    return spec == o.spec && strides == o.strides && offset == o.offset && dtype == o.dtype &&
           device == o.device && marks() == o.marks();
  }
};
using LayoutPtr = std::shared_ptr<const Layout>;

LayoutPtr make_layout(const ShardSpec& spec, at::IntArrayRef strides, std::int64_t offset,
                      at::ScalarType dtype, c10::Device device);
/// The layout with these marks in place of its own.
LayoutPtr marked(const LayoutPtr& layout, const ParameterMarks& marks);
/// A row-major layout.
LayoutPtr make_layout(const ShardSpec& spec, at::ScalarType dtype, c10::Device device);

Dims contiguous_strides(at::IntArrayRef sizes);
/// True if each element has an address of its own and there are no gaps. Empty tensors are dense.
bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides);
/// True if elements may share an address, as those of expanded dims and of overlapping windows.
bool has_overlap(at::IntArrayRef sizes, at::IntArrayRef strides);
/// Dense strides for `sizes` in the memory order of `like_strides`. Given global strides, the
/// locals of all ranks have the same memory order.
Dims strides_in_order(at::IntArrayRef sizes, at::IntArrayRef like_strides);

struct ShardMeta : c10::BackendMeta {
  ShardMeta(at::Tensor local_, LayoutPtr layout_)
      : local(std::move(local_)), layout(std::move(layout_)) {}
  const at::Tensor local;
  const LayoutPtr layout;
  // For a view that does not share memory with its base.
  std::shared_ptr<ViewCopy> copy = {};
  // For a partial tensor: an operator made it, the program did not ask for it to be partial.
  bool intermediate = false;
  // For a view of a partial tensor: the meta of the tensor whose memory its local shares.
  c10::intrusive_ptr<ShardMeta> base = {};
  // What a partial tensor became when it was reduced. The metas of one tensor and of its aliases
  // (detach, .data, what a graph has saved) are one object, so that all of them find it, whatever a
  // rank holds: what is reduced next follows from the program alone, never from local references.
  c10::intrusive_ptr<ShardMeta> reduced = {};

  const ShardSpec& spec() const { return layout->spec; }
};

/// The meta of a tensor whose own one has been reduced through an alias, or is a view of one that
/// may have been: the tensor adopts the reduced value.
ShardMeta* follow_reduced(c10::TensorImpl* impl, ShardMeta* meta);

/// The meta of a sharded tensor; nullptr for plain and undefined ones.
inline ShardMeta* meta_of(const at::TensorBase& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (!impl->key_set().has_backend(c10::BackendComponent::PrivateUse2Bit)) return nullptr;
  auto* meta = static_cast<ShardMeta*>(impl->get_backend_meta());
  if (meta->reduced || meta->base) [[unlikely]]
    return follow_reduced(impl, meta);
  return meta;
}

/// A tensor of the global shape over `local`, which must have the layout's local shape. Throws
/// RuleError otherwise: a rule has predicted another shape.
at::Tensor wrap(at::Tensor local, LayoutPtr layout);
/// As wrap(), for a local whose shape the caller has compared.
at::Tensor wrap_checked(at::Tensor local, const LayoutPtr& layout);
/// Makes a tensor that was made in inference mode a normal one: views of normal tensors are no
/// inference tensors.
void as_view_of_normal(const at::Tensor& made);
/// As wrap(), with the local first copied into the layout's memory order if both are dense. For
/// results that do not alias anything.
at::Tensor wrap_fresh(at::Tensor local, const LayoutPtr& layout);
/// The local in the memory order of the layout: itself if it is already.
at::Tensor aligned(at::Tensor local, const Layout& layout);
/// Replaces value and shape of an existing sharded or plain tensor in place.
void install(const at::Tensor& target, at::Tensor local, LayoutPtr layout,
             std::shared_ptr<ViewCopy> copy = {});
/// Replaces the value of a tensor by the one with partial axes reduced: `local` with the spec `to`,
/// in the memory order of its layout. Its aliases and the views of its memory adopt the value at
/// their next use. For a view it is the base that is reduced.
void install_reduced(const at::Tensor& target, const at::Tensor& local, const ShardSpec& to);
/// Records that `view`, the result of a view operator on `input`, shares its memory: if `input` is
/// partial and is reduced later, the view follows.
void as_view_of_partial(const at::Tensor& view, const at::Tensor& input);
/// `spec` with those partial axes replicated that are replicated in `reduced`.
ShardSpec reduced_like(const ShardSpec& spec, const ShardSpec& reduced);
/// The layout of the same tensor under another spec.
LayoutPtr under(const Layout& layout, const ShardSpec& to);
/// The layout of a plain tensor seen as replicated.
LayoutPtr replicated_layout(const std::shared_ptr<MeshContext>& context, const at::Tensor& plain);

// Host memory: a sharded tensor may show the device that operators compute on while this rank's
// local lies in host memory. fully_shard() keeps parameters so when they are offloaded, and their
// gradients and optimizer states follow. Where a call computes follows from where the locals lie,
// which is the same on all ranks:
//   - in host memory, if it writes to a tensor that lies there, or if all its tensors do (one
//     without dims that lies on the device is brought along),
//   - else on the device shown; a parameter comes from what its source has gathered there, any
//     other local is copied.
// Results lie where the call computes, and show the device all the same.

/// Whether the local lies in host memory, and the tensor shows another device.
inline bool in_host_memory(const ShardMeta& meta) {
  return !meta.layout->device.is_cpu() && meta.local.is_cpu();
}

/// The local on the device that the tensor shows: itself where it lies there, else a copy.
at::Tensor on_device(const ShardMeta& meta);

/// A copy of `t` in host memory, page-locked if `pinned`, in the same memory order if `t` is dense.
/// Returns when it is complete.
at::Tensor to_host(const at::Tensor& t, bool pinned = false);

/// As wrap(), for a tensor that shows `device`, whichever the local lies on.
at::Tensor wrap_shown(at::Tensor local, LayoutPtr layout, c10::Device device);
/// As wrap_fresh(), likewise.
at::Tensor wrap_fresh(at::Tensor local, const LayoutPtr& layout, c10::Device device);

}  // namespace tessera::detail
