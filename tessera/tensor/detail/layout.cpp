#include "tessera/tensor/detail/layout.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/tensor/detail/no_dispatch.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

namespace {

// What is said to those who read memory directly.
constexpr char kNoMemory[] =
    "a ShardTensor's memory is spread over ranks: use tessera::to_local() for this rank's part, tessera::full_tensor() for the whole, "
    "tessera::print() or tessera::save() to print or save it";

// The subclass only exists to reach protected members.
struct ShardImpl final : c10::TensorImpl {
  ShardImpl(c10::DispatchKeySet keys, caffe2::TypeMeta dtype, c10::Device device, c10::intrusive_ptr<ShardMeta> meta)
      : TensorImpl(keys, dtype, device) {
    set_storage_access_should_throw();
    extra_meta_ = std::make_unique<c10::ExtraMeta>();
    extra_meta_->backend_meta_ = std::move(meta);
    extra_meta_->custom_data_ptr_error_msg_.emplace(kNoMemory, sizeof kNoMemory - 1);
  }
  const char* tensorimpl_type_name() const override { return kNoMemory; }
};

c10::DispatchKeySet keys_for(c10::Device device) {
  // The inner backend's key stays in the set: set_data() swaps between dense tensors only, and autocast looks at it. PrivateUse2 has the higher
  // priority.
  const auto backend = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  const auto autocast = device.is_cuda() ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  return c10::DispatchKeySet({backend, kShardKey, autocast});
}

// Dims from the slowest to the fastest.
std::vector<int> memory_order(at::IntArrayRef strides) {
  std::vector<int> order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return strides[a] > strides[b]; });
  return order;
}

}  // namespace

Dims contiguous_strides(at::IntArrayRef sizes) {
  Dims strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<std::int64_t>(sizes[i], 1);
  }
  return strides;
}

bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t step = 1;
  std::vector<int> order = memory_order(strides);
  for (const auto n : sizes) {
    if (n == 0) return true;
  }
  for (std::size_t i = order.size(); i-- > 0;) {
    if (sizes[order[i]] == 1) continue;
    if (strides[order[i]] != step) return false;
    step *= sizes[order[i]];
  }
  return true;
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
      .number(static_cast<std::uint64_t>(layout->device.type()) << 8 | static_cast<std::uint8_t>(layout->device.index()))
      .number(layout->parameter);
  InternTable<Layout>& table = context_of(layout->spec)->layouts;
  return table.intern(hash.value(), std::move(layout));
}

}  // namespace

LayoutPtr make_layout(const ShardSpec& spec, at::IntArrayRef strides, std::int64_t offset, at::ScalarType dtype, c10::Device device) {
  auto layout = std::make_shared<Layout>(Layout{spec, strides.vec(), offset, dtype, device});
  layout->dense = is_dense(spec.shape(), strides);
  layout->local_strides = strides_in_order(spec.local_shape(), strides);
  layout->keys = keys_for(device);
  return interned(std::move(layout));
}

LayoutPtr as_parameter(const LayoutPtr& layout) {
  if (layout->parameter) return layout;
  auto own = std::make_shared<Layout>(*layout);
  own->parameter = true;
  return interned(std::move(own));
}

LayoutPtr make_layout(const ShardSpec& spec, at::ScalarType dtype, c10::Device device) {
  return make_layout(spec, contiguous_strides(spec.shape()), 0, dtype, device);
}

at::Tensor wrap(at::Tensor local, LayoutPtr layout) {
  if (local.sizes() != at::IntArrayRef(layout->spec.local_shape())) {
    throw RuleError(concat("a local of shape ", local.sizes(), " where the spec ", layout->spec, " says ", list(layout->spec.local_shape()),
                           ": the rule that made it does not hold for these inputs"));
  }
  const Layout& l = *layout;
  const auto dtype = local.dtype();
  const auto device = local.device();
  auto impl = c10::make_intrusive<ShardImpl>(l.keys, dtype, device, c10::make_intrusive<ShardMeta>(std::move(local), std::move(layout)));
  impl->set_sizes_and_strides(l.sizes(), l.strides, l.offset);
  return at::Tensor(std::move(impl));
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
  if (local.is_conj() || local.is_neg()) {
    const LocalCallGuard guard;
    local = local.resolve_conj().resolve_neg();
  }
  return wrap(aligned(std::move(local), *layout), layout);
}

void install(const at::Tensor& target, at::Tensor local, LayoutPtr layout, std::shared_ptr<ViewCopy> copy) {
  auto* impl = target.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(layout->sizes(), layout->strides, layout->offset);
  auto meta = c10::make_intrusive<ShardMeta>(std::move(local), std::move(layout));
  meta->copy = std::move(copy);
  impl->set_backend_meta(std::move(meta));
}

LayoutPtr replicated_layout(const std::shared_ptr<MeshContext>& context, const at::Tensor& plain) {
  const auto spec = make_spec(context, plain.sizes().vec(), std::vector<Placement>(context->sizes.size()), std::vector<DimSharding>(plain.dim()));
  return make_layout(spec, plain.strides(), plain.storage_offset(), plain.scalar_type(), plain.device());
}

}  // namespace tessera::detail
