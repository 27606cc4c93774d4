#pragma once
// StepWeight: the denominator of a whole optimizer step, over ranks and accumulated micro-batches.
//
//   StepWeight weight(manager.world());
//   for (int k = 0; k < accumulate; ++k) {  // ranks and micro-batches may be ragged
//     const auto scope = k + 1 < accumulate ? std::optional(no_sync(*net)) : std::nullopt;
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

#include <optional>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

class StepWeight {
 public:
  /// How the gradients of the ranks come together before finish().
  enum class Reduced : unsigned char {
    /// Averaged over the group.
    averaged,
    /// Summed over the group, complete on every rank, or of a group of one rank.
    summed
  };
  /// `group`: the ranks whose samples the step counts. How the gradient of a parameter came
  /// together is known where Tessera reduces it (DistributedDataParallel, distribute_module, a
  /// GradientReducer), also where those are mixed. `others` says it for parameters that the program
  /// reduces by hand.
  explicit StepWeight(Group group, std::optional<Reduced> others = std::nullopt);

  /// `loss * weight`, to call backward on. `loss`: 0-dim, floating point, the mean over this
  /// micro-batch. `weight`: samples, tokens, cells or area, at least 0. With weight 0 the result
  /// and its gradient are zero, even if `loss` is NaN (the mean over no samples). No communication.
  /// Throws InvalidArgument for a loss of another shape or dtype; a weight that is negative or not
  /// finite makes finish() throw on every rank instead, so that nobody waits. Ranks that share one
  /// loss would count its samples once each: that is what weigh_global() is for.
  at::Tensor weigh(const at::Tensor& loss, double weight);
  /// The same, and the result is `loss * weight / unit`: where a step's total is about as large as
  /// the last one's, gradients need no division then, and stay in the range of their dtype. The
  /// unit is the caller's, who multiplies the gradients by it; the same on every rank. For take(),
  /// not for finish().
  at::Tensor weigh_in(const at::Tensor& loss, double weight, double unit);

  /// The same for a loss that is the mean over `weight` samples of all ranks of the group together,
  /// and the same on every rank: of a sharded tensor, or of what full_tensor() gave. Its weight
  /// counts once. All ranks call it.
  at::Tensor weigh_global(const at::Tensor& loss, double weight);

  /// Counts a mean loss over `weight` samples whose gradients something else has made. No
  /// communication. A weight that is negative or not finite is one of weigh().
  void count(double loss, double weight);

  /// Divides the gradients of `parameters` by the step's total weight, starts the next step, and
  /// returns the step's mean loss, the same on every rank. Parameters without a gradient are left
  /// out. Collective over the group: one all-reduce of two doubles. Throws InvalidArgument on every
  /// rank if a weight was negative or not finite, or all were zero; GradientError if the group has
  /// several ranks and it is not known how they came together to the gradient of a parameter, if
  /// they did so over ranks that leave out some of the group, or as a mean over more. The gradients
  /// are left as they are then, and the next step is started all the same.
  double finish(const std::vector<at::Tensor>& parameters);

  /// What finish() adds up over the ranks.
  struct Sums {
    /// NaN if a weight was negative or not finite.
    double weight = 0;
    /// The sum of weight * loss.
    double loss = 0;
  };
  /// Returns this rank's sums in place of finish(), for a caller who adds up by other means than a
  /// group. Starts the next step. A sharded loss is summed over its mesh here.
  Sums take();

  /// Forgets what was weighed since the last finish(): for a step that an exception ended.
  void reset();

 private:
  at::Tensor weigh(const at::Tensor& loss, double weight, double unit, bool counts);
  std::optional<double> scale(const at::Tensor& parameter, std::size_t index) const;

  Group group_;
  std::optional<Reduced> others_;
  double weight_ = 0;
  bool valid_ = true;
  /// Sum of weight * loss: of plain losses in the host's memory, and of others on their device
  /// (undefined before the first).
  double host_sum_ = 0;
  at::Tensor sum_;
};

/// The mean loss over the group: sum_r n_r * loss_r / sum_r n_r, a scalar, on every rank.
///
/// Its gradient is scaled for the way in which the ranks' parameter gradients come together, so
/// that they are then the gradient of that mean: d/d loss_r = size * n_r / N if they are averaged
/// (what DistributedDataParallel does unless told otherwise), n_r / N if they are summed. A rank
/// without samples gives n = 0: its loss counts as zero even if it is NaN, and its gradient is
/// zero.
///
///   ranks 0, 1 hold 3 and 1 samples with mean losses 2 and 6:  mean_loss = (3*2 + 1*6) / 4 = 3,
///     gradient factors 1.5 and 0.5 for a mean over ranks, 0.75 and 0.25 for a sum
///
/// `loss`: 0-dim, floating point. `samples`: how many this rank's mean is over, >= 0 (any weight).
/// `reduction`: ReduceOp::avg or sum, the same on all ranks; sum where the loss reaches parameters
/// through sharded tensors (to_local), whose gradients are sums. Collective: one all-reduce of two
/// doubles. Throws InvalidArgument for a loss that is no scalar, another reduction, a negative or
/// non-finite weight, or weights that sum to zero (on every rank). backward() throws GradientError
/// where what was scaled for a mean is summed over ranks of the group.
at::Tensor mean_loss(const at::Tensor& loss, double samples, const Group& group,
                     ReduceOp reduction = ReduceOp::avg);

}  // namespace tessera
