#include "tessera/nn/detail/parameter_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "tessera/nn/detail/gather_units.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

ParameterCopy::ParameterCopy(std::shared_ptr<GatherUnits> units, std::size_t index,
                             std::uint64_t writes, at::ScalarType dtype,
                             std::optional<at::ScalarType> output)
    : units_(std::move(units)), index_(index), writes_(writes), dtype_(dtype), output_(output) {}

at::Tensor ParameterCopy::make(ParameterSources& sources, const at::Tensor& local,
                               const std::shared_ptr<ParameterCopy>& copy) {
  const LocalCallGuard guard;
  const at::TensorOptions options = local.options().requires_grad(false);
  // Ranks without rows know it too.
  const at::Tensor memory = local.numel() > 0 ? local : at::empty({1}, options);
  at::Tensor made = at::from_blob(
      memory.data_ptr(), local.sizes(), local.strides(), [memory, copy](void*) {}, options);
  sources.add(made, copy, 0);
  return made;
}

ParameterPrecision ParameterCopy::precision(std::size_t) const { return {dtype_, output_}; }

at::Tensor ParameterCopy::computed(std::size_t, const ShardMeta& meta) {
  if (written_ || meta.local.is_conj() || meta.local.is_neg()) return {};
  return make(context_of(meta.spec())->state->sources, meta.local,
              std::make_shared<ParameterCopy>(units_, index_, writes_, dtype_, std::nullopt));
}

at::Tensor ParameterCopy::gathered(std::size_t, const ShardMeta& meta, const ShardSpec& to) {
  return written_ ? at::Tensor() : units_->gathered_copy(index_, writes_, meta, to);
}

at::Tensor ParameterCopy::copied(std::size_t, const Layout&, const Layout&, at::Tensor local) {
  return local;
}

void ParameterCopy::written(std::size_t) { written_ = true; }

}  // namespace tessera::detail
