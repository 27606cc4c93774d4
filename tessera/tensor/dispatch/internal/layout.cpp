#include "tessera/tensor/dispatch/internal/layout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <array>

#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/sparse_rows.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {
namespace {

// The message for code that reads memory directly.
constexpr char kNoMemory[] =
    "a ShardTensor's memory is spread over ranks: use tessera::to_local() for this rank's shard, "
    "tessera::full_tensor() for the global value, "
    "tessera::print() or tessera::save() to print or save it";

// Extra metadata takes three allocations, the longest of them the message: what a tensor leaves
// behind is reused by the next one of this thread.
class SpareMeta {
 public:
  static std::unique_ptr<c10::ExtraMeta> take() {
    SpareMeta& spare = of_thread();
    if (spare.size_ > 0) return std::move(spare.kept_[--spare.size_]);
    auto meta = std::make_unique<c10::ExtraMeta>();
    meta->custom_data_ptr_error_msg_.emplace(kNoMemory, sizeof kNoMemory - 1);
    // a parameter that was distributed in place has libtorch's own impl, and its name
    meta->custom_storage_error_msg_.emplace(kNoMemory, sizeof kNoMemory - 1);
    return meta;
  }
  static void give(std::unique_ptr<c10::ExtraMeta> meta) {
    if (!meta || gone_) return;
    meta->backend_meta_.reset();  // may destroy the local, and other tensors with it
    SpareMeta& spare = of_thread();
    if (gone_ || spare.size_ == spare.kept_.size() || meta->symbolic_shape_meta_ ||
        !meta->custom_data_ptr_error_msg_)
      return;
    spare.kept_[spare.size_++] = std::move(meta);
  }
  ~SpareMeta() { gone_ = true; }

 private:
  static SpareMeta& of_thread() {
    static thread_local SpareMeta spare;
    return spare;
  }
  static inline thread_local bool gone_ = false;  // tensors may outlive it, at the end of a thread
  std::array<std::unique_ptr<c10::ExtraMeta>, 64> kept_;
  std::size_t size_ = 0;
};

// Has no members of its own: it exists to reach protected ones.
struct ShardImpl final : c10::TensorImpl {
  // With the sizes and strides of a layout.
  ShardImpl(c10::DispatchKeySet keys, caffe2::TypeMeta dtype, c10::Device device)
      : TensorImpl(keys, dtype, device) {}

  // With the sizes and strides of `like`.
  ShardImpl(const ShardImpl& like, c10::DispatchKeySet keys,
            c10::intrusive_ptr<c10::BackendMeta> meta)
      : TensorImpl(keys, like.data_type_, like.device_opt_) {
    set_storage_access_should_throw();
    sizes_and_strides_ = like.sizes_and_strides_;
    storage_offset_ = like.storage_offset_;
    numel_ = like.numel_;
    is_contiguous_ = like.is_contiguous_;
    is_channels_last_ = like.is_channels_last_;
    is_channels_last_contiguous_ = like.is_channels_last_contiguous_;
    is_channels_last_3d_ = like.is_channels_last_3d_;
    is_channels_last_3d_contiguous_ = like.is_channels_last_3d_contiguous_;
    is_non_overlapping_and_dense_ = like.is_non_overlapping_and_dense_;
    extra_meta_ = SpareMeta::take();
    extra_meta_->backend_meta_ = std::move(meta);
  }
  ~ShardImpl() override { SpareMeta::give(std::move(extra_meta_)); }

  // The base class' version copies the message too.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool metadata_may_change) const override {
    if (!copied_as_it_is())
      return TensorImpl::shallow_copy_and_detach(version, metadata_may_change);
    return copy(c10::VariableVersion(version), metadata_may_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool metadata_may_change) const override {
    if (!copied_as_it_is())
      return TensorImpl::shallow_copy_and_detach(std::move(version), metadata_may_change);
    return copy(std::move(version), metadata_may_change);
  }

  const char* tensorimpl_type_name() const override { return kNoMemory; }

  void make_normal() {
    key_set_ =
        key_set_ | c10::getAutogradRelatedKeySetFromBackend(c10::BackendComponent::PrivateUse2Bit);
    version_counter_ = c10::VariableVersion(0);
  }

