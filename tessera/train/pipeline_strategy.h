#pragma once
// PipelineStrategy: a model whose stages lie along one axis of a mesh, through the trainer. Each
// rank's task has the modules of its own stages, under the names that they have in the complete
// model, so that checkpoints are read by any other pipeline, and by none.
//
//   struct Part : Task {
//     Part(std::shared_ptr<PipelineStrategy> s, torch::nn::Sequential p) : strategy(s), part(p) {}
//     NamedModules modules() override { return {{"net", part.ptr()}}; }
//     Optimizers optimizers() override {                       // after the strategy's setup()
//       pipeline = strategy->make_pipeline(schedule_1f1b(2, 8), {make_stage(part)}, mse);
//       return {std::make_shared<torch::optim::Adam>(part->parameters())};
//     }
//     at::Tensor training_step(const MicroBatch& b, Step& step) override {
//       return run_pipeline(*pipeline, strategy->split(b, 1, 8), step);
//     }
//     void validation_step(const MicroBatch& b, Step& step) override {
//       evaluate_pipeline(*pipeline, strategy->split(b, 1, 8), step);
//     }
//     ...
//   };

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/pipeline/pipeline.h"
#include "tessera/train/strategies.h"
#include "tessera/train/task.h"

namespace tessera {

class PipelineStrategy : public ManagedStrategy {
 public:
  /// `axis`: of the stages. `parallelise` is called in setup() for each module of this rank with
  /// the mesh of its stages (stage_mesh()), to shard it there: tensor_parallel(), fully_shard(),
  /// distribute_module(). Without it parameters are replicated on that mesh. `batch`: how the
  /// tensors of a batch lie on that mesh, one placement an axis; each rank gives the rows that are
  /// its own. On a mesh of `axis` alone there is none of this: modules and batches stay plain.
  /// Ranks at one position of the stages' mesh must read the same samples, whatever their stage.
  /// Throws InvalidArgument for an axis that the mesh does not have, and for placements that do not
  /// fit the other ones or are Partial.
  PipelineStrategy(const DeviceMesh& mesh, std::string axis, Parallelise parallelise = {},
                   std::vector<Placement> batch = {});
  std::string name() const override { return "pipeline"; }
  Abilities abilities() const override { return {.modules_differ = true}; }
  void setup(const NamedModules& modules) override;
  void teardown() override;
  /// The norm is that of all stages, tied parameters once.
  double clip(const std::vector<at::Tensor>& parameters, const ClipOptions& options) override;
  /// All ranks know the loss of all samples.
  double loss_weight(double mine) override { return mine; }
  int sharing() const override { return sharing_; }
  int loss_sharing() const override { return size(); }

  const DeviceMesh& mesh() const { return mesh_; }
  const std::string& axis() const { return axis_; }
  /// This rank's stages have it; absent on a mesh of the stages' axis alone.
  const std::optional<DeviceMesh>& stages() const { return stages_; }
  /// The pipeline of this strategy's task, whose stages are prepared: call it after setup(), in
  /// Task::optimizers(). Collective, errors as of Pipeline. Without sample_axes in the options all
  /// ranks of a stage share its samples and loss, as they do with sharded tensors. The strategy
  /// knows the last one made. Throws InvalidArgument without PipelineOptions::loss_everywhere.
  std::shared_ptr<Pipeline> make_pipeline(const PipelineSchedule& schedule,
                                          std::vector<std::shared_ptr<PipelineStage>> stages,
                                          PipelineLoss loss, PipelineOptions options = {});
  /// The batch's first `inputs` tensors as inputs of the first stage, the others as targets of the
  /// last one, in `micro_batches` parts of this rank's rows, on the stages' mesh. Collective over
  /// that mesh.
  PipelineBatch split(const MicroBatch& batch, int inputs, int micro_batches) const;

 private:
  DeviceMesh mesh_;
  std::string axis_;
  std::optional<DeviceMesh> stages_;
  Parallelise parallelise_;
  std::vector<Placement> batch_;
  int sharing_ = 1;
  std::weak_ptr<Pipeline> pipeline_;
  /// What setup() has made parallel: it stays so, for another run.
  std::vector<std::weak_ptr<torch::nn::Module>> prepared_;
};

/// Task::training_step() of a pipeline: its gradients become those of the session's step, which may
/// have several such batches (TrainerOptions::accumulate). Returns an undefined tensor, for
/// training_step() to return. Errors as of Pipeline::step() and Session::add_gradients().
at::Tensor run_pipeline(Pipeline& pipeline, const PipelineBatch& batch, Step& step);
/// Task::validation_step() of a pipeline: logs its loss. The outputs are on the ranks of the last
/// stage. Errors as of Pipeline::evaluate().
PipelineResult evaluate_pipeline(Pipeline& pipeline, const PipelineBatch& batch, Step& step,
                                 const std::string& name = "loss");

}  // namespace tessera
