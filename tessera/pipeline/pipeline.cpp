#include "tessera/pipeline/pipeline.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/pipeline/detail/pipeline_state.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/validate.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

DeviceMesh stage_mesh(const DeviceMesh& mesh, const std::string& axis) {
  const Mesh& all = mesh.mesh();
  const int at = all.index(axis);
  std::vector<std::string> names = all.names();
  names.erase(names.begin() + at);
  if (names.empty())
    throw InvalidArgument("stage_mesh: the mesh has no axis but '", axis,
                          "', so that each stage is on one rank; give it another axis, of "
                          "size 1 if need be");
  return mesh.manager().mesh(all.submesh(names, mesh.manager().rank()));
}

PipelineBatch shard_batch(PipelineBatch batch, const DeviceMesh& stage,
                          const std::vector<Placement>& placements, bool first, bool last) {
  if (static_cast<int>(placements.size()) != stage.mesh().dims())
    throw InvalidArgument("shard_batch: ", placements.size(), " placements for ",
                          stage.mesh().dims(), " axes of the stage's mesh");
  const auto distribute = [&](std::vector<std::vector<at::Tensor>>& lists, bool used) {
    for (auto& list : lists) {
      for (at::Tensor& t : list) {
        if (!used || is_sharded(t)) continue;
        std::vector<Placement> where;
        for (const Placement& p : placements)
          where.push_back(p.is_shard() && p.dim >= t.dim() ? Placement(Replicate()) : p);
        t = from_local(t, stage, where);
      }
    }
  };
  distribute(batch.inputs, first);
  distribute(batch.targets, last);
  return batch;
}