 private:
  // It is sharded still (set_data() of a plain tensor ends that), no Python mode wants to see the
  // copy, and the tensor has nothing attached that a wrapper does not have.
  bool copied_as_it_is() const {
    return key_set_.has_backend(c10::BackendComponent::PrivateUse2Bit) &&
           c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
           !key_set_.has(c10::DispatchKey::Python) && !extra_meta_->symbolic_shape_meta_;
  }
  c10::intrusive_ptr<TensorImpl> copy(c10::VariableVersion&& version,
                                      bool metadata_may_change) const {
    auto impl = c10::make_intrusive<ShardImpl>(*this, key_set_, extra_meta_->backend_meta_);
    impl->key_set_ = key_set_;
    impl->is_wrapped_number_ = is_wrapped_number_;
    if (!impl->is_inference()) impl->set_version_counter(std::move(version));
    impl->set_allow_tensor_metadata_change(metadata_may_change);
    return impl;
  }
};

c10::DispatchKeySet keys_for(c10::Device device) {
  // The inner backend's key stays in the set: set_data() swaps between dense tensors only, and
  // autocast reads it. PrivateUse2 has the higher priority.
  // A meta tensor counts as one of the CPU, which it becomes.
  const auto backend = device.is_meta() ? c10::DispatchKey::CPU
                                        : c10::computeDispatchKey(at::kFloat, at::kStrided, device);
  return c10::DispatchKeySet({backend, kShardKey}) |
         c10::getAutocastRelatedKeySetFromBackend(c10::toBackendComponent(backend));
}

// Dims from the slowest to the fastest.
std::vector<int> memory_order(at::IntArrayRef strides) {
  std::vector<int> order = numbers_below<int>(strides.size());
  std::ranges::stable_sort(order, [&](int a, int b) { return strides[a] > strides[b]; });
  return order;
}

}  // namespace

Dims contiguous_strides(at::IntArrayRef sizes) {
  return at::IntArrayRef(c10::contiguous_strides(sizes)).vec();
}

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t step = 1;
  std::vector<int> order = memory_order(strides);
  for (const auto n : sizes)
    if (n == 0) return true;
  for (std::size_t i = order.size(); i-- > 0;) {
    if (sizes[order[i]] == 1) continue;
    if (strides[order[i]] != step) return false;
    step *= sizes[order[i]];
  }
  return true;
}

bool has_overlap(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t end = 1;
  const std::vector<int> order = memory_order(strides);
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::int64_t size = sizes[order[i]], stride = strides[order[i]];
    if (size <= 1) continue;
    if (stride < end) return true;
    end += (size - 1) * stride;
  }
  return false;
}

