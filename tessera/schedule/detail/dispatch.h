#pragma once
// One pass of list scheduling: every rank that is free takes the best of what is ready, by a rule.

#include <vector>

#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"

namespace tessera::detail {

/// How a rank chooses. Weight gradients are taken where nothing else is ready, or memory is short.
struct DispatchRule {
  enum class First : unsigned char {
    /// Input gradients before forwards.
    gradients,
    /// Forwards before input gradients.
    forwards,
    /// The other kind than last time.
    alternate,
  };
  First first = First::gradients;
  /// Of forwards of several stages: the last stage first, or the first.
  bool deep_forwards = true;
  /// The same of gradients: the last stage has the longest way to go.
  bool deep_gradients = true;
  /// A rank waits for what comes within this share of the time of what it would do otherwise.
  double patience = 0;
  /// The same where it would do a weight gradient.
  double weight_patience = 0;
};

/// What every pass needs to know.
struct DispatchProblem {
  const std::vector<int>& placement;
  int micro_batches;
  const PipelineCosts& costs;
  /// Whether a stage's backward is one action.
  std::vector<bool> whole;
};

/// What a pass made.
struct Dispatched {
  /// Of each rank.
  std::vector<std::vector<PipelineAction>> actions;
  /// When each action starts: forwards by stage and micro-batch, then I or B, then W.
  std::vector<double> starts;
  double makespan = 0;
};

/// A pass by a rule. `limits`: what each rank may hold; each must hold one micro-batch in all its
/// stages, and then the pass always ends. Time: actions times stages of a rank.
Dispatched dispatch(const DispatchProblem& problem, const std::vector<double>& limits,
                    const DispatchRule& rule);

/// A pass in which the lowest of `priorities` (in the order of Dispatched::starts) goes first, of
/// what can start before anything else could end (eagerness 0; Giffler and Thompson 1960), or
/// of what can start first (1), or between.
Dispatched dispatch(const DispatchProblem& problem, const std::vector<double>& limits,
                    const std::vector<double>& priorities, double eagerness);

/// What a rank must be able to hold at least: one micro-batch of the largest size in all its
/// stages, and the working memory of one.
std::vector<double> least_memory(const std::vector<int>& placement, const PipelineCosts& costs);

}  // namespace tessera::detail
