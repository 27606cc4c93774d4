#pragma once
// What the tests of pipelines share: stages drawn at random, and what one process makes of them.

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/list_schedule.h"

namespace tessera::test {

constexpr int kWidth = 5;

/// Takes `in` tensors of kWidth columns and gives `out`; weights are used twice, some operators
/// write in place, and an integer tensor without a gradient comes last of the plain outputs where
/// `marks` is set.
struct DrawnStage : torch::nn::Module {
  DrawnStage(int in, int plain, int skips, bool marked, bool marks, bool drop = false)
      : plain(plain), marked(marked), marks(marks), drop(drop) {
    mix = register_module("mix", torch::nn::Linear(in * kWidth, kWidth));
    twice = register_module("twice", torch::nn::Linear(kWidth, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(std::vector<std::int64_t>{kWidth}));
    unused = register_parameter("unused", torch::zeros({2}));
    for (int i = 0; i < plain + skips; ++i)
      heads.push_back(
          register_module("head" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    to(torch::kDouble);
  }
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& given) {
    std::vector<at::Tensor> inputs = given;
    at::Tensor mark;
    if (marked) {
      // Between the plain inputs and the skips, or the last.
      const auto at = std::ranges::find_if(
          inputs, [](const at::Tensor& t) { return t.scalar_type() == at::kLong; });
      mark = *at;
      inputs.erase(at);
    }
    // Written to, as an in-place activation at the beginning of a stage does.
    if (inputs.size() == 1) inputs[0].mul_(1.5);
    at::Tensor h = mix(torch::cat(inputs, 1));
    h = twice(torch::relu_(h).exp());
    h = norm(torch::tanh(twice(h)));
    if (mark.defined()) h = h + mark.to(torch::kDouble).unsqueeze(1);
    if (drop) h = torch::dropout(h, 0.4, is_training());
    std::vector<at::Tensor> outputs;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      if (marks && i == static_cast<std::size_t>(plain))
        outputs.push_back(torch::arange(h.size(0), torch::kLong) % 3);
      outputs.push_back(heads[i](h));
    }
    if (marks && heads.size() == static_cast<std::size_t>(plain))
      outputs.push_back(torch::arange(h.size(0), torch::kLong) % 3);
    return outputs;
  }
  int plain;
  bool marked, marks, drop;
  torch::nn::Linear mix{nullptr}, twice{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  at::Tensor unused;
  std::vector<torch::nn::Linear> heads;
};

struct Case {
  int ranks = 1;
  PipelineSchedule schedule;
  std::vector<PipelineSkip> skips;
  std::vector<int> plain;  // outputs of each stage
  std::vector<bool> marks, recompute;
  std::vector<std::int64_t> rows;  // one a micro-batch that is there
  std::uint64_t seed = 0;
  bool drop = false;

  int stages() const { return schedule.stages(); }
  std::shared_ptr<DrawnStage> make(int s) const {
    int in = s == 0 ? 2 : plain[s - 1], out = 0;
    for (const PipelineSkip& skip : skips) {
      in += skip.to == s ? 1 : 0;
      out += skip.from == s ? 1 : 0;
    }
    auto stage =
        std::make_shared<DrawnStage>(in, plain[s], out, s > 0 && marks[s - 1], marks[s], drop);
    fill(*stage, seed * 100 + static_cast<std::uint64_t>(s));
    return stage;
  }
  PipelineBatch batch(std::uint64_t step = 0) const {
    test::seed(seed * 7 + step);
    PipelineBatch all;
    for (const std::int64_t n : rows) {
      all.inputs.push_back({randn({n, kWidth}, at::kDouble), randn({n, kWidth}, at::kDouble)});
      all.targets.push_back({randn({n, kWidth}, at::kDouble)});
    }
    return all;
  }
  std::string text() const {
    return concat(to_string(schedule).substr(0, 120), "rows ", list(rows), ", skips ",
                  skips.size());
  }
};

inline at::Tensor mean_of(const std::vector<at::Tensor>& outputs,
                          const std::vector<at::Tensor>& targets) {
  at::Tensor sum = (outputs[0] - targets[0]).square().sum();
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i].is_floating_point()) sum = sum + outputs[i].sin().sum();
  }
  return sum / static_cast<double>(targets[0].size(0));  // NaN for no rows
}

/// What one process computes: the loss, and by stage the gradients, undefined ones as zeros.
struct OneProcess {
  double loss = 0;
  std::vector<std::vector<at::Tensor>> gradients;
  std::vector<at::Tensor> outputs;
};