PipelineBatch split_batch(const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& targets, int micro_batches) {
  if (micro_batches < 1)
    throw InvalidArgument("split_batch into ", micro_batches, " micro-batches; at least 1");
  std::int64_t rows = -1;
  for (const auto* list : {&inputs, &targets}) {
    for (const at::Tensor& t : *list) {
      if (!t.defined() || t.dim() < 1)
        throw InvalidArgument("split_batch: a tensor is undefined or has no rows (dim 0)");
      if (is_sharded(t))
        throw InvalidArgument(
            "split_batch: a tensor is sharded, and its rows are other ranks' too; split what each "
            "rank has, and make sharded tensors of the parts (shard_batch())");
      if (rows < 0) rows = t.size(0);
      if (t.size(0) != rows)
        throw InvalidArgument("split_batch: tensors with ", rows, " and ", t.size(0),
                              " rows; all must have the same");
    }
  }
  PipelineBatch batch;
  batch.inputs.resize(micro_batches);
  if (!targets.empty()) batch.targets.resize(micro_batches);
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

std::string own_problem(const detail::PipelinePlan& plan,
                        const std::vector<std::shared_ptr<PipelineStage>>& stages) {
  const std::vector<int> mine = plan.training.stages_of(plan.rank);
  if (stages.size() != mine.size())
    return concat(stages.size(), " stages are given, and the schedule places ", mine.size(),
                  " here: ", list(mine));
  if (std::ranges::find(stages, nullptr) != stages.end()) return "a stage is null";
  for (const PipelineSkip& skip : plan.options.skips) {
    if (skip.from < 0 || skip.to >= plan.count() || skip.from >= skip.to)
      return concat("a skip from stage ", skip.from, " to stage ", skip.to, " of ", plan.count(),
                    "; it must lead forward");
  }
  if (plan.options.sample_axes) {
    for (const std::string& name : *plan.options.sample_axes) {
      if (!plan.mesh.mesh().has_axis(name) || name == plan.axis)
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

// All that this rank's stages hold.
std::vector<NamedTensor> tensors_of(const detail::PipelinePlan& plan,
                                    const std::vector<std::shared_ptr<PipelineStage>>& stages) {
  const std::vector<int> mine = plan.training.stages_of(plan.rank);
  std::vector<NamedTensor> all;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    for (const NamedTensor& entry : stages[i]->tensors())
      all.push_back({concat("stage ", mine[i], ": ", entry.name), entry.tensor, entry.parameter});
  }
  for (const auto& [name, tensors] : plan.options.tied)
    for (const at::Tensor& t : tensors) all.push_back({name, t, true});
  return all;
}

// What this rank alone may find wrong is told to all before any of them goes on. Gives what is to
// have values.
std::vector<NamedTensor> agree_on_schedule(
    const detail::PipelinePlan& plan, const std::vector<std::shared_ptr<PipelineStage>>& stages) {
  const PipelineSchedule& schedule = plan.training;
  const Group all = plan.mesh.all();
  std::string text;
  std::exception_ptr own;
  std::vector<NamedTensor> tensors;
  try {
    agree::all(all, "pipeline", [&] {
      try {
        check(schedule);
        text = agreed_text(plan, schedule);
        if (const int ranks = plan.group().size(); schedule.ranks() != ranks)
          throw InvalidArgument("the schedule is for ", schedule.ranks(), " ranks, and axis '",
                                plan.axis, "' of the mesh has ", ranks,
                                ": make one for as many ranks");
      } catch (const Error& e) {  // its faults stay with this rank
        own = std::current_exception();
        throw InvalidArgument(e.what());
      }
    });
  } catch (const InvalidArgument&) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  agree::same(all, "the pipeline's schedule and options", text);
  agree::all(all, "pipeline", [&] {
    const std::string problem = own_problem(plan, stages);
    if (!problem.empty()) throw InvalidArgument(problem);
    tensors = tensors_of(plan, stages);
  });
  return tensors;
}

// Of a schedule that has messages, which is taken as it is.
void require_gathers(const detail::PipelinePlan& plan) {
  std::string refused;
  if (plan.options.gathered_at_once != 0)
    refused = "gathered_at_once is for schedules of compute alone, and this one has messages";
  for (int s = 0; s < plan.count(); ++s) {
    const auto& row = plan.training.actions[plan.training.placement[s]];
    const PipelineAction gather{ActionKind::gather, s, -1};
    if (plan.sharded[s] && std::ranges::find(row, gather) == row.end())
      refused = concat("stage ", s, " is fully sharded, and the schedule never gathers it");
  }
  if (!refused.empty()) throw InvalidArgument("pipeline: " + refused);
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
  materialize(agree_on_schedule(plan, stages), mesh);

  const std::vector<int> mine = schedule.stages_of(plan.rank);
  std::vector<bool> recompute(plan.count()), sharded(plan.count());
  // Pipelines beside each other hold stages that are alike.
  const std::string own_traits = traits(mine, stages);
  std::string alike = own_traits;
  for (const auto& [name, tensors] : plan.options.tied) alike += concat("tied ", name, "\n");
  const Group others = mesh.group(plan.other_axes());
  if (others.size() > 1) agree::same(others, "the stages of a pipeline", alike);
  for (const std::string& one : group.all_gather_bytes(own_traits)) {
    TextReader lines(one);
    std::string flags;
    for (int s = 0; lines >> s >> flags;) {
      recompute[s] = flags[0] == 'r';
      sharded[s] = flags[1] == 's';
    }
  }
  plan.stages.resize(plan.count());
  for (std::size_t i = 0; i < mine.size(); ++i) plan.stages[mine[i]] = std::move(stages[i]);
  plan.known.resize(plan.count());

  plan.sharded = sharded;
  PipelineSchedule computed = schedule;
  for (auto& row : computed.actions)
    std::erase_if(row, [](const PipelineAction& a) { return !is_compute(a.kind); });
  const bool lowered = computed != schedule;
  if (lowered) require_gathers(plan);
  LowerOptions lower_options{.sharded = sharded, .gathered_at_once = plan.options.gathered_at_once};
  plan.evaluation = lower(forward_only(computed), lower_options);
  if (!lowered) {
    lower_options.reduced.assign(plan.count(), true);
    plan.training = lower(join_backward(schedule, recompute), lower_options);
  }
  state_->ties = detail::TiedParameters(plan);
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

PipelineResult Pipeline::State::run(const PipelineBatch& batch, bool training,
                                    const PipelineStepOptions& options) {
  try {
    detail::StepFacts facts = detail::agree_on_step(plan, batch, training, steps, options.divisor);
    facts.forward_scope = options.forward_scope;
    detail::StepRun step(plan, batch, facts);
    if (training) ties.begin();
    step.run();
    PipelineResult result;
    const std::string place =
        concat("pipeline ", plan.training.name, ", step ", facts.step,
               ", after the last action on rank ", plan.mesh.manager().rank(), ": ");
    try {
      if (training) ties.sum(plan);
      result = finish(step, facts);
    } catch (const PeerFailedError& e) {
      throw PeerFailedError(place + e.what(), e.ranks());
    } catch (const PeerLostError& e) {
      detail::tell_failure(plan, place + e.what());
      throw PeerLostError(place + e.what(), e.ranks());
    } catch (const TimeoutError& e) {
      detail::tell_failure(plan, place + e.what());
      throw TimeoutError(place + e.what(), e.missing());
    } catch (const c10::Error& e) {
      detail::tell_failure(plan, e.what_without_backtrace());
      throw;
    } catch (const std::exception& e) {
      detail::tell_failure(plan, e.what());
      throw;
    }
    if (training) spans = step.spans();
    plan.settled.insert(facts.signatures.begin(), facts.signatures.end());
    // Every rank counts alike.
    constexpr std::size_t kMostSignatures = 1024;
    if (plan.options.dynamic_shapes || plan.settled.size() > kMostSignatures) plan.forget_shapes();
    if (training) steps = facts.step + 1;
    return result;
  } catch (...) {
    // Ranks may have come to different points of telling each other shapes.
    plan.forget_shapes();
    throw;
  }
}

namespace {

// The tensors joined along dim 0; undefined where their shapes do not allow it.
at::Tensor joined(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts.front();
  for (const at::Tensor& t : parts) {
    if (is_sharded(t)) return {};
    if (t.dim() != first.dim() || t.scalar_type() != first.scalar_type()) return {};
    if (t.dim() > 0 && t.sizes().slice(1) != first.sizes().slice(1)) return {};
  }
  return first.dim() > 0 ? at::cat(parts) : at::stack(parts);
}

}  // namespace

PipelineResult Pipeline::State::finish(detail::StepRun& step, const detail::StepFacts& facts) {
  PipelineResult result;
  result.weight = facts.total_weight;
  result.micro_batches = std::move(step.outputs());
  for (std::size_t i = 0; !result.micro_batches.empty(); ++i) {
    std::vector<at::Tensor> parts;
    for (const auto& outputs : result.micro_batches) {
      if (i < outputs.size()) parts.push_back(outputs[i]);
    }
    if (parts.empty()) break;
    result.outputs.push_back(parts.size() == result.micro_batches.size() ? joined(parts)
                                                                         : at::Tensor());
  }
  // All ranks that share samples ask for the value of a sharded loss, and one of them counts it.
  const double own = step.loss_sum();
  const at::Tensor sum = at::full({1}, plan.counts() ? own : 0.0, at::kDouble);
  const bool everywhere = plan.options.loss_everywhere;
  if (everywhere)
    plan.mesh.all().all_reduce(sum, ReduceOp::sum, {.name = "pipeline loss"});
  else if (plan.last() && facts.targets)
    plan.mesh.group(plan.other_axes()).all_reduce(sum, ReduceOp::sum, {.name = "pipeline loss"});
  result.loss = facts.targets && (everywhere || plan.last())
                    ? sum.item<double>() / facts.total_weight
                    : std::numeric_limits<double>::quiet_NaN();
  return result;
}

PipelineResult Pipeline::step(const PipelineBatch& batch, const PipelineStepOptions& options) {
  return state_->run(batch, true, options);
}
PipelineResult Pipeline::evaluate(const PipelineBatch& batch) {
  return state_->run(batch, false, {});
}
std::vector<at::Tensor> Pipeline::repeated_parameters() const { return state_->ties.repeated(); }

const PipelineSchedule& Pipeline::schedule() const { return state_->plan.training; }
std::uint64_t Pipeline::steps() const { return state_->steps; }
void Pipeline::set_steps(std::uint64_t steps) { state_->steps = steps; }

}  // namespace tessera
