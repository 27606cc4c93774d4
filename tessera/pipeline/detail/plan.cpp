#include "tessera/pipeline/detail/plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

// What each rank tells the others of its pipeline before a step: these, then a signature for each
// micro-batch of the schedule.
enum Place : std::int64_t {
  kProblem,
  kMode,
  kStep,
  kInputs,
  kTargets,
  kTrained,
  kSettled,
  kWeight,
  kScales,
  kScaleSum,
  kScaleSquares,
  kDivisor,
  kPlaces
};

std::int64_t bits(double value) { return std::bit_cast<std::int64_t>(value); }
double real(std::int64_t value) { return std::bit_cast<double>(value); }

std::uint64_t signature_of(const std::vector<at::Tensor>& inputs) {
  Hash hash;
  hash.number(inputs.size());
  for (const at::Tensor& t : inputs) {
    const bool sharded = is_sharded(t);
    const TensorSpec own = spec_of(sharded ? to_local(t.detach()) : t, t.requires_grad());
    for (const std::int64_t n : encode({own})) hash.number(static_cast<std::uint64_t>(n));
    // Ranks with locals of equal shapes may hold shards of unequal tensors.
    if (sharded) hash.text(spec(t).to_string());
  }
  return hash.value();
}

// The ranks with this rank's stages that have other samples, and this one.
std::vector<int> sample_ranks(const PipelinePlan& plan) {
  const Mesh& layout = plan.mesh.layout();
  const int me = plan.mesh.manager().rank();
  const std::vector<int> axes = plan.sample_axes();
  if (axes.empty()) return {me};
  return layout.group(axes, me);
}

// By what the sums of gradients over the other axes are multiplied: one number for all parameters
// of this rank; nothing where it has none.
std::optional<double> gradient_scale(const PipelinePlan& plan, std::string& problem) {
  const std::vector<int> counted = sample_ranks(plan);
  const int samples = static_cast<int>(counted.size());
  std::optional<double> common;
  for (int s = 0; s < plan.count(); ++s) {
    if (!plan.stages[s]) continue;
    for (const at::Tensor& p : plan.stages[s]->parameters()) {
      const auto sum = gradient_sum(p);
      const double scale = sum ? sum->scale : 0;
      if (!(scale > 0) || (sum->reducers == 0 && samples > 1)) {
        problem = concat(kGradientProblem, "a parameter of stage ", s, " (shape ", p.sizes(),
                         ") is not known to be reduced over the mesh's other axes: wrap the stage "
                         "with DistributedDataParallel, or distribute it (distribute_module)");
        return std::nullopt;
      }
      if (sum->reducers > 0 && !sum->covers(counted)) {
        problem = concat(kGradientProblem, "the gradient of a parameter of stage ", s, " (shape ",
                         p.sizes(), ") comes together over ranks ", list(sum->ranks),
                         ", and ranks ", list(counted),
                         " have different samples (PipelineOptions::sample_axes); reduce it over "
                         "those");
        return std::nullopt;
      }
      // A mean over other ranks than those that have other samples.
      if (scale != 1 && std::abs(scale * samples - 1) > 1e-9) {
        problem = concat(kGradientProblem, "the gradient of a parameter of stage ", s, " (shape ",
                         p.sizes(), ") becomes the mean over ", std::lround(1 / scale),
                         " ranks, and ", samples,
                         " have different samples (PipelineOptions::sample_axes); reduce it over "
                         "those, or as a sum");
        return std::nullopt;
      }
      if (common && *common != scale) {
        problem = concat(kGradientProblem, "the gradients of stage ", s,
                         " come together in different ways, some as a mean and some as a sum; "
                         "give all the same reduction");
        return std::nullopt;
      }
      common = scale;
    }
  }
  return common;
}

std::vector<double> weights_of(const PipelineBatch& batch) {
  if (!batch.weights.empty()) return batch.weights;
  std::vector<double> weights;
  for (const auto& targets : batch.targets) {
    weights.push_back(targets.empty() || !targets[0].defined() || targets[0].dim() == 0
                          ? 1.0
                          : static_cast<double>(targets[0].size(0)));
  }
  return weights;
}

std::string batch_problem(const PipelinePlan& plan, const PipelineBatch& batch, bool training,
                          const std::vector<double>& weights) {
  const std::size_t most = static_cast<std::size_t>(plan.training.micro_batches);
  if (plan.first() && (batch.inputs.empty() || batch.inputs.size() > most))
    return concat(batch.inputs.size(), " micro-batches of inputs, where the schedule has ", most,
                  "; give 1 to ", most);
  if (!plan.last()) return "";
  if (training && batch.targets.empty()) return "a step needs targets[k] for each micro-batch";
  if (batch.targets.empty()) return "";
  if (!plan.loss) return "there are targets, and the pipeline was given no loss";
  if (batch.targets.size() > most)
    return concat(batch.targets.size(), " micro-batches of targets, where the schedule has ", most);
  if (weights.size() != batch.targets.size())
    return concat(weights.size(), " weights for ", batch.targets.size(), " micro-batches");
  for (const double w : weights) {
    if (!std::isfinite(w) || w < 0)
      return concat("a micro-batch's weight is ", w, "; it must be finite and at least 0");
  }
  return "";
}

}  // namespace

