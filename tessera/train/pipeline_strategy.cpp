#include "tessera/train/pipeline_strategy.h"

#include <utility>

#include "tessera/nn/deferred.h"
#include "tessera/train/detail/all_modules.h"

namespace tessera {

PipelineStrategy::PipelineStrategy(const DeviceMesh& mesh, std::string axis,
                                   Parallelise parallelise, std::vector<Placement> batch)
    : ManagedStrategy(mesh.manager(), mesh.all()),
      mesh_(mesh),
      axis_(std::move(axis)),
      parallelise_(std::move(parallelise)),
      batch_(std::move(batch)) {
  const Mesh& layout = mesh_.mesh();
  sharing_ = layout.size(axis_);
  const int others = layout.dims() - 1;
  if (others == 0 && parallelise_)
    throw InvalidArgument(
        "PipelineStrategy: a function that shards stages, and the mesh has "
        "no axis but '",
        axis_, "'");
  if (static_cast<int>(batch_.size()) != others)
    throw InvalidArgument("PipelineStrategy: ", batch_.size(), " placements of a batch for ",
                          others, " axes of the mesh beside '", axis_, "'");
  if (others == 0) return;
  stages_ = stage_mesh(mesh_, axis_);
  sharing_ *= detail::ranks_sharing("PipelineStrategy", batch_, stages_->mesh());
}

void PipelineStrategy::setup(const NamedModules& modules) {
  Strategy::setup(modules);
  const NamedModules fresh = detail::not_among(prepared_, modules);
  if (fresh.empty()) return;
  const auto all = std::make_shared<detail::AllModules>(fresh);
  for (const NamedModule& m : fresh) m.module->to(root_device());
  if (stages_) {
    if (parallelise_) {
      for (const NamedModule& m : fresh) parallelise_(m.name, *m.module, *stages_);
    } else {
      distribute_module(*all, *stages_, NamedPlacements());
    }
  }
  // What the function has left deferred is an error of the session.
  materialize(stages_ ? std::vector<NamedTensor>() : named_tensors(*all), mesh_);
  for (const NamedModule& m : fresh) prepared_.emplace_back(m.module);
}

void PipelineStrategy::teardown() {
  pipeline_.reset();
  Strategy::teardown();
}

double PipelineStrategy::clip(const std::vector<at::Tensor>& parameters,
                              const ClipOptions& options) {
  ClipOptions over_stages = options;
  over_stages.disjoint = mesh_.group(axis_);
  if (const auto pipeline = pipeline_.lock())
    over_stages.elsewhere = pipeline->repeated_parameters();
  return ManagedStrategy::clip(parameters, over_stages);
}

std::shared_ptr<Pipeline> PipelineStrategy::make_pipeline(
    const PipelineSchedule& schedule, std::vector<std::shared_ptr<PipelineStage>> stages,
    PipelineLoss loss, PipelineOptions options) {
  if (!options.loss_everywhere)
    throw InvalidArgument(
        "PipelineStrategy::make_pipeline: every rank's step needs the loss: leave "
        "PipelineOptions::loss_everywhere true");
  if (!options.sample_axes) options.sample_axes = std::vector<std::string>();
  const auto made = std::make_shared<Pipeline>(mesh_, axis_, schedule, std::move(stages),
                                               std::move(loss), std::move(options));
  pipeline_ = made;
  return made;
}

PipelineBatch PipelineStrategy::split(const MicroBatch& batch, int inputs,
                                      int micro_batches) const {
  if (inputs < 0 || inputs > static_cast<int>(batch.tensors.size()))
    throw InvalidArgument("PipelineStrategy::split: ", inputs, " inputs of a batch of ",
                          batch.tensors.size(), " tensors");
  const auto middle = batch.tensors.begin() + inputs;
  PipelineBatch parts =
      split_batch({batch.tensors.begin(), middle}, {middle, batch.tensors.end()}, micro_batches);
  if (!stages_) return parts;
  // One group's position is the same along the axis as in the mesh: the ends know themselves.
  const std::shared_ptr<Pipeline> pipeline = pipeline_.lock();
  if (!pipeline) throw InvalidArgument("PipelineStrategy::split before make_pipeline()");
  const std::vector<int>& placement = pipeline->schedule().placement;
  const int here = mesh_.group(axis_).rank();
  return shard_batch(std::move(parts), *stages_, batch_, placement.front() == here,
                     placement.back() == here);
}

at::Tensor run_pipeline(Pipeline& pipeline, const PipelineBatch& batch, Step& step) {
  step.session().add_gradients(
      [&](double divisor) {
        const Session& session = step.session();
        const PipelineResult done = pipeline.step(
            batch,
            {.divisor = divisor, .forward_scope = [&session] { return session.forward_scope(); }});
        return TotalLoss{done.loss, done.weight};
      },
      step.last());
  return {};
}

PipelineResult evaluate_pipeline(Pipeline& pipeline, const PipelineBatch& batch, Step& step,
                                 const std::string& name) {
  PipelineResult seen = pipeline.evaluate(batch);
  if (seen.weight > 0) step.log(name, seen.loss, seen.weight);
  return seen;
}

}  // namespace tessera
