#pragma once
// What an Augmentation makes of one sample, and of the rows of a batch.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/data/dataset.h"

namespace tessera::detail {

/// The batch that a sample is read for.
struct BatchNumber {
  std::uint64_t epoch = 0, step = 0;
};

/// Throws what the function throws, and InvalidArgument unless it returns as many tensors.
Sample augmented(const Sample& sample, const SampleRef& ref, const Augmentation& by,
                 const BatchNumber& batch);
/// Row i is of `refs[i]`. Throws SampleError with the index of the sample, also for one whose
/// tensors cannot be stacked with the first one's.
std::vector<at::Tensor> augmented_rows(const std::vector<at::Tensor>& rows,
                                       std::span<const SampleRef> refs, const Augmentation& by,
                                       const BatchNumber& batch);

}  // namespace tessera::detail