std::vector<int> PipelinePlan::other_axes() const {
  const int mine = mesh.layout().index(axis);
  std::vector<int> others;
  for (int a = 0; a < mesh.layout().dims(); ++a) {
    if (a != mine) others.push_back(a);
  }
  return others;
}

std::vector<int> PipelinePlan::sample_axes() const {
  if (!options.sample_axes) return other_axes();
  std::vector<int> axes;
  for (const std::string& name : *options.sample_axes) axes.push_back(mesh.layout().index(name));
  return axes;
}

bool PipelinePlan::counts() const {
  const std::vector<int> samples = sample_axes(), here = mesh.coordinate();
  bool all_first = true;
  for (const int a : other_axes()) {
    if (std::find(samples.begin(), samples.end(), a) == samples.end())
      all_first = all_first && here[a] == 0;
  }
  return all_first;
}

void PipelinePlan::forget_shapes() {
  settled.clear();
  for (auto& one : known) one.clear();
}

c10::Device PipelinePlan::device() const {
  for (const auto& stage : stages) {
    if (!stage) continue;
    for (const at::Tensor& p : stage->parameters()) return p.device();
  }
  return mesh.manager().device();
}

void tell_failure(const PipelinePlan& plan, const std::string& what) {
  const Mesh& ranks = plan.mesh.layout();
  if (ranks.size() > 1) plan.mesh.manager().fail_groups_within(ranks, what);
}

void throw_together(const Group& group, const std::string& problem) {
  const auto all = group.all_gather_bytes(problem, {.name = "pipeline problems"});
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    const bool gradient = all[r][0] == kGradientProblem;
    const std::string text =
        concat("pipeline: rank ", group.ranks()[r], ": ", gradient ? all[r].substr(1) : all[r]);
    if (gradient) throw GradientError(text);
    throw InvalidArgument(text);
  }
}

