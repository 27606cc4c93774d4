#include "tessera/tensor/policy.h"

#include <utility>

#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera {

void set_policies(const DistributedManager& manager, const Policies& policies) {
  const auto state = detail::rank_state(manager);
  const std::lock_guard lock(state->mutex);
  state->policies = policies;
}

Policies policies(const DistributedManager& manager) {
  const auto state = detail::rank_state(manager);
  const std::lock_guard lock(state->mutex);
  return state->policies;
}

void set_halo_policy(const DistributedManager& manager, const HaloPolicy& policy) {
  detail::rank_state(manager)->halo_policy = policy;
}

HaloPolicy halo_policy(const DistributedManager& manager) {
  return detail::rank_state(manager)->halo_policy;
}

void manual_seed(const DistributedManager& manager, std::uint64_t seed) {
  const auto state = detail::rank_state(manager);
  const std::lock_guard lock(state->mutex);
  state->seed = seed;
  state->stream = 0;
}

RandomState random_state(const DistributedManager& manager) {
  const auto state = detail::rank_state(manager);
  const std::lock_guard lock(state->mutex);
  constexpr std::size_t kMost = 4096;
  if (!state->met.empty()) {
    if (state->met_when_read.size() >= kMost) state->met_when_read.clear();
    state->met_when_read[{state->seed, state->stream}] = state->met;
  }
  return {state->seed, state->stream};
}

void set_random_state(const DistributedManager& manager, const RandomState& random) {
  const auto state = detail::rank_state(manager);
  const std::lock_guard lock(state->mutex);
  state->seed = random.seed;
  state->stream = random.stream;
  // A state that was read before the ranks agreed on one may differ between them: they agree anew.
  const auto read = state->met_when_read.find({random.seed, random.stream});
  state->met = read == state->met_when_read.end() ? detail::GeneratorMeetings() : read->second;
}

RefusalScope::RefusalScope(const DistributedManager& manager)
    : state_(detail::rank_state(manager)), notes_(std::make_shared<std::vector<Refusal>>()) {
  const std::lock_guard lock(state_->mutex);
  before_ = std::exchange(state_->refusals, notes_);
}

RefusalScope::~RefusalScope() {
  const std::lock_guard lock(state_->mutex);
  state_->refusals = std::move(before_);
}

std::vector<Refusal> RefusalScope::refusals() const {
  const std::lock_guard lock(state_->mutex);
  return *notes_;
}

}  // namespace tessera
