#pragma once
// A time that no schedule of a pipeline can beat, whatever its order and memory.
//
//   makespan_bound(loop_placement(4), 8, PipelineCosts::uniform(4)).makespan == 27;   // 3 + 8 * 3

#include <vector>

#include "tessera/schedule/costs.h"

namespace tessera {

struct MakespanBound {
  double makespan = 0;
  /// The rank that it comes from.
  int rank = 0;
  /// The busiest rank's compute.
  double work = 0;
};

/// The bound takes each rank's compute, in one machine that may be interrupted, where no action
/// begins before the stages before it have passed a micro-batch on (its head) and each is followed
/// by the gradients that the stages before must still compute (its tail). The best order of such a
/// machine is known (the longest tail of what is ready, Jackson 1955; as a bound for job shops,
/// Carlier 1982), and no rank ends before it.
///
/// It holds for every placement. The largest of the ranks' lowest stages is at least p - 1, so it
/// is at least the work of that rank and the p - 1 forwards before it: with equal stages, (p - 1) F
/// + m (F + I + W) chunks, in one direction as for a V. What a V gains is that the last stage's
/// gradients come to be on the first rank, which can begin its backward work earlier, and less
/// memory; not a shorter start. Few micro-batches and I > F have more: a rank runs out of forwards
/// before the first gradient reaches it.
///
/// Throws InvalidArgument as ranks_of() and PipelineCosts::check().
MakespanBound makespan_bound(const std::vector<int>& placement, int micro_batches,
                             const PipelineCosts& costs);

}  // namespace tessera
