#include "tessera/pipeline/pipeline.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/group/agreement.h"
#include "tessera/pipeline/detail/pipeline_state.h"
#include "tessera/schedule/csv.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/validate.h"

namespace tessera {

PipelineError::~PipelineError() = default;

PipelineBatch split_batch(const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& targets, int micro_batches) {
  if (micro_batches < 1)
    throw InvalidArgument(concat("split_batch into ", micro_batches, " micro-batches; at least 1"));
  std::int64_t rows = -1;
  for (const auto* list : {&inputs, &targets}) {
    for (const at::Tensor& t : *list) {
      if (!t.defined() || t.dim() < 1)
        throw InvalidArgument("split_batch: a tensor is undefined or has no rows (dim 0)");
      if (rows < 0) rows = t.size(0);
      if (t.size(0) != rows)
        throw InvalidArgument(concat("split_batch: tensors with ", rows, " and ", t.size(0),
                                     " rows; all must have the same"));
    }
  }
  PipelineBatch batch;
  batch.inputs.resize(static_cast<std::size_t>(micro_batches));
  if (!targets.empty()) batch.targets.resize(static_cast<std::size_t>(micro_batches));
  std::int64_t begin = 0;
  for (int k = 0; k < micro_batches; ++k) {
    const std::int64_t size =
        std::max<std::int64_t>(rows, 0) / micro_batches + (k < rows % micro_batches ? 1 : 0);
    for (const at::Tensor& t : inputs) batch.inputs[k].push_back(t.narrow(0, begin, size));
    for (const at::Tensor& t : targets) batch.targets[k].push_back(t.narrow(0, begin, size));
    begin += size;
  }
  return batch;
}

namespace {

bool has_any(const PipelineSchedule& schedule, bool (*wanted)(ActionKind)) {
  for (const auto& row : schedule.actions) {
    for (const PipelineAction& a : row) {
      if (wanted(a.kind)) return true;
    }
  }
  return false;
}

std::string own_problem(const detail::PipelinePlan& plan,
                        const std::vector<std::shared_ptr<PipelineStage>>& stages) {
  const std::vector<int> mine = plan.training.stages_of(plan.rank);
  if (stages.size() != mine.size())
    return concat(stages.size(), " stages are given, and the schedule places ", mine.size(),
                  " here: ", list(mine));
  if (std::find(stages.begin(), stages.end(), nullptr) != stages.end()) return "a stage is null";
  for (const PipelineSkip& skip : plan.options.skips) {
    if (skip.from < 0 || skip.to >= plan.count() || skip.from >= skip.to)
      return concat("a skip from stage ", skip.from, " to stage ", skip.to, " of ", plan.count(),
                    "; it must lead forward");
  }
  if (plan.options.sample_axes) {
    for (const std::string& name : *plan.options.sample_axes) {
      if (!plan.mesh.layout().has_axis(name) || name == plan.axis)
        return concat("sample axis '", name, "' is not one of the mesh's other axes");
    }
  }
  if (plan.options.gathered_at_once < 0)
    return concat("gathered_at_once is ", plan.options.gathered_at_once);
  return "";
}

std::string agreed_text(const detail::PipelinePlan& plan, const PipelineSchedule& schedule) {
  std::string text = to_csv(schedule);
  for (const PipelineSkip& skip : plan.options.skips)
    text += concat("skip ", skip.from, " to ", skip.to, "\n");
  text += concat("gathered at once ", plan.options.gathered_at_once, ", loss everywhere ",
                 plan.options.loss_everywhere, ", dynamic shapes ", plan.options.dynamic_shapes,
                 ", seed ", plan.options.seed ? std::to_string(*plan.options.seed) : "none", "\n");
  if (plan.options.sample_axes)
    text += concat("samples along ", list(*plan.options.sample_axes), "\n");
  return text;
}

// One letter for each of this rank's stages, by stage: what all ranks must know to lower alike.
std::string traits(const std::vector<int>& mine,
                   const std::vector<std::shared_ptr<PipelineStage>>& stages) {
  std::string text;
  for (std::size_t i = 0; i < mine.size(); ++i)
    text += concat(mine[i], stages[i]->recomputes() ? " r" : " -", stages[i]->sharded() ? "s" : "-",
                   "\n");
  return text;
}

}  // namespace

Pipeline::Pipeline(const DeviceMesh& mesh, std::string axis, PipelineSchedule schedule,
                   std::vector<std::shared_ptr<PipelineStage>> stages, PipelineLoss loss,
                   PipelineOptions options)
    : state_(new State{.plan = {.mesh = mesh, .axis = std::move(axis)}}) {
  detail::PipelinePlan& plan = state_->plan;
  const Group group = plan.group();
  plan.rank = group.rank();
  plan.loss = std::move(loss);
  plan.options = std::move(options);
  plan.training = schedule;
  // What this rank alone may find wrong is told to all before any of them goes on.
  std::string text, problem;
  std::exception_ptr own;
  try {
    check(schedule);
    text = agreed_text(plan, schedule);
    if (schedule.ranks() != group.size())
      throw InvalidArgument(concat("the schedule is for ", schedule.ranks(), " ranks, and axis '",
                                   plan.axis, "' of the mesh has ", group.size()));
  } catch (const Error& e) {
    own = std::current_exception();
    problem = e.what();
  }
  try {
    detail::throw_together(mesh.all(), problem);
  } catch (const InvalidArgument&) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  require_agreement(mesh.all(), "the pipeline's schedule and options", text);
  detail::throw_together(mesh.all(), own_problem(plan, stages));

  const std::vector<int> mine = schedule.stages_of(plan.rank);
  std::vector<bool> recompute(plan.count()), sharded(plan.count());
  for (const std::string& text : group.all_gather_bytes(traits(mine, stages))) {
    TextReader lines(text);
    std::string flags;
    for (int s = 0; lines >> s >> flags;) {
      recompute[s] = flags[0] == 'r';
      sharded[s] = flags[1] == 's';
    }
  }
  plan.stages.resize(static_cast<std::size_t>(plan.count()));
  for (std::size_t i = 0; i < mine.size(); ++i) plan.stages[mine[i]] = std::move(stages[i]);
  plan.known.resize(static_cast<std::size_t>(plan.count()));

  const bool lowered = has_any(schedule, [](ActionKind kind) { return !is_compute(kind); });
  PipelineSchedule forwards = schedule;
  for (auto& row : forwards.actions)
    std::erase_if(row, [](const PipelineAction& a) { return !is_compute(a.kind); });
  LowerOptions lower_options;
  lower_options.sharded = sharded;
  lower_options.gathered_at_once = plan.options.gathered_at_once;
  plan.evaluation = lower(forward_only(forwards), lower_options);
  if (!lowered) {
    lower_options.reduced.assign(static_cast<std::size_t>(plan.count()), true);
    plan.training = lower(join_backward(schedule, recompute), lower_options);
  }
  state_->ties = detail::TiedParameters(plan);
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

PipelineResult Pipeline::State::run(const PipelineBatch& batch, bool training) {
  try {
    const detail::StepFacts facts = detail::agree_on_step(plan, batch, training, steps);
    if (training) ties.begin();
    detail::StepRun step(plan, batch, facts);
    step.run();
    if (training) ties.sum(plan);
    PipelineResult result = finish(step, facts);
    if (training) spans = step.spans();
    plan.settled.insert(facts.signatures.begin(), facts.signatures.end());
    if (training) ++steps;
    return result;
  } catch (...) {
    // Ranks may have come to different points of telling each other shapes.
    plan.forget_shapes();
    throw;
  }
}

PipelineResult Pipeline::State::finish(detail::StepRun& step, const detail::StepFacts& facts) {
  PipelineResult result;
  result.weight = facts.total_weight;
  const at::Tensor sum = at::full({1}, plan.counts() ? step.loss_sum() : 0.0, at::kDouble);
  const bool everywhere = plan.options.loss_everywhere;
  if (everywhere)
    plan.mesh.all().all_reduce(sum, ReduceOp::sum, {.name = "pipeline loss"});
  else if (plan.last() && facts.targets)
    plan.mesh.group(plan.other_axes()).all_reduce(sum, ReduceOp::sum, {.name = "pipeline loss"});
  result.loss = facts.targets && (everywhere || plan.last())
                    ? sum.item<double>() / facts.total_weight
                    : std::numeric_limits<double>::quiet_NaN();
  std::vector<std::vector<at::Tensor>> joined;
  for (const auto& outputs : step.outputs()) {
    joined.resize(std::max(joined.size(), outputs.size()));
    for (std::size_t i = 0; i < outputs.size(); ++i) joined[i].push_back(outputs[i]);
  }
  for (const auto& list : joined) {
    const bool rows =
        std::all_of(list.begin(), list.end(), [](const at::Tensor& t) { return t.dim() > 0; });
    result.outputs.push_back(rows ? at::cat(list) : at::stack(list));
  }
  return result;
}

PipelineResult Pipeline::step(const PipelineBatch& batch) { return state_->run(batch, true); }
PipelineResult Pipeline::evaluate(const PipelineBatch& batch) { return state_->run(batch, false); }

const PipelineSchedule& Pipeline::schedule() const { return state_->plan.training; }
std::uint64_t Pipeline::steps() const { return state_->steps; }
void Pipeline::set_steps(std::uint64_t steps) { state_->steps = steps; }

}  // namespace tessera
