#pragma once
// MicroBatch: what one rank trains on at once; an optimizer step may have several.

#include <cstdint>

#include "tessera/data/tensor_batch.h"

namespace tessera {

/// The rows that count are the weight of this rank's mean unless the task says otherwise; none: a
/// rank that has run out of data and takes part so that no other one waits.
struct MicroBatch : TensorBatch {
  /// Within the epoch, the same on every rank.
  std::uint64_t index = 0;
};

}  // namespace tessera