Dims strides_in_order(at::IntArrayRef sizes, at::IntArrayRef like_strides) {
  const std::vector<int> order = memory_order(like_strides);
  Dims strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<std::int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

namespace {

LayoutPtr interned(std::shared_ptr<Layout> layout) {
  Hash hash;
  hash.number(reinterpret_cast<std::uintptr_t>(layout->spec.data().get()));
  for (const auto s : layout->strides) hash.number(s);
  hash.number(layout->offset)
      .number(static_cast<std::uint64_t>(layout->dtype))
      .number(static_cast<std::uint64_t>(layout->device.type()) << 8 |
              static_cast<std::uint8_t>(layout->device.index()))
      .number(static_cast<std::uint64_t>(layout->parameter) << 1 | layout->stays)
      .number(static_cast<std::uint64_t>(layout->sequence.axis + 1) << 32 |
              static_cast<std::uint32_t>(layout->sequence.dim))
      .number(static_cast<std::uint64_t>(layout->unit_axes.has_value()));
  InternTable<Layout>& table = context_of(layout->spec)->layouts;
  return table.intern(hash.value(), std::move(layout));
}

}  // namespace

LayoutPtr make_layout(const ShardSpec& spec, at::IntArrayRef strides, std::int64_t offset,
                      at::ScalarType dtype, c10::Device device) {
  auto layout = std::make_shared<Layout>(Layout{{}, spec, strides.vec(), offset, dtype, device});
  layout->dense = is_dense(spec.shape(), strides);
  layout->local_strides = strides_in_order(spec.local_shape(), strides);
  auto shown =
      c10::make_intrusive<ShardImpl>(keys_for(device), at::scalarTypeToTypeMeta(dtype), device);
  shown->set_sizes_and_strides(spec.shape(), strides, offset);
  layout->shown = std::move(shown);
  return interned(std::move(layout));
}

LayoutPtr marked(const LayoutPtr& layout, const ParameterMarks& marks) {
  if (layout->marks() == marks) return layout;
  auto own = std::make_shared<Layout>(*layout);
  static_cast<ParameterMarks&>(*own) = marks;
  return interned(std::move(own));
}

LayoutPtr make_layout(const ShardSpec& spec, at::ScalarType dtype, c10::Device device) {
  return make_layout(spec, contiguous_strides(spec.shape()), 0, dtype, device);
}

at::Tensor wrap(at::Tensor local, LayoutPtr layout) {
  const c10::Device device = local.device();
  return wrap_shown(std::move(local), std::move(layout), device);
}

at::Tensor wrap_shown(at::Tensor local, LayoutPtr layout, c10::Device device) {
  if (local.sizes() != at::IntArrayRef(layout->spec.local_shape())) {
    throw RuleError("a local of shape ", local.sizes(), " where the spec ", layout->spec, " says ",
                    list(layout->spec.local_shape()),
                    ": the rule that made it does not hold for these inputs");
  }
  if (local.scalar_type() != layout->dtype || device != layout->device)
    layout =
        make_layout(layout->spec, layout->strides, layout->offset, local.scalar_type(), device);
  const bool conj = local.is_conj(), neg = local.is_neg();
  at::Tensor t = wrap_checked(std::move(local), layout);
  // libtorch asks the wrapper whether conjugation has to be resolved
  if (conj) t.unsafeGetTensorImpl()->_set_conj(true);
  if (neg) t.unsafeGetTensorImpl()->_set_neg(true);
  return t;
}

at::Tensor wrap_checked(at::Tensor local, const LayoutPtr& layout) {
  const auto& shown = static_cast<const ShardImpl&>(*layout->shown);
  return at::Tensor(c10::make_intrusive<ShardImpl>(
      shown, shown.key_set(), c10::make_intrusive<ShardMeta>(std::move(local), layout)));
}

at::Tensor wrap_sparse(const at::Tensor& local, const ShardSpec& spec) {
  auto layout = make_layout(spec, local.scalar_type(), local.device());
  const auto& shown = static_cast<const ShardImpl&>(*layout->shown);
  const c10::DispatchKeySet keys(
      {c10::computeDispatchKey(local.scalar_type(), at::kSparse, local.device()),
       c10::DispatchKey::SparsePrivateUse2});
  return at::Tensor(c10::make_intrusive<ShardImpl>(
      shown, keys, c10::make_intrusive<ShardMeta>(local, std::move(layout))));
}

at::Tensor on_device(const ShardMeta& meta) {
  if (!in_host_memory(meta)) return meta.local;
  const LocalCallGuard guard;
  return meta.local.to(meta.layout->device);
}

at::Tensor to_host(const at::Tensor& t, bool pinned) {
  const LocalCallGuard guard;
  at::Tensor made = at::empty_like(t, t.options().device(at::kCPU).pinned_memory(pinned));
  made.copy_(t);
  return made;
}

void as_view_of_normal(const at::Tensor& made) {
  auto* impl = static_cast<ShardImpl*>(made.unsafeGetTensorImpl());
  if (impl->is_inference()) impl->make_normal();
}

at::Tensor aligned(at::Tensor local, const Layout& layout) {
  if (!layout.dense) return local;
  const auto sizes = local.sizes();
  const auto strides = local.strides();
  bool same = true;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return local;
    same &= sizes[i] == 1 || strides[i] == layout.local_strides[i];
  }
  if (same) return local;
  const LocalCallGuard guard;
  auto copy = at::empty_strided(sizes, layout.local_strides, local.options());
  copy.copy_(local);
  return copy;
}

at::Tensor wrap_fresh(at::Tensor local, const LayoutPtr& layout) {
  const c10::Device device = local.device();
  return wrap_fresh(std::move(local), layout, device);
}

at::Tensor wrap_fresh(at::Tensor local, const LayoutPtr& layout, c10::Device device) {
  if (local.is_conj() || local.is_neg()) {
    const LocalCallGuard guard;
    local = local.resolve_conj().resolve_neg();
  }
  return wrap_shown(aligned(std::move(local), *layout), layout, device);
}

