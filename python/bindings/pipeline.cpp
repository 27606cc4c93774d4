// Pipelines whose stages and loss are functions of Python's.

#include "tessera/pipeline/pipeline.h"

#include <torch/library.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "callbacks.h"
#include "convert.h"
#include "library.h"
#include "mesh.h"
#include "modules.h"
#include "schedules.h"
#include "tessera/base/error.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::python {

namespace {

using Lists = std::vector<Tensors>;

struct PyPipelineOptions : torch::CustomClassHolder {
  PyPipelineOptions(const std::vector<std::tuple<std::int64_t, std::int64_t>>& skips,
                    const std::optional<Names>& sample_axes, std::int64_t gathered_at_once,
                    bool keep_outputs, bool loss_everywhere, std::optional<std::int64_t> seed,
                    bool dynamic_shapes) {
    for (const auto& [from, to] : skips)
      options.skips.push_back({static_cast<int>(from), static_cast<int>(to)});
    options.sample_axes = sample_axes;
    options.gathered_at_once = static_cast<int>(gathered_at_once);
    options.keep_outputs = keep_outputs;
    options.loss_everywhere = loss_everywhere;
    if (seed) options.seed = static_cast<std::uint64_t>(*seed);
    options.dynamic_shapes = dynamic_shapes;
  }
  PipelineOptions options;
};
using PipelineOptionsPtr = c10::intrusive_ptr<PyPipelineOptions>;

/// (number, tree, recompute, gathered and released at once) each.
using Stages = std::vector<std::tuple<std::int64_t, ModuleTreePtr, bool, bool>>;

// What the function is asked for: a stage's outputs, by the stage's number, or the loss.
enum class Asked : std::uint64_t { stage, loss };

Tensors answered(PythonFunction function, Asked what, std::int64_t stage, const Tensors& given) {
  const std::array<std::uint64_t, 2> numbers = {static_cast<std::uint64_t>(what),
                                                static_cast<std::uint64_t>(stage)};
  return ask(function, numbers, given).value_or(Tensors());
}

std::shared_ptr<PipelineStage> stage_of(PythonFunction function, std::int64_t number,
                                        const ModuleTreePtr& tree, bool recompute, bool gathers) {
  StageOptions options{.recompute = recompute};
  if (gathers) {
    options.gather = [](const torch::nn::Module& m) { gather_parameters(m); };
    options.release = [](const torch::nn::Module& m) { release_parameters(m); };
  }
  return make_stage(
      tree->module,
      [function, number](const Tensors& inputs) {
        return answered(function, Asked::stage, number, inputs);
      },
      options);
}

/// loss, weight; outputs, where they could be joined; those of each micro-batch.
using PipelineValues = std::tuple<double, double, std::vector<std::optional<at::Tensor>>, Lists>;
PipelineValues result_of(PipelineResult&& result) {
  std::vector<std::optional<at::Tensor>> outputs;
  for (const at::Tensor& t : result.outputs)
    outputs.push_back(t.defined() ? std::optional(t) : std::nullopt);
  return {result.loss, result.weight, std::move(outputs), std::move(result.micro_batches)};
}

struct PyPipeline : torch::CustomClassHolder {
  PyPipeline(const MeshPtr& mesh, const std::string& axis, const SchedulePtr& schedule,
             const Stages& stages, std::int64_t function, bool has_loss,
             const PipelineOptionsPtr& options)
      : on(mesh->mesh), along(axis) {
    const auto call =
        reinterpret_cast<PythonFunction>(function);  // NOLINT(performance-no-int-to-ptr)
    std::vector<std::shared_ptr<PipelineStage>> mine;
    for (const auto& [number, tree, recompute, gathers] : stages)
      mine.push_back(stage_of(call, number, tree, recompute, gathers));
    PipelineLoss loss;
    if (has_loss) {
      loss = [call](const Tensors&, const Tensors& targets) {
        const auto made = answered(call, Asked::loss, 0, targets);
        return made.size() == 1 ? made[0] : at::Tensor();
      };
    }
    pipeline.emplace(on, along, schedule->schedule, std::move(mine), std::move(loss),
                     options->options);
  }
  /// `where`: placements on the stage's mesh; empty: the tensors are as they are to be. What only
  /// the ranks of this stage see is told to the others with the step.
  PipelineBatch batch(const Lists& inputs, const Lists& targets, const std::vector<double>& weights,
                      const Names& where, const std::string& problem) const {
    PipelineBatch all{inputs, targets, weights, problem};
    if (where.empty()) return all;
    const std::vector<int>& placement = pipeline->schedule().placement;
    const int here = on.group(along).rank();
    try {
      const DeviceMesh stage = stage_mesh(on, along);
      agree::all(stage.all(), "pipeline", [&] {
        if (!problem.empty()) throw InvalidArgument(problem);
      });
      return shard_batch(std::move(all), stage, placements(where), placement.front() == here,
                         placement.back() == here);
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      all.problem = error.what();
    }
    return all;
  }
  DeviceMesh on;
  std::string along;
  std::optional<Pipeline> pipeline;
};
using PipelinePtr = c10::intrusive_ptr<PyPipeline>;

}  // namespace

