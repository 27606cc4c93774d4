#pragma once
// Pipeline: stages of a model on several ranks, run by a schedule.
//
//   const auto mesh = manager.mesh({{"pipe", 2}});
//   auto parts = split_sequential(net, 2);                       // or stages of one's own
//   Pipeline pipeline(mesh, "pipe", schedule_1f1b(2, 8), {make_stage(parts[manager.rank()])},
//                     [](const auto& outputs, const auto& targets) {
//                       return torch::mse_loss(outputs[0], targets[0]);    // a mean
//                     });
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     const double loss = pipeline.step(split_batch({batch.x}, {batch.y}, 8)).loss;
//     optimizer.step();                                           // of this rank's parameters
//   }
//
// Loss and gradients are those of one process that has all of the batch: the mean over all samples
// of all micro-batches (and of all pipelines beside this one, on the mesh's other axes).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/pipeline/stage.h"
#include "tessera/schedule/action.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/simulate.h"
#include "tessera/tensor/spec/placement.h"

namespace tessera {

/// What went wrong in an action of a pipeline on this rank, in the user's stage or loss: the
/// message names rank, stage, micro-batch and action; the exception itself is nested
/// (std::rethrow_if_nested). The other ranks get a PeerFailedError with the same message.
class PipelineError : public Error {
 public:
  PipelineError(const std::string& what, const PipelineAction& action)
      : Error(what), action_(action) {}
  const PipelineAction& action() const { return action_; }