StepFacts agree_on_step(PipelinePlan& plan, const PipelineBatch& batch, bool training,
                        std::uint64_t step, std::optional<double> divisor) {
  StepFacts facts;
  facts.training = training;
  facts.step = step;
  if (plan.last()) facts.weights = weights_of(batch);
  std::string problem = batch_problem(plan, batch, training, facts.weights);
  if (divisor && !(std::isfinite(*divisor) && *divisor > 0) && problem.empty())
    problem = concat("gradients divided by ", *divisor, "; it must be finite and above 0");
  std::optional<double> by;
  Hash trained;
  try {
    if (training && problem.empty()) by = gradient_scale(plan, problem);
    for (const auto& stage : plan.stages) {
      if (stage) trained.number(stage->parameters().size());
    }
  } catch (const std::exception& e) {  // of the user's own stage
    problem = e.what();
  }

  const std::int64_t most = plan.training.micro_batches;
  std::vector<std::int64_t> mine(static_cast<std::size_t>(kPlaces + most), 0);
  mine[kMode] = training ? 1 : 0;
  mine[kInputs] = plan.first() ? static_cast<std::int64_t>(batch.inputs.size()) : -1;
  mine[kTargets] = plan.last() ? static_cast<std::int64_t>(batch.targets.size()) : -1;
  mine[kStep] = static_cast<std::int64_t>(step);
  mine[kTrained] = static_cast<std::int64_t>(trained.value());
  Hash settled;
  for (const std::uint64_t one : plan.settled) settled.number(one);
  mine[kSettled] = static_cast<std::int64_t>(settled.value());
  double weight = 0;
  if (plan.counts()) {
    for (const double w : facts.weights) weight += w;
  }
  mine[kWeight] = bits(weight);
  mine[kScales] = bits(by ? 1 : 0);
  mine[kScaleSum] = bits(by.value_or(0));
  mine[kScaleSquares] = bits(by.value_or(0) * by.value_or(0));
  if (plan.first() && problem.empty()) {
    try {
      for (std::size_t k = 0; k < batch.inputs.size(); ++k)
        mine[kPlaces + k] = static_cast<std::int64_t>(signature_of(batch.inputs[k]));
    } catch (const std::exception& e) {
      problem = e.what();
    }
  }
  // 0: none, which is refused where it is given.
  mine[kDivisor] = bits(divisor.value_or(0));
  mine[kProblem] = problem.empty() ? 0 : 1;

  const Group group = plan.group();
  const at::Tensor sent = at::tensor(mine, at::kLong);
  const at::Tensor all = at::empty({group.size(), sent.size(0)}, at::kLong);
  group.all_gather(all.view({-1}), sent, {}, {.name = "pipeline step"});
  const auto rows = all.accessor<std::int64_t, 2>();

  const int first = plan.training.placement.front(), last = plan.training.placement.back();
  facts.micro_batches = static_cast<int>(rows[first][kInputs]);
  const std::int64_t targets = rows[last][kTargets];
  facts.targets = targets > 0;
  // Weight, problems, by what gradients are multiplied; then pipelines, and those that train and
  // that have targets; by what gradients are divided, and its square.
  std::vector<double> sums{0, 0, 0, 0, 0, 1, training ? 1.0 : 0.0, facts.targets ? 1.0 : 0.0};
  for (const int power : {1, 2}) sums.push_back(std::pow(divisor.value_or(0), power));
  Hash modes;
  bool differ = false;
  for (int r = 0; r < group.size(); ++r) {
    sums[0] += real(rows[r][kWeight]);
    sums[1] += static_cast<double>(rows[r][kProblem]);
    sums[2] += real(rows[r][kScales]);
    sums[3] += real(rows[r][kScaleSum]);
    sums[4] += real(rows[r][kScaleSquares]);
    modes.number(static_cast<std::uint64_t>(rows[r][kTrained]));
    differ = differ || rows[r][kSettled] != mine[kSettled];
    if (rows[r][kDivisor] != rows[0][kDivisor] && problem.empty())
      problem = concat("rank ", group.ranks()[r], " gives the divisor ", real(rows[r][kDivisor]),
                       " for gradients, and rank ", group.ranks()[0], " ", real(rows[0][kDivisor]),
                       " (0: none); give the same on all ranks");
    // A rank that failed late in a step that others ended is behind.
    facts.step = std::max(facts.step, static_cast<std::uint64_t>(rows[r][kStep]));
    if (rows[r][kMode] != mine[kMode] && problem.empty())
      problem = concat("some ranks train and others evaluate; rank ", group.ranks()[r], " ",
                       rows[r][kMode] ? "trains" : "evaluates");
  }
  if (differ) plan.forget_shapes();
  if (problem.empty() && facts.targets && targets != facts.micro_batches)
    problem = concat(facts.micro_batches, " micro-batches of inputs and ", targets, " of targets");
  if (!problem.empty() && mine[kProblem] == 0) sums[1] += 1;
  // So may a pipeline be behind those beside it, by one or two: small numbers tell, and their sum
  // is exact.
  const auto phase = static_cast<double>(facts.step % 256);
  for (const double power : {phase, phase * phase}) sums.push_back(power);
  const std::vector<int> others = plan.other_axes();
  if (plan.mesh.layout().size() > group.size()) {
    const Group beside = plan.mesh.group(others);
    at::Tensor travelling = at::tensor(sums, at::kDouble);
    beside.all_reduce(travelling, ReduceOp::sum, {.name = "pipeline weights"});
    const auto* got = travelling.const_data_ptr<double>();
    sums.assign(got, got + sums.size());
    if (sums[10] * sums[10] != sums[11] * sums[5]) {
      const at::Tensor most = at::tensor({static_cast<std::int64_t>(facts.step)}, at::kLong);
      beside.all_reduce(most, ReduceOp::max, {.name = "pipeline step"});
      facts.step = static_cast<std::uint64_t>(most.item<std::int64_t>());
    }
  }
  if (sums[1] > 0) throw_together(plan.mesh.all(), problem);
  for (const double some : {sums[6], sums[7]}) {
    if (some != 0 && some != sums[5])
      throw InvalidArgument(
          concat("pipeline: ", some, " of ", sums[5], " pipelines beside each other ",
                 some == sums[6] ? "train" : "have targets", ", and the others do not"));
  }
  const double mean_divisor = sums[8] / sums[5];
  if (std::abs(sums[9] / sums[5] - mean_divisor * mean_divisor) >
      1e-9 * mean_divisor * mean_divisor)
    throw InvalidArgument(
        concat("pipeline: the pipelines beside each other give different divisors for gradients, ",
               mean_divisor, " in the mean (0: none); give the same on all ranks"));
  facts.total_weight = sums[0];
  if (training && !divisor && !(facts.total_weight > 0))
    throw InvalidArgument(
        concat("pipeline: the weights of a step must not all be zero; their sum "
               "over all micro-batches is ",
               facts.total_weight));
  if (training) {
    const double mean = sums[2] > 0 ? sums[3] / sums[2] : 1;
    if (sums[2] > 0 && std::abs(sums[4] / sums[2] - mean * mean) > 1e-9 * mean * mean)
      throw GradientError(
          "pipeline: the gradients of some stages come together as a mean over ranks and those of "
          "others as a sum; give all stages the same reduction");
    facts.scale = 1 / (divisor.value_or(facts.total_weight) * mean);
  }
  modes.number(training ? 1 : 0);
  for (int k = 0; k < facts.micro_batches; ++k) {
    Hash one;
    one.number(modes.value()).number(static_cast<std::uint64_t>(rows[first][kPlaces + k]));
    facts.signatures.push_back(one.value());
  }
  return facts;
}

}  // namespace tessera::detail
