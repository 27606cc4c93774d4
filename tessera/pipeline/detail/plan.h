#pragma once
// What a pipeline knows of itself on one rank, and what its ranks have agreed on for one step.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/pipeline/detail/tensor_list.h"
#include "tessera/pipeline/pipeline.h"

namespace tessera::detail {

struct PipelinePlan {
  DeviceMesh mesh;
  std::string axis;
  /// Position along the axis.
  int rank = 0;
  PipelineSchedule training = {}, evaluation = {};
  /// By stage: whether its parameters are gathered and released.
  std::vector<bool> sharded = {};
  /// By stage; null for those of other ranks.
  std::vector<std::shared_ptr<PipelineStage>> stages = {};
  PipelineLoss loss = {};
  PipelineOptions options = {};
  /// known[s]: what stage s passes on to s + 1, by the signature of the micro-batch.
  std::vector<std::map<std::uint64_t, ListSpec>> known = {};
  /// The signatures of all steps that this rank has ended well since it last knew none. Where
  /// ranks differ in it, they begin anew.
  std::set<std::uint64_t> settled = {};

  int count() const { return training.stages(); }
  bool holds(int stage) const { return training.placement[stage] == rank; }
  bool first() const { return holds(0); }
  bool last() const { return holds(count() - 1); }
  /// The mesh's other axes.
  std::vector<int> other_axes() const;
  /// Of those, the ones along which samples differ.
  std::vector<int> sample_axes() const;
  /// Whether this rank's samples count: of ranks that share them, one does.
  bool counts() const;
  /// The group along the axis; made anew after a failure.
  Group group() const { return mesh.group(axis); }
  /// Whether a skip travels with the activations from stage `after` to the next one.
  bool travels(const PipelineSkip& skip, int after) const {
    return !stays(skip) && skip.from <= after && after < skip.to;
  }
  /// Whether it never leaves its rank.
  bool stays(const PipelineSkip& skip) const {
    return skip.to > skip.from + 1 && training.placement[skip.from] == training.placement[skip.to];
  }
  void forget_shapes();
  /// Of this rank's stages.
  c10::Device device() const;
};

/// The same on all ranks of one pipeline, but for what only its ends are given.
struct StepFacts {
  bool training = true;
  int micro_batches = 0;
  /// One a micro-batch.
  std::vector<std::uint64_t> signatures;
  bool targets = false;
  /// On the rank of the last stage.
  std::vector<double> weights;
  double total_weight = 0;
  /// Of the losses, per unit of weight: the gradients are then those of the mean.
  double scale = 0;
  std::uint64_t step = 0;
  /// False: gradients stay this rank's own.
  bool reduces = true;
  /// PipelineStepOptions::forward_scope.
  std::function<std::shared_ptr<void>()> forward_scope = {};
};

/// Collective over the mesh. Throws on every rank if one cannot make the step. `divisor`: see
/// PipelineStepOptions.
StepFacts agree_on_step(PipelinePlan& plan, const PipelineBatch& batch, bool training,
                        std::uint64_t step, std::optional<double> divisor = std::nullopt);

/// Tells all ranks of the mesh that this one failed, so that none waits for it.
void tell_failure(const PipelinePlan& plan, const std::string& what);

}  // namespace tessera::detail
