#pragma once
// The random generators of a rank as a value: libtorch's (of the CPU, and of the strategy's device)
// and the one of sharded tensors. To be kept, set again, and forked for a region.
//
//   const GeneratorState before = generator_state(strategy);
//   {
//     const ForkedGenerators own(strategy, 7);   // draws in here disturb no others
//     const at::Tensor noise = at::randn({3});
//   }
//   // generator_state(strategy) == before

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/base/pinned.h"
#include "tessera/tensor/policy.h"
#include "tessera/train/strategy.h"

namespace tessera {

struct GeneratorState {
  /// Of libtorch's generators of this rank: the CPU's default one, and the device's if it has
  /// another.
  std::string local;
  /// Of sharded tensors, the same on every rank; absent for a strategy without a manager.
  std::optional<RandomState> sharded;
  bool operator==(const GeneratorState&) const = default;
};

/// Not collective. Sessions keep the same of every rank in their checkpoints.
GeneratorState generator_state(const Strategy& strategy);
/// Throws ConfigurationError for bytes that are no state. All ranks must set alike what concerns
/// sharded tensors.
void set_generator_state(const Strategy& strategy, const GeneratorState& state);

/// While it lives, random numbers come from generators that begin as they are, or at `seed`;
/// what was there before comes back at its end, by an exception too. Ranks that draw sharded
/// tensors open and close it alike. Where ranks are threads of one process they share libtorch's
/// generators, and so the region.
class ForkedGenerators : Pinned {
 public:
  explicit ForkedGenerators(const Strategy& strategy, std::optional<std::uint64_t> seed = {});
  ~ForkedGenerators();

 private:
  const Strategy& strategy_;
  GeneratorState before_;
};

}  // namespace tessera
