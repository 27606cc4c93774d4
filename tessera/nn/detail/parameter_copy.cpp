// Copies of fully sharded parameters in another dtype.

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <utility>

#include "tessera/nn/detail/gather_units.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

namespace {

// A copy of a fully sharded parameter in another dtype, as autocast makes it. It is a tensor like
// any other, with memory of its own; where an operator needs it gathered, it is taken from what the
// parameter's unit has gathered, ahead of its use and in one message, for as long as neither has
// been written to. Otherwise it is gathered by itself, from its own memory.
class ParameterCopy final : public ParameterSource {
 public:
  // `writes`: how often the unit of parameter `index` had been written to when the copy was made.
  // `precision`: the dtype of the copy, and of results of operators that take it.
  ParameterCopy(std::shared_ptr<GatherUnits> units, std::size_t index, std::uint64_t writes,
                ParameterPrecision precision)
      : units_(std::move(units)), index_(index), writes_(writes), precision_(precision) {}

  // A tensor over the memory of `local` that `copy` is found by and lives as long as.
  static at::Tensor make(ParameterSources& sources, const at::Tensor& local,
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

  ParameterPrecision precision(std::size_t) const override { return precision_; }
  // The copy as operators take it, without an output dtype: backward uses it too.
  at::Tensor computed(std::size_t, const ShardMeta& meta) override {
    if (written_ || meta.local.is_conj() || meta.local.is_neg()) return {};
    return make(context_of(meta.spec())->state->sources, meta.local,
                std::make_shared<ParameterCopy>(units_, index_, writes_,
                                                ParameterPrecision{precision_.compute, {}}));
  }
  at::Tensor gathered(std::size_t, const ShardMeta& meta, const ShardSpec& to) override {
    return written_ ? at::Tensor() : units_->gathered_copy(index_, writes_, meta, to);
  }
  at::Tensor copied(std::size_t, const Layout&, const Layout&, at::Tensor local) override {
    return local;
  }
  void written(std::size_t) override { written_ = true; }

 private:
  const std::shared_ptr<GatherUnits> units_;
  const std::size_t index_;
  const std::uint64_t writes_;
  const ParameterPrecision precision_;
  std::atomic<bool> written_ = false;
};

}  // namespace

at::Tensor GatherUnits::copied(std::size_t index, const Layout& from, const Layout& made,
                               at::Tensor local) {
  const Place& place = places_[index];
  // Else its elements do not lie as those of the parameter do.
  if (place.buffer == kNoBuffer || place.low || from.offset != 0 || made.offset != 0 ||
      made.strides != from.strides || made.device != from.device || !made.dense ||
      !at::isFloatingType(made.dtype))
    return local;
  const Unit& unit = units_[place.unit];
  std::uint64_t writes = 0;
  {
    const std::lock_guard lock(mutex_);
    writes = unit.writes;
  }
  const ParameterPrecision precision{made.dtype, unit.precision.output};
  return ParameterCopy::make(
      context_->state->sources, local,
      std::make_shared<ParameterCopy>(shared_from_this(), index, writes, precision));
}

}  // namespace tessera::detail
