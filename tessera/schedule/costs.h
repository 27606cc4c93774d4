#pragma once
// What the actions of a pipeline cost: times in any one unit (seconds, or forward passes of a
// stage), memory in any one unit (bytes, or activations of a stage).
//
//   PipelineCosts costs = PipelineCosts::uniform(4, 1.0, 1.5, 0.7);   // 4 equal stages, measured
//   costs.stages[0].recompute = true;                   // checkpointed: keeps its input alone
//   costs.stages[0].activation = 0.1;
//   costs.communication = {0.05, 0.05, 0.05};           // stage 0 to 1, 1 to 2, 2 to 3

#include <optional>
#include <vector>

#include "tessera/schedule/action.h"

namespace tessera {

struct StageCosts {
  double forward = 1, input_gradient = 1, weight_gradient = 1;
  /// Time of B; unset: input and weight gradient, and a forward before them where the stage
  /// recomputes.
  std::optional<double> backward = std::nullopt;
  /// Whether the backward runs the forward again. Such a stage is never split into I and W by us,
  /// since either both would run it or the activations would be kept until W; if a schedule does
  /// split it, I and W each run the forward again, as autograd would.
  bool recompute = false;
  /// What a micro-batch holds from the start of its forward to the end of its B or I; with
  /// recomputation, the stage's input.
  double activation = 1;
  /// What of it is held on from I to the end of W; unset: all.
  std::optional<double> kept_for_weight = std::nullopt;
  /// Held besides while a backward action runs, as recomputed activations are.
  double working = 0;
  /// Times of gathering the stage's parameters and of reducing its gradients; both go on beside
  /// compute.
  double gather = 0, reduce = 0;
};

struct PipelineCosts {
  std::vector<StageCosts> stages;
  /// communication[s]: time from the end of a send between stage s and s + 1, in either direction,
  /// until the other rank has it. Empty: none. Between stages of one rank it takes no time.
  std::vector<double> communication;
  /// Relative sizes of the micro-batches, which times and memory are multiplied with. Empty: all 1.
  std::vector<double> sizes;

  static PipelineCosts uniform(int stages, double forward = 1, double input_gradient = 1,
                               double weight_gradient = 1, double communication = 0);

  /// Throws InvalidArgument for negative or infinite values, and for other numbers of stages, edges
  /// and micro-batches than these.
  void check(int stage_count, int micro_batches) const;

  double size(int micro_batch) const { return sizes.empty() ? 1.0 : sizes[micro_batch]; }
  /// A compute action takes so long; 0 for others.
  double time(const PipelineAction& action) const;
  /// An activation or gradient goes from a stage to another beside it, on these ranks.
  double travel(int from, int to, const std::vector<int>& placement) const;
  /// What the action adds to its rank's memory when it starts, and when it has ended (not
  /// positive).
  double held_at_start(const PipelineAction& action) const;
  double held_at_end(const PipelineAction& action) const;
};

// A time that no schedule of a pipeline can beat, whatever its order and memory:
//
//   makespan_bound(loop_placement(4), 8, PipelineCosts::uniform(4)).makespan == 27;   // 3 + 8 * 3

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