void install(const at::Tensor& target, at::Tensor local, LayoutPtr layout,
             std::shared_ptr<ViewCopy> copy) {
  auto* impl = target.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(layout->sizes(), layout->strides, layout->offset);
  auto meta = c10::make_intrusive<ShardMeta>(std::move(local), std::move(layout));
  meta->copy = std::move(copy);
  impl->set_backend_meta(std::move(meta));
}

LayoutPtr under(const Layout& layout, const ShardSpec& to) {
  return make_layout(to, layout.strides, layout.offset, layout.dtype, layout.device);
}

ShardSpec reduced_like(const ShardSpec& spec, const ShardSpec& reduced) {
  if (!spec.has_partial()) return spec;
  auto placements = spec.placements();
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (placements[a].is_partial() && reduced.placements()[a].is_replicate())
      placements[a] = Replicate();
  return spec.with_placements(placements);
}

namespace {

// `view`, which was a view of the memory of `old`, as a view of that of `now`, whose elements are
// in the same order. It may show them as another dtype, conjugated or negated.
at::Tensor moved_view(const at::Tensor& view, const at::Tensor& old, const at::Tensor& now) {
  const LocalCallGuard guard;
  const auto bytes = [](const at::Tensor& t) {
    return t.storage_offset() * static_cast<std::int64_t>(t.element_size());
  };
  at::Tensor made;
  if (view.numel() == 0) {
    made = at::empty_strided(view.sizes(), view.strides(), view.options());
  } else if (view.scalar_type() == now.scalar_type()) {
    made = now.as_strided(view.sizes(), view.strides(),
                          view.storage_offset() - old.storage_offset() + now.storage_offset());
  } else {
    made = at::empty({0}, view.options());
    made.set_(
        now.storage(),
        (bytes(view) - bytes(old) + bytes(now)) / static_cast<std::int64_t>(view.element_size()),
        view.sizes(), view.strides());
  }
  if (view.is_complex()) made._set_conj(view.is_conj() != (old.is_conj() != now.is_conj()));
  made._set_neg(view.is_neg() != (old.is_neg() != now.is_neg()));
  return made;
}

}  // namespace

ShardMeta* follow_reduced(c10::TensorImpl* impl, ShardMeta* meta) {
  while (true) {
    c10::intrusive_ptr<ShardMeta> next;
    if (meta->reduced) {
      next = meta->reduced;
    } else if (meta->base && meta->base->reduced && meta->base->layout->dense) {
      const ShardMeta &old = *meta->base, &now = *old.reduced;
      next = c10::make_intrusive<ShardMeta>(
          moved_view(meta->local, old.local, now.local),
          under(*meta->layout, reduced_like(meta->spec(), now.spec())));
      if (now.spec().has_partial()) next->base = old.reduced;
      // Other aliases of the view need not do it again.
      meta->reduced = next;
    } else {
      return meta;
    }
    impl->set_backend_meta(next);
    meta = next.get();
  }
}

void install_reduced(const at::Tensor& target, const at::Tensor& local, const ShardSpec& to) {
  auto* impl = target.unsafeGetTensorImpl();
  ShardMeta& meta = *meta_of(target);
  ShardMeta& owner = meta.base ? *meta.base : meta;
  LayoutPtr layout = under(*owner.layout, to);
  // In exactly the memory order of the old local, so that views keep their positions.
  at::Tensor own = aligned(local, *layout);
  auto now = c10::make_intrusive<ShardMeta>(std::move(own), std::move(layout));
  now->copy = owner.copy;
  owner.reduced = std::move(now);
  follow_reduced(impl, &meta);
}

void as_view_of_partial(const at::Tensor& view, const at::Tensor& input) {
  ShardMeta* made = meta_of(view);
  ShardMeta* of = input.defined() ? meta_of(input) : nullptr;
  if (!of || !made->spec().has_partial() || !of->spec().has_partial() ||
      context_of(of->spec()) != context_of(made->spec()))
    return;
  made->base = of->base ? of->base : c10::intrusive_ptr<ShardMeta>::reclaim_copy(of);
}

LayoutPtr replicated_layout(const std::shared_ptr<MeshContext>& context, const at::Tensor& plain) {
  const auto spec =
      make_spec(context, plain.sizes().vec(), std::vector<Placement>(context->sizes.size()),
                std::vector<DimSharding>(plain.dim()));
  return make_layout(spec, plain.strides(), plain.storage_offset(), plain.scalar_type(),
                     plain.device());
}

}  // namespace tessera::detail