 private:
  PipelineAction action_;
};

/// The mean loss over a micro-batch, 0-dim, from the outputs of the last stage.
using PipelineLoss = std::function<at::Tensor(const std::vector<at::Tensor>& outputs,
                                              const std::vector<at::Tensor>& targets)>;

/// The mesh of the ranks at this rank's position along `axis`: `mesh` without that axis. What the
/// stages of this rank shard lies on it (tensor-parallel and fully sharded parameters, sharded
/// inputs and targets). Throws InvalidArgument for an axis that the mesh does not have, and where
/// it has no other one.
DeviceMesh stage_mesh(const DeviceMesh& mesh, const std::string& axis);

/// The micro-batches of a step. Each rank gives what it uses, and may give the rest too.
struct PipelineBatch {
  /// inputs[k]: of the first stage, for micro-batch k. At least 1 and at most as many as the
  /// schedule has; the actions of those that are not there are left out. Sizes may differ, and may
  /// be 0.
  std::vector<std::vector<at::Tensor>> inputs;
  /// targets[k]: what the loss takes, on the rank of the last stage.
  std::vector<std::vector<at::Tensor>> targets;
  /// How many samples the mean of micro-batch k is over (tokens, cells, area), at least 0; on the
  /// rank of the last stage. Empty: the rows (dim 0) of targets[k][0].
  std::vector<double> weights;
  /// Why this rank has no batch, where it has none (its loader threw): the step then throws
  /// InvalidArgument with it on every rank.
  std::string problem = {};
};

/// The rows of each tensor in `micro_batches` parts whose sizes differ by at most 1, the larger
/// ones first; parts may be empty. Throws InvalidArgument where tensors have other numbers of rows,
/// and for sharded ones: split what each rank has, and make sharded tensors of the parts
/// (shard_batch()).
PipelineBatch split_batch(const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& targets, int micro_batches);

/// The micro-batches as sharded tensors of the stage's mesh, one placement an axis: each rank gives
/// its rows, any number of them. The inputs on the ranks of the first stage, the targets on those
/// of the last one, since only these use them. The loss is then one of all ranks of the mesh
/// together: leave its axes out of PipelineOptions::sample_axes. Collective over `stage`, the
/// stage's mesh, on which tensors with too few dims for a Shard are replicated.
PipelineBatch shard_batch(PipelineBatch batch, const DeviceMesh& stage,
                          const std::vector<Placement>& placements, bool first, bool last);

/// A tensor that stage `to` takes from stage `from`, past the stages between them. It travels with
/// the activations from stage to stage, and its gradient back; where both stages are on one rank
/// (a V), it stays there.
struct PipelineSkip {
  int from = 0, to = 0;
  bool operator==(const PipelineSkip&) const = default;
};

struct PipelineOptions {
  std::vector<PipelineSkip> skips = {};
  /// Parameters that several stages share, by a name: those that this rank holds. Their values are
  /// made those of the first rank that has one, once; in each step their gradients are summed over
  /// all of them, so that they stay equal. Same shape and dtype, sharded alike on the stages'
  /// meshes; the same optimizer for all.
  std::map<std::string, std::vector<at::Tensor>> tied = {};
  /// The mesh's axes along which ranks have different samples. Unset: all but the pipeline's. Along
  /// the others (tensor, domain) ranks share the samples and the loss. Axes over which inputs and
  /// targets are sharded tensors are such others: the loss is one of all their ranks.
  std::optional<std::vector<std::string>> sample_axes = std::nullopt;
  /// A rank has so many of its fully sharded stages gathered at a time; 0: all.
  int gathered_at_once = 0;
  /// The outputs of the last stage are kept in training, too.
  bool keep_outputs = false;
  /// Every rank gets the loss, and no rank leaves a step that failed on another one. False: only
  /// the last stage's ranks get it, one small message less; what failed late on another rank is
  /// then told in the next step.
  bool loss_everywhere = true;
  /// Random numbers (dropout): each stage draws from the device's default generator, seeded from
  /// this, the number of the step, stage and micro-batch, so that they do not depend on schedule,
  /// placement and ranks; pipelines with other samples draw others. The same holds for the random
  /// numbers of sharded tensors. The generators are afterwards as they were before. Unset: they are
  /// left alone. Ranks that are threads share one generator for the CPU: there nothing is promised
  /// of plain tensors.
  std::optional<std::uint64_t> seed = std::nullopt;
  /// The shapes that stages pass on may differ between micro-batches with inputs of equal shapes:
  /// each message says its shapes. False: they are told once for each combination of input shapes,
  /// and a stage that then gives others is an error on every rank.
  bool dynamic_shapes = false;
};

struct PipelineStepOptions {
  /// Gradients are those of the sum of weight * loss divided by it, instead of those of the mean,
  /// which is the sum divided by the sum of weights: for several steps that make one gradient
  /// (Session::add_gradients). All weights may then be zero. Above 0, the same on all ranks.
  std::optional<double> divisor = std::nullopt;
  /// Called before each forward of a stage, the loss included, which its result outlives; before
  /// the second forward of a stage that recomputes, too. Autocast, for example: no backward runs in
  /// it. May be empty and return null.
  std::function<std::shared_ptr<void>()> forward_scope = {};
};

struct PipelineResult {
  /// The mean over all samples; NaN on ranks that do not get it, and where there are no targets.
  double loss = 0;
  /// The sum of all weights.
  double weight = 0;
  /// The rank of the last stage has its outputs, where they are kept, joined along dim 0; undefined
  /// where the micro-batches' shapes do not allow it, and for sharded tensors.
  std::vector<at::Tensor> outputs = {};
  /// The same of each micro-batch.
  std::vector<std::vector<at::Tensor>> micro_batches = {};
};

class Pipeline {
 public:
  /// Collective over the mesh. Position r along `axis` does actions[r] of the schedule, and gives
  /// the stages that are placed there, in ascending order. A schedule of compute alone is lowered
  /// (messages, gathers, reductions); stages that recompute get full backwards. All ranks compare
  /// schedule, options and tied parameters first. What is deferred in this rank's stages
  /// (tessera/nn/deferred.h) gets its values here, plain and whole, by materialize() over the mesh:
  /// those of a model that one process made. Throws ScheduleError for a schedule that is not
  /// valid, InvalidArgument where stages, skips or options do not fit it (on every rank, wherever
  /// it was seen), MismatchError where ranks differ.
  Pipeline(const DeviceMesh& mesh, std::string axis, PipelineSchedule schedule,
           std::vector<std::shared_ptr<PipelineStage>> stages, PipelineLoss loss,
           PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  /// Collective over the mesh: one forward and backward of all micro-batches. Gradients are added
  /// to what the parameters have. A stage that throws ends the step on all ranks: there it is a
  /// PipelineError, elsewhere a PeerFailedError, and those that all catch it may go on with the
  /// next step, with gradients set to zero; the groups of the mesh have ended then, so that what
  /// holds one of them (DistributedDataParallel) is made again first. Time limits and lost ranks
  /// are errors as of any call of a group, with the action in the message. Throws InvalidArgument
  /// on every rank for a batch that does not fit, GradientError where it is not known how gradients
  /// come together over the mesh's other axes.
  PipelineResult step(const PipelineBatch& batch, const PipelineStepOptions& options = {});
  /// The forwards alone, without gradients; outputs are kept, and the loss is computed where there
  /// are targets. Collective, errors as of step().
  PipelineResult evaluate(const PipelineBatch& batch);

  /// Seconds of each stage's forward, input gradient, weight gradient and full backward with the
  /// start of their messages (the median over `repeats` steps, after one that is not counted, of a
  /// step's mean), and of a message on each edge (half of the way there and back): what
  /// list_schedule() takes; memory stays in units of a micro-batch's activations. Collective over
  /// the mesh; every rank gets the same. Runs steps of its own schedule and, for a kind of backward
  /// that it lacks, of GPipe's; reduces nothing. Call it where gradients are zero or undefined;
  /// they are so afterwards. Running statistics and random numbers go on. Throws as step().
  PipelineCosts measure(const PipelineBatch& batch, int repeats = 3);
  /// When each action of the last step ran on each rank, in seconds since the ranks began it, for
  /// visualize_schedule(). What a rank waited for is no part of its actions; those of micro-batches
  /// that were not there have no length. Collective over the pipeline's axis; every rank gets the
  /// same. Throws InvalidArgument before the first step.
  Timeline timeline() const;

  /// Tied parameters of this rank that stand for one that an earlier rank holds, or the same rank
  /// under another tensor: a norm over all stages counts them there (ClipOptions::elsewhere).
  std::vector<at::Tensor> repeated_parameters() const;

  /// What this rank runs, lowered.
  const PipelineSchedule& schedule() const;
  /// Steps made so far, which is part of what random numbers are seeded from; to set after a
  /// resume.
  std::uint64_t steps() const;
  void set_steps(std::uint64_t steps);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
