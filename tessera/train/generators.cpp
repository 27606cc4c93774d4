#include "tessera/train/generators.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

namespace {

std::vector<at::Generator> generators_of(c10::Device device) {
  std::vector<at::Generator> all{at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

std::string random_bytes(c10::Device device) {
  std::string bytes;
  for (at::Generator& generator : generators_of(device)) {
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    const std::uint64_t length = state.nbytes();
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes.append(static_cast<const char*>(state.const_data_ptr()), length);
  }
  return bytes;
}

// A device's part is left out where there is no such device now.
void set_random_bytes(const std::string& bytes, c10::Device device) {
  std::size_t at = 0;
  for (at::Generator& generator : generators_of(device)) {
    if (at == bytes.size() && at > 0) return;  // saved where there was no such device
    std::uint64_t length = 0;
    if (bytes.size() - at < sizeof length) throw ConfigurationError("a random state is cut short");
    std::memcpy(&length, bytes.data() + at, sizeof length);
    at += sizeof length;
    if (bytes.size() - at < length) throw ConfigurationError("a random state is cut short");
    const at::Tensor state = at::empty({static_cast<std::int64_t>(length)}, at::kByte);
    std::memcpy(state.data_ptr(), bytes.data() + at, length);
    at += length;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace

GeneratorState generator_state(const Strategy& strategy) {
  GeneratorState state{random_bytes(strategy.root_device()), std::nullopt};
  if (const DistributedManager* manager = strategy.manager())
    state.sharded = random_state(*manager);
  return state;
}

void set_generator_state(const Strategy& strategy, const GeneratorState& state) {
  set_random_bytes(state.local, strategy.root_device());
  const DistributedManager* manager = strategy.manager();
  if (manager && state.sharded) set_random_state(*manager, *state.sharded);
}

ForkedGenerators::ForkedGenerators(const Strategy& strategy, std::optional<std::uint64_t> seed)
    : strategy_(strategy), before_(generator_state(strategy)) {
  if (!seed) return;
  for (at::Generator& generator : generators_of(strategy.root_device())) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(*seed);
  }
  if (const DistributedManager* manager = strategy.manager()) manual_seed(*manager, *seed);
}

ForkedGenerators::~ForkedGenerators() {
  try {
    set_generator_state(strategy_, before_);
  } catch (...) {  // what was taken can be set
  }
}

}  // namespace tessera