inline OneProcess one_process(const Case& c, std::uint64_t step = 0, int steps = 1) {
  std::vector<std::shared_ptr<DrawnStage>> stages;
  for (int s = 0; s < c.stages(); ++s) stages.push_back(c.make(s));
  OneProcess result;
  for (int n = 0; n < steps; ++n) {
    const PipelineBatch batch = c.batch(step + static_cast<std::uint64_t>(n));
    double total = 0;
    for (const std::int64_t r : c.rows) total += static_cast<double>(r);
    result.loss = 0;
    result.outputs.clear();
    for (std::size_t k = 0; k < c.rows.size(); ++k) {
      std::vector<at::Tensor> now = batch.inputs[k];
      std::vector<at::Tensor> skipped(c.skips.size());
      for (int s = 0; s < c.stages(); ++s) {
        for (std::size_t i = 0; i < c.skips.size(); ++i)
          if (c.skips[i].to == s) now.push_back(skipped[i]);
        std::vector<at::Tensor> out = stages[s]->forward(now);
        std::size_t leaving = 0;
        for (const PipelineSkip& skip : c.skips) leaving += skip.from == s ? 1 : 0;
        std::size_t at = out.size() - leaving;
        now.assign(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(at));
        for (std::size_t i = 0; i < c.skips.size(); ++i)
          if (c.skips[i].from == s) skipped[i] = out[at++];
      }
      result.outputs.push_back(now[0].detach());
      if (c.rows[k] == 0) continue;
      const at::Tensor loss =
          mean_of(now, batch.targets[k]) * (static_cast<double>(c.rows[k]) / total);
      result.loss += loss.item<double>();
      loss.backward();
    }
  }
  for (const auto& stage : stages) {
    auto& list = result.gradients.emplace_back();
    for (const at::Tensor& p : stage->parameters())
      list.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
  }
  return result;
}

/// The largest difference of this rank's gradients from those of one process.
inline double gradient_error(const std::map<int, std::shared_ptr<DrawnStage>>& mine,
                             const OneProcess& expected) {
  double worst = 0;
  for (const auto& [s, stage] : mine) {
    const auto parameters = stage->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor grad =
          parameters[i].grad().defined() ? parameters[i].grad() : torch::zeros_like(parameters[i]);
      worst = std::max(worst, difference(grad, expected.gradients[s][i], 1e-3));
    }
  }
  return worst;
}

/// Known schedules and drawn list schedules for `ranks` ranks.
inline PipelineSchedule draw_schedule(Draw& draw, int ranks, int micro_batches) {
  switch (draw.below(7)) {
    case 0:
      return schedule_gpipe(ranks, micro_batches);
    case 1:
      return schedule_1f1b(ranks, micro_batches);
    case 2:
      return schedule_interleaved(ranks, 2, micro_batches);
    case 3:
      return schedule_zero_bubble_h1(ranks, micro_batches);
    case 4:
      return schedule_zero_bubble_v(ranks, micro_batches);
    case 5:
      return schedule_gpipe(v_placement(ranks, 2), micro_batches);
    default: {
      const auto placement = draw.chance(50) ? v_placement(ranks, 2) : loop_placement(ranks, 1);
      const auto costs = PipelineCosts::uniform(static_cast<int>(placement.size()), 1,
                                                0.5 + 0.3 * draw.below(6), 0.1 * draw.below(12));
      ListScheduleOptions options;
      options.tries = 10;
      options.improvements = 10;
      return list_schedule(placement, micro_batches, costs, options);
    }
  }
}

inline Case draw_case(Draw& draw, int ranks, std::uint64_t seed) {
  Case c;
  c.ranks = ranks;
  c.seed = seed;
  const int micro_batches = draw.between(1, 5);
  c.schedule = draw_schedule(draw, ranks, micro_batches);
  const int stages = c.schedule.stages();
  for (int i = stages > 1 ? draw.below(4) : 0; i > 0; --i) {
    const int from = draw.below(stages - 1);
    c.skips.push_back({from, draw.between(from + 1, stages - 1)});
  }
  for (int s = 0; s < stages; ++s) {
    c.plain.push_back(draw.between(1, 2));
    c.marks.push_back(draw.chance(25));
    c.recompute.push_back(draw.chance(20));
  }
  const int there = draw.chance(30) ? draw.between(1, micro_batches) : micro_batches;
  for (int k = 0; k < there; ++k) c.rows.push_back(draw.chance(15) ? 0 : draw.between(1, 4));
  c.rows[static_cast<std::size_t>(draw.below(there))] = 3;
  return c;
}

/// This rank's stages, for the pipeline and by number.
struct OwnStages {
  OwnStages(const Case& c, int position) {
    for (const int s : c.schedule.stages_of(position)) {
      by_number[s] = c.make(s);
      stages.push_back(make_stage(by_number[s], {.recompute = c.recompute[s]}));
    }
  }
  std::map<int, std::shared_ptr<DrawnStage>> by_number;
  std::vector<std::shared_ptr<PipelineStage>> stages;
};

}  // namespace tessera::test
