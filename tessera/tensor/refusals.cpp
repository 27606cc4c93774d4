#include "tessera/tensor/refusals.h"

#include <utility>

#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera {

RefusalScope::RefusalScope(const DistributedManager& manager)
    : state_(detail::rank_state(manager)), notes_(std::make_shared<detail::RefusalNotes>()) {
  const std::lock_guard lock(state_->mutex);
  before_ = std::exchange(state_->refusals, notes_);
}

RefusalScope::~RefusalScope() {
  const std::lock_guard lock(state_->mutex);
  state_->refusals = std::move(before_);
}

std::vector<Refusal> RefusalScope::refusals() const { return notes_->all(); }

}  // namespace tessera
