#pragma once
// The mean over all ranks' samples, from each rank's mean over its own: uneven data gives the same
// loss and gradient as one process.

#include <ATen/core/Tensor.h>

#include "tessera/comm/group/group.h"

namespace tessera {

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
