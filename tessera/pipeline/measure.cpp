// What a pipeline's actions cost, and when they ran.

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/pipeline/detail/pipeline_state.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/passes.h"
#include "tessera/schedule/validate.h"

namespace tessera {
namespace {

std::vector<std::vector<double>> of_all(const Group& group, const std::vector<double>& mine) {
  return agree::all<std::vector<double>>(group, "pipeline measure", [&] { return mine; });
}

double middle(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

// Whether each stage has an action of this kind.
bool has_everywhere(const PipelineSchedule& schedule, ActionKind kind) {
  std::vector<bool> has(schedule.stages(), false);
  for (const auto& row : schedule.actions)
    for (const PipelineAction& a : row)
      if (a.kind == kind) has[a.stage] = true;
  return std::ranges::find(has, false) == has.end();
}

// Each B as an I and its W.
PipelineSchedule split_backward(PipelineSchedule schedule) {
  for (auto& row : schedule.actions) {
    std::vector<PipelineAction> split;
    for (const PipelineAction& a : row) {
      split.push_back(a);
      if (a.kind != ActionKind::backward) continue;
      split.back().kind = ActionKind::input_gradient;
      split.push_back({ActionKind::weight_gradient, a.stage, a.micro_batch});
    }
    row = std::move(split);
  }
  return schedule;
}

}  // namespace

std::vector<std::pair<PipelineAction, double>> Pipeline::State::time(
    const PipelineSchedule& schedule, const PipelineBatch& batch) {
  const PipelineSchedule before = std::exchange(plan.training, schedule);
  std::vector<std::pair<PipelineAction, double>> times;
  try {
    detail::StepFacts facts = detail::agree_on_step(plan, batch, true, steps);
    facts.reduces = false;
    detail::StepRun step(plan, batch, facts);
    step.run();
    plan.settled.insert(facts.signatures.begin(), facts.signatures.end());
    const auto& row = schedule.actions[plan.rank];
    // What a rank does for the messages of an action is part of the action's time: starting them
    // and making their memory. By stage and micro-batch: activations, gradients.
    std::map<std::pair<int, int>, std::array<double, 2>> passing;
    const auto length = [&](std::size_t i) {
      return step.spans()[i]->end - step.spans()[i]->start;
    };
    for (std::size_t i = 0; i < row.size(); ++i) {
      const ActionKind kind = row[i].kind;
      if (!is_message(kind) || !step.spans()[i]) continue;
      const bool back = kind == ActionKind::send_gradient || kind == ActionKind::receive_gradient;
      passing[{row[i].stage, row[i].micro_batch}][back ? 1 : 0] += length(i);
    }
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (!is_compute(row[i].kind) || !step.spans()[i]) continue;
      double seconds = length(i);
      const auto at = passing.find({row[i].stage, row[i].micro_batch});
      if (at != passing.end() && row[i].kind != ActionKind::weight_gradient)
        seconds += at->second[row[i].kind == ActionKind::forward ? 0 : 1];
      times.emplace_back(row[i], seconds);
    }
  } catch (...) {
    plan.training = before;
    plan.forget_shapes();
    throw;
  }
  plan.training = before;
  return times;
}

double Pipeline::State::time_message(int s, int repeats) const {
  const int from = plan.training.placement[s], to = plan.training.placement[s + 1];
  if (from == to || (plan.rank != from && plan.rank != to)) return 0;
  std::int64_t bytes = 1;
  for (const auto& [signature, list] : plan.known[s]) {
    std::int64_t sum = 0;
    for (const detail::TensorSpec& spec : list)
      sum += c10::multiply_integers(spec.sizes) *
             static_cast<std::int64_t>(c10::elementSize(spec.dtype));
    bytes = std::max(bytes, sum);
  }
  const Group group = plan.group();
  const at::Tensor there = at::zeros({bytes}, at::TensorOptions(at::kByte).device(plan.device()));
  const at::Tensor back = at::zeros_like(there);
  std::vector<double> times;
  for (int i = 0; i < repeats + 1; ++i) {
    const auto began = std::chrono::steady_clock::now();
    if (plan.rank == from) {
      group.send(there, to, {.name = "pipeline measure"});
      group.receive(back, to, {.name = "pipeline measure"});
    } else {
      group.receive(back, from, {.name = "pipeline measure"});
      group.send(there, from, {.name = "pipeline measure"});
    }
    const auto took = std::chrono::steady_clock::now() - began;
    if (i > 0) times.push_back(std::chrono::duration<double>(took).count() / 2);
  }
  return plan.rank == from ? middle(times) : 0;
}

namespace {

// Seven numbers a stage, as sums over the ranks that have it: seconds of each kind of action, the
// ranks, how many of them recompute, and the seconds of a message to the next.
PipelineCosts costs_of(const std::vector<double>& sum, int stages) {
  PipelineCosts costs;
  for (int s = 0; s < stages; ++s) {
    const double* row = &sum[7 * s];
    const double count = row[4];
    StageCosts one{.forward = row[0] / count,
                   .input_gradient = row[1] / count,
                   .weight_gradient = row[2] / count,
                   .backward = row[3] / count,
                   .recompute = row[5] > 0};
    // Not split: the halves are a guess that no schedule uses.
    if (one.recompute)
      one.input_gradient = one.weight_gradient = std::max(0.0, *one.backward - one.forward) / 2;
    costs.stages.push_back(one);
    if (s + 1 < stages) costs.communication.push_back(row[6] / count);
  }
  return costs;
}

}  // namespace

PipelineCosts Pipeline::measure(const PipelineBatch& batch, int repeats) {
  if (repeats < 1) throw InvalidArgument("measure with ", repeats, " repeats; at least 1");
  State& state = *state_;
  const int stages = state.plan.count();
  const PipelineSchedule plain =
      schedule_gpipe(state.plan.training.placement, state.plan.training.micro_batches);
  const LowerOptions lower_options{.sharded = state.plan.sharded,
                                   .gathered_at_once = state.plan.options.gathered_at_once};
  // The pipeline's own schedule, since how long an action takes depends on what was done before
  // it; and for the kinds of actions that it does not have, another one.
  std::vector<PipelineSchedule> schedules{state.plan.training};
  if (!has_everywhere(schedules.front(), ActionKind::backward))
    schedules.push_back(lower(plain, lower_options));
  if (!has_everywhere(schedules.front(), ActionKind::input_gradient))
    schedules.push_back(lower(split_backward(plain), lower_options));
  const auto no_gradients = c10::make_scope_exit([&] {
    for (const auto& stage : state.plan.stages) {
      if (!stage) continue;
      for (const at::Tensor& p : stage->parameters()) p.mutable_grad().reset();
    }
  });
  // By stage: forward, input gradient, weight gradient, backward; of each step the mean over its
  // micro-batches, since a step is as long as all of them together.
  std::vector<std::array<std::vector<double>, 4>> seen(static_cast<std::size_t>(stages));
  for (int i = 0; i < repeats + 1; ++i) {
    auto known = seen;  // kinds that an earlier schedule has
    for (std::size_t s = 0; s < schedules.size(); ++s) {
      std::map<std::pair<int, ActionKind>, std::vector<double>> of_step;
      for (const auto& [action, seconds] : state.time(schedules[s], batch))
        of_step[{action.stage, action.kind}].push_back(seconds);
      for (const auto& [which, seconds] : of_step) {
        auto& all = seen[which.first][static_cast<std::size_t>(which.second)];
        const auto& before = known[which.first][static_cast<std::size_t>(which.second)];
        if (i > 0 && all.size() == before.size()) all.push_back(mean(seconds));
      }
    }
  }
  std::vector<double> mine(static_cast<std::size_t>(stages) * 7, 0.0);
  for (int s = 0; s < stages; ++s) {
    double* row = &mine[7 * s];
    if (state.plan.stages[s]) {
      for (std::size_t i = 0; i < 4; ++i) row[i] = middle(seen[s][i]);
      row[4] = 1;
      row[5] = state.plan.stages[s]->recomputes() ? 1 : 0;
    }
    if (s + 1 < stages) row[6] = state.time_message(s, 2 * repeats + 1);
  }
  // The mean over pipelines beside this one.
  std::vector<double> sum(mine.size(), 0.0);
  for (const std::vector<double>& values : of_all(state.plan.mesh.all(), mine)) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  return costs_of(sum, stages);
}

Timeline Pipeline::timeline() const {
  const PipelineSchedule& schedule = state_->plan.training;
  const auto& row = schedule.actions[state_->plan.rank];
  if (state_->spans.size() != row.size())
    throw InvalidArgument("Pipeline::timeline: there has been no step yet");
  std::vector<double> mine;
  double last = 0;
  for (const auto& span : state_->spans) {
    mine.push_back(span ? span->start : last);
    mine.push_back(span ? span->end : last);
    last = mine.back();
  }
  const auto uniform = PipelineCosts::uniform(schedule.stages());
  Timeline result;
  result.order = simulate(schedule, uniform).order;
  result.peak = peak_memory(schedule, uniform);
  const auto all = of_all(state_->plan.group(), mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::vector<double>& values = all[r];
    auto& spans = result.spans.emplace_back();
    double busy = 0;
    for (std::size_t i = 0; i + 1 < values.size(); i += 2) {
      spans.push_back({values[i], values[i + 1]});
      result.makespan = std::max(result.makespan, values[i + 1]);
      if (is_compute(schedule.actions[r][i / 2].kind)) busy += values[i + 1] - values[i];
    }
    result.busy.push_back(busy);
  }
  return result;
}

}  // namespace tessera
