#pragma once
// StepWeight: the denominator of a whole optimizer step, over ranks and accumulated micro-batches.
//
//   StepWeight weight(manager.world());
//   for (int k = 0; k < accumulate; ++k) {  // ranks and micro-batches may be ragged
//     const auto scope = k + 1 < accumulate ? std::optional(ddp.no_sync()) : std::nullopt;
//     const auto loss = torch::mse_loss(ddp(batch[k].x), batch[k].y);     // the mean over its rows
//     weight.weigh(loss, batch[k].rows).backward();
//   }
//   const double mean = weight.finish(net->parameters());   // divides, and gives the step's loss
//   optimizer.step();
//
// The gradients are then those of the mean over all samples of all ranks and micro-batches, as one
// process with one large batch would have them. Averaging the means of micro-batches, as loops
// often do, weighs a short batch as much as a long one.

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

class StepWeight {
 public:
  /// How the gradients of the ranks come together before finish().
  enum class Reduced : unsigned char {
    /// Averaged over the group: what DistributedDataParallel makes.
    averaged,
    /// Summed over the group, or not reduced over it at all where it has one rank.
    summed
  };
  /// `group`: the ranks whose losses are of different samples. Ranks that share one loss (those of
  /// the mesh on which it is sharded) are not in it together: they would count its samples once
  /// each. For a loss that all ranks share, the group of this rank alone, and `summed`.
  explicit StepWeight(Group group, Reduced reduced = Reduced::averaged);

  /// `loss * weight`, to call backward on. `loss`: 0-dim, floating point, the mean over this
  /// micro-batch. `weight`: samples, tokens, cells or area, at least 0. With weight 0 the result
  /// and its gradient are zero, even if `loss` is NaN (the mean over no samples). No communication.
  /// Throws InvalidArgument for a loss of another shape or dtype; a weight that is negative or not
  /// finite makes finish() throw on every rank instead, so that nobody waits.
  at::Tensor weigh(const at::Tensor& loss, double weight);

  /// Divides the gradients of `parameters` by the step's total weight, starts the next step, and
  /// returns the step's mean loss, the same on every rank. Parameters without a gradient are left
  /// out. Collective over the group: one all-reduce of two doubles. Throws InvalidArgument on every
  /// rank if a weight was negative or not finite, or all were zero; the gradients are left as they
  /// are then, and the next step is started all the same.
  double finish(const std::vector<at::Tensor>& parameters);

  /// What finish() adds up over the ranks.
  struct Sums {
    /// NaN if a weight was negative or not finite.
    double weight = 0;
    /// Of weight * loss.
    double loss = 0;
  };
  /// In place of finish(), for a caller who adds up by other means than a group: this rank's sums.
  /// Starts the next step. A sharded loss is summed over its mesh here.
  Sums take();

  /// Forgets what was weighed since the last finish(): for a step that an exception ended.
  void reset();

 private:
  Group group_;
  Reduced reduced_;
  double weight_ = 0;
  bool valid_ = true;
  /// Sum of weight * loss, on the losses' device; undefined before the first weigh().
  at::Tensor sum_;
};

}  // namespace tessera
