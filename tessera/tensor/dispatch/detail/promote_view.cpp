#include "tessera/tensor/dispatch/detail/promote_view.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera::detail {
namespace {

// The slice that a view takes of one dim of its base.
struct Taken {
  std::int64_t start = 0, size = 1, step = 1;
  bool selected = false;  // the view lacks the dim

  bool all_of(std::int64_t extent) const { return !selected && size == extent; }
};

at::Tensor view_by(const at::Tensor& base, const std::vector<Taken>& taken) {
  at::Tensor t = at::alias(base);
  std::int64_t d = 0;
  for (const Taken& one : taken) {
    if (one.selected) {
      t = t.select(d, one.start);
      continue;
    }
    if (!one.all_of(t.size(d)))
      t = t.slice(d, one.start, one.start + (one.size - 1) * one.step + (one.size > 0), one.step);
    ++d;
  }
  return t;
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  for (std::int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return a.storage_offset() == b.storage_offset();
}

// The slices and selects, by dim of the base, that make `view`; nullopt if there are none.
std::optional<std::vector<Taken>> taken_by(const at::Tensor& view, const at::Tensor& base) {
  const std::int64_t dims = base.dim();
  if (view.dim() > dims || base.numel() == 0 || !base.is_non_overlapping_and_dense())
    return std::nullopt;
  std::vector<Taken> taken(dims);
  std::int64_t of_view = 0;
  for (std::int64_t d = 0; d < dims; ++d) {
    const bool more = dims - d > view.dim() - of_view;  // more dims than the view still has
    const bool fits = of_view < view.dim() && view.size(of_view) <= base.size(d) &&
                      (view.size(of_view) <= 1 || view.stride(of_view) % base.stride(d) == 0) &&
                      (!more || view.stride(of_view) == base.stride(d));
    Taken& one = taken[d];
    if (!fits) {
      if (!more) return std::nullopt;
      one.selected = true;
      continue;
    }
    one.size = view.size(of_view);
    if (one.size > 1) one.step = view.stride(of_view) / base.stride(d);
    ++of_view;
  }
  // The start of each slice: the largest strides first.
  std::vector<std::int64_t> order(dims);
  for (std::int64_t d = 0; d < dims; ++d) order[d] = d;
  std::ranges::stable_sort(order, [&](auto a, auto b) { return base.stride(a) > base.stride(b); });
  std::int64_t offset = view.storage_offset() - base.storage_offset();
  for (const auto d : order) {
    if (base.size(d) == 1) continue;
    taken[d].start = offset / base.stride(d);
    offset %= base.stride(d);
    if (taken[d].start < 0 || taken[d].start + (taken[d].size - 1) * taken[d].step >= base.size(d))
      return std::nullopt;
  }
  const LocalCallGuard guard;
  if (offset != 0 || !same_view(view_by(base, taken), view)) return std::nullopt;
  return taken;
}

// The spec of the base: sharded as `like` in the dims that the view takes completely and to which a
// dim of that size is written.
ShardSpec spec_of_base(const at::Tensor& target, const at::Tensor& base,
                       const std::vector<Taken>& taken, const at::Tensor& like,
                       const std::shared_ptr<MeshContext>& context) {
  std::vector<Placement> placements(context->sizes.size());
  std::vector<const DimSharding*> parts(base.dim(), nullptr);
  if (!like.defined() || like.dim() > target.dim())
    return make_spec(context, base.sizes().vec(), placements, parts);
  const ShardSpec of = spec(like);
  std::int64_t of_view = 0;
  for (std::int64_t d = 0; d < base.dim(); ++d) {
    if (taken[d].selected) continue;
    const std::int64_t of_like = of_view++ - (target.dim() - like.dim());
    if (of_like < 0 || !taken[d].all_of(base.size(d)) || like.size(of_like) != base.size(d) ||
        !of.is_sharded(static_cast<int>(of_like)))
      continue;
    for (const int axis : of.dim(static_cast<int>(of_like)).axes)
      placements[axis] = Shard(static_cast<int>(d));
    parts[d] = &of.dim(static_cast<int>(of_like));
  }
  return make_spec(context, base.sizes().vec(), placements, parts);
}

}  // namespace

bool promote_view(const at::Tensor& target, const at::Tensor& base, const at::Tensor& like,
                  const std::shared_ptr<MeshContext>& context, bool above) {
  const auto taken = taken_by(target, base);
  if (!taken) return false;
  const ShardSpec of_base = spec_of_base(target, base, *taken, like, context);
  const at::Tensor whole = wrap_plain(base, context);
  at::Tensor sharded;
  {
    const LocalCallGuard guard;
    const at::Tensor local = local_slice(meta_of(whole)->local, of_base);
    sharded = wrap_fresh(local.clone(at::MemoryFormat::Preserve),
                         make_layout(of_base, base.strides(), base.storage_offset(),
                                     base.scalar_type(), base.device()));
  }
  base.unsafeGetTensorImpl()->shallow_copy_from(sharded.getIntrusivePtr());
  // Above autograd the view must be one that backward can replay.
  const at::AutoGradMode grad(above);
  const ViewReplay replay(above);
  const at::Tensor view = view_by(base, *taken);
  target.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  const auto* made = torch::autograd::impl::get_view_autograd_meta(view);
  const auto* own = torch::autograd::impl::get_view_autograd_meta(target);
  if (!above || !made || !own || !made->has_bw_view() || !made->get_backward_view().has_view_fn())
    return true;
  const auto& info = made->get_backward_view();
  auto* impl = target.unsafeGetTensorImpl();
  const auto creation = own->get_creation_meta();
  impl->set_autograd_meta(std::make_unique<torch::autograd::DifferentiableViewMeta>(
      impl, torch::autograd::ViewInfo(base, info.view_fn().clone_and_set(), info.rev_view_fn()),
      std::nullopt, true, creation));
  return true;
}

}  // namespace tessera::detail
