#include "tessera/train/detail/generators.h"

#include "tessera/train/detail/random_bytes.h"

namespace tessera {

GeneratorState generator_state(const Strategy& strategy) {
  GeneratorState state{detail::random_bytes(strategy.root_device()), std::nullopt};
  if (const DistributedManager* manager = strategy.manager())
    state.sharded = random_state(*manager);
  return state;
}

void set_generator_state(const Strategy& strategy, const GeneratorState& state) {
  detail::set_random_bytes(state.local, strategy.root_device());
  const DistributedManager* manager = strategy.manager();
  if (manager && state.sharded) set_random_state(*manager, *state.sharded);
}

ForkedGenerators::ForkedGenerators(const Strategy& strategy, std::optional<std::uint64_t> seed)
    : strategy_(strategy), before_(generator_state(strategy)) {
  if (!seed) return;
  detail::seed_generators(*seed, strategy.root_device());
  if (const DistributedManager* manager = strategy.manager()) manual_seed(*manager, *seed);
}

ForkedGenerators::~ForkedGenerators() {
  try {
    set_generator_state(strategy_, before_);
  } catch (...) {  // what was taken can be set
  }
}

}  // namespace tessera
