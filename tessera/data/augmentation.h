#pragma once
// Augmentation: flips, crops, noise; what a user's function makes of complete samples, drawn alike
// whatever the ranks are.
//
//   const Augmentation flips{
//       .function =
//           [](Sample sample, const at::Generator& draws) {
//             if (at::rand({1}, draws).item<float>() < 0.5F) sample[0] = sample[0].flip(-1);
//             return sample;
//           },
//       .seed = 7};
//   Loader loader({data}, order, mapping, rank, {.workers = 2, .augment = flips});
//
// A loader whose ranks read complete samples augments them before they are sharded. Where each rank
// reads its own shard of every sample, augment_batch() of shard_batch.h brings each sample to one
// rank and its shards back.

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>

#include "tessera/data/dataset.h"

namespace tessera {

struct Augmentation {
  /// Returns what is trained on in place of a sample: as many tensors, of one shape and dtype for
  /// all samples of a batch, on the same device. The sample is a copy, which it may write to. It
  /// draws from `draws` alone, a generator of the CPU, and is called by several threads at once.
  /// Empty: samples stay as they are.
  std::function<Sample(Sample sample, const at::Generator& draws)> function = {};
  /// With the epoch, the step and the sample's number all that the draws depend on: they are the
  /// same on any number of ranks and workers, and in a run that is resumed. A sample that a batch
  /// holds twice is drawn for once.
  std::uint64_t seed = 0;
};

}  // namespace tessera