void register_pipeline(Library& library) {
  library.class_<PyPipelineOptions>("PipelineOptions")
      .def(torch::init<const std::vector<std::tuple<std::int64_t, std::int64_t>>&,
                       const std::optional<Names>&, std::int64_t, bool, bool,
                       std::optional<std::int64_t>, bool>())
      .def("tie", [](const PipelineOptionsPtr& self, const std::string& name,
                     const Tensors& tensors) { self->options.tied[name] = tensors; });
  library.class_<PyPipeline>("Pipeline")
      .def(torch::init<const MeshPtr&, const std::string&, const SchedulePtr&, const Stages&,
                       std::int64_t, bool, const PipelineOptionsPtr&>())
      .def("step",
           [](const PipelinePtr& self, const Lists& inputs, const Lists& targets,
              const std::vector<double>& weights, const Names& where, const std::string& problem,
              std::optional<double> divisor) {
             return result_of(self->pipeline->step(
                 self->batch(inputs, targets, weights, where, problem), {.divisor = divisor}));
           })
      .def("evaluate",
           [](const PipelinePtr& self, const Lists& inputs, const Lists& targets,
              const std::vector<double>& weights, const Names& where, const std::string& problem) {
             return result_of(
                 self->pipeline->evaluate(self->batch(inputs, targets, weights, where, problem)));
           })
      .def("measure",
           [](const PipelinePtr& self, const Lists& inputs, const Lists& targets,
              const std::vector<double>& weights, const Names& where, const std::string& problem,
              std::int64_t repeats) {
             return c10::make_intrusive<PyCosts>(self->pipeline->measure(
                 self->batch(inputs, targets, weights, where, problem), static_cast<int>(repeats)));
           })
      .def("split",
           [](const PipelinePtr& self, const Tensors& inputs, const Tensors& targets) {
             PipelineBatch parts =
                 split_batch(inputs, targets, self->pipeline->schedule().micro_batches);
             return std::tuple(std::move(parts.inputs), std::move(parts.targets));
           })
      .def("timeline",
           [](const PipelinePtr& self) {
             return c10::make_intrusive<PyTimeline>(self->pipeline->schedule(),
                                                    self->pipeline->timeline());
           })
      .def("repeated_parameters",
           [](const PipelinePtr& self) { return self->pipeline->repeated_parameters(); })
      .def("schedule",
           [](const PipelinePtr& self) {
             return c10::make_intrusive<PySchedule>(self->pipeline->schedule());
           })
      .def("steps",
           [](const PipelinePtr& self) {
             return static_cast<std::int64_t>(self->pipeline->steps());
           })
      .def("set_steps", [](const PipelinePtr& self, std::int64_t steps) {
        self->pipeline->set_steps(static_cast<std::uint64_t>(steps));
      });
  library.def("stage_mesh", [](const MeshPtr& mesh, const std::string& axis) {
    return c10::make_intrusive<PyMesh>(stage_mesh(mesh->mesh, axis));
  });
}

}  // namespace tessera::python
