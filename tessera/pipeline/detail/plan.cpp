#include "tessera/pipeline/detail/plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <type_traits>

#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

// What each rank tells the others of its pipeline before a step. Eight bytes a field: it travels as
// it lies in memory, with a signature for each micro-batch of the schedule behind it.
struct Greeting {
  /// 1: this rank cannot make the step.
  std::int64_t problem = 0;
  std::int64_t trains = 0;
  /// Micro-batches; -1: not this rank's to give.
  std::int64_t inputs = -1, targets = -1;
  std::uint64_t step = 0, trained = 0, settled = 0;
  double weight = 0;
  /// 1, and by what its gradients are multiplied; 0: it has none.
  double scaled = 0, scale = 0;
  /// 0: none, which is refused where it is given.
  double divisor = 0;
};
static_assert(std::is_trivially_copyable_v<Greeting> && sizeof(Greeting) == 11 * 8);

struct Greetings {
  /// By position along the axis.
  std::vector<Greeting> of;
  /// Of the first stage's rank.
  std::vector<std::uint64_t> signatures;
};

// Of pipelines beside each other, one of which this is. Doubles alone: one all-reduce.
struct Beside {
  double weight = 0, problems = 0;
  double scaled = 0, scale = 0, scale_squares = 0;
  double pipelines = 1, training = 0, with_targets = 0;
  double divisor = 0, divisor_squares = 0;
  /// Of the step's number, small enough that sums are exact.
  double phase = 0, phase_squares = 0;
};
static_assert(sizeof(Beside) == 12 * sizeof(double));

// Whether numbers of this mean and mean square are one number.
bool are_equal(double mean, double mean_square) {
  return std::abs(mean_square - mean * mean) <= 1e-9 * mean * mean;
}

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
  const Mesh& layout = plan.mesh.mesh();
  const int me = plan.mesh.manager().rank();
  const std::vector<int> axes = plan.sample_axes();
  if (axes.empty()) return {me};
  return layout.group(axes, me);
}

// By what the sums of gradients over the other axes are multiplied: one number for all parameters
// of this rank; nothing where it has none. Throws GradientError.
std::optional<double> gradient_scale(const PipelinePlan& plan) {
  const std::vector<int> counted = sample_ranks(plan);
  const int samples = static_cast<int>(counted.size());
  std::optional<double> common;
  const auto refuse = [](int stage, const at::Tensor& p, const std::string& why) {
    throw GradientError("the gradient of a parameter of stage ", stage, " (shape ", p.sizes(), ") ",
                        why);
  };
  const auto take = [&](int s, const at::Tensor& p) {
    const auto sum = gradient_sum(p);
    const double scale = sum ? sum->scale : 0;
    if (!(scale > 0) || (sum->reducers == 0 && samples > 1))
      refuse(s, p,
             "is not known to be reduced over the mesh's other axes: wrap the stage with "
             "DistributedDataParallel, or distribute it (distribute_module)");
    if (sum->reducers > 0 && !sum->covers(counted))
      refuse(s, p,
             concat("comes together over ranks ", list(sum->ranks), ", and ranks ", list(counted),
                    " have different samples (PipelineOptions::sample_axes); reduce it over "
                    "those"));
    // A mean over other ranks than those that have other samples.
    if (scale != 1 && std::abs(scale * samples - 1) > 1e-9)
      refuse(s, p,
             concat("becomes the mean over ", std::lround(1 / scale), " ranks, and ", samples,
                    " have different samples (PipelineOptions::sample_axes); reduce it over those, "
                    "or as a sum"));
    if (common && *common != scale)
      throw GradientError("the gradients of stage ", s,
                          " come together in different ways, some as a mean and some as a "
                          "sum; give all the same reduction");
    common = scale;
  };
  for (int s = 0; s < plan.count(); ++s) {
    if (!plan.stages[s]) continue;
    for (const at::Tensor& p : plan.stages[s]->parameters()) take(s, p);
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
  if (!batch.problem.empty()) return batch.problem;
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

Greeting greeting_of(const PipelinePlan& plan, const PipelineBatch& batch, const StepFacts& facts,
                     std::optional<double> divisor) {
  Greeting mine;
  mine.trains = facts.training ? 1 : 0;
  mine.step = facts.step;
  if (plan.first()) mine.inputs = static_cast<std::int64_t>(batch.inputs.size());
  if (plan.last()) mine.targets = static_cast<std::int64_t>(batch.targets.size());
  Hash settled;
  for (const std::uint64_t one : plan.settled) settled.number(one);
  mine.settled = settled.value();
  if (plan.counts()) mine.weight = std::accumulate(facts.weights.begin(), facts.weights.end(), 0.0);
  mine.divisor = divisor.value_or(0);
  return mine;
}

// The rest of what this rank says of a step; throws what is wrong with what it was given.
void fill(Greeting& mine, std::vector<std::uint64_t>& signatures, const PipelinePlan& plan,
          const PipelineBatch& batch, const StepFacts& facts, std::optional<double> divisor) {
  const std::string problem = batch_problem(plan, batch, facts.training, facts.weights);
  if (!problem.empty()) throw InvalidArgument(problem);
  if (divisor && !(std::isfinite(*divisor) && *divisor > 0))
    throw InvalidArgument("gradients divided by ", *divisor, "; it must be finite and above 0");
  if (facts.training) {
    const auto by = gradient_scale(plan);
    mine.scaled = by ? 1 : 0;
    mine.scale = by.value_or(0);
  }
  Hash trained;
  for (const auto& stage : plan.stages)
    if (stage) trained.number(stage->parameters().size());
  mine.trained = trained.value();
  if (!plan.first()) return;
  for (std::size_t k = 0; k < batch.inputs.size(); ++k)
    signatures[k] = signature_of(batch.inputs[k]);
}

Greetings greet(const PipelinePlan& plan, const Greeting& mine,
                const std::vector<std::uint64_t>& signatures) {
  const Group group = plan.group();
  const std::size_t behind = signatures.size() * 8, row = sizeof mine + behind;
  const at::Tensor sent = at::empty({static_cast<std::int64_t>(row)}, at::kByte);
  auto* const to = static_cast<char*>(sent.mutable_data_ptr());
  std::memcpy(to, &mine, sizeof mine);
  std::memcpy(to + sizeof mine, signatures.data(), behind);
  const at::Tensor all = at::empty({group.size() * sent.size(0)}, at::kByte);
  group.all_gather(all, sent, {}, {.name = "pipeline step"});
  Greetings got{std::vector<Greeting>(static_cast<std::size_t>(group.size())), signatures};
  const auto* const from = static_cast<const char*>(all.const_data_ptr());
  for (std::size_t r = 0; r < got.of.size(); ++r)
    std::memcpy(&got.of[r], from + r * row, sizeof mine);
  const auto first = static_cast<std::size_t>(plan.training.placement.front());
  std::memcpy(got.signatures.data(), from + first * row + sizeof mine, behind);
  return got;
}

// Of this pipeline, whose ranks have said `of`.
Beside summed(const std::vector<Greeting>& of, const Greeting& mine, const StepFacts& facts) {
  Beside here;
  here.training = facts.training ? 1 : 0;
  here.with_targets = facts.targets ? 1 : 0;
  here.divisor = mine.divisor;
  here.divisor_squares = mine.divisor * mine.divisor;
  for (const Greeting& one : of) {
    here.weight += one.weight;
    here.problems += static_cast<double>(one.problem);
    here.scaled += one.scaled;
    here.scale += one.scale;
    here.scale_squares += one.scale * one.scale;
  }
  return here;
}

// What the ranks of one pipeline do not agree on; "": nothing.
std::string disagreement(const Group& group, const std::vector<Greeting>& all, const Greeting& mine,
                         const StepFacts& facts, std::int64_t targets) {
  for (int r = 0; r < group.size(); ++r) {
    if (all[r].divisor != all[0].divisor)
      return concat("rank ", group.ranks()[r], " gives the divisor ", all[r].divisor,
                    " for gradients, and rank ", group.ranks()[0], " ", all[0].divisor,
                    " (0: none); give the same on all ranks");
    if (all[r].trains != mine.trains)
      return concat("some ranks train and others evaluate; rank ", group.ranks()[r], " ",
                    all[r].trains ? "trains" : "evaluates");
  }
  if (facts.targets && targets != facts.micro_batches)
    return concat(facts.micro_batches, " micro-batches of inputs and ", targets, " of targets");
  return "";
}

// Adds up what pipelines beside each other say, and brings them to one number of the step: one may
// be behind the others, by one or two, as a rank of it may.
Beside add_up(const PipelinePlan& plan, Beside here, std::uint64_t& step) {
  here.phase = static_cast<double>(step % 256);
  here.phase_squares = here.phase * here.phase;
  if (plan.mesh.mesh().size() == plan.group().size()) return here;
  const Group beside = plan.mesh.group(plan.other_axes());
  const at::Tensor travelling = at::empty({sizeof here / sizeof(double)}, at::kDouble);
  std::memcpy(travelling.mutable_data_ptr(), &here, sizeof here);
  beside.all_reduce(travelling, ReduceOp::sum, {.name = "pipeline weights"});
  std::memcpy(&here, travelling.const_data_ptr(), sizeof here);
  if (here.phase * here.phase != here.phase_squares * here.pipelines) {
    const at::Tensor most = at::tensor({static_cast<std::int64_t>(step)}, at::kLong);
    beside.all_reduce(most, ReduceOp::max, {.name = "pipeline step"});
    step = static_cast<std::uint64_t>(most.item<std::int64_t>());
  }
  return here;
}

// Throws on every rank alike: the sums are the same on all.
void require_alike(const Beside& all) {
  for (const double some : {all.training, all.with_targets}) {
    if (some != 0 && some != all.pipelines)
      throw InvalidArgument(
          "pipeline: ", some, " of ", all.pipelines, " pipelines beside each other ",
          some == all.training ? "train" : "have targets", ", and the others do not");
  }
  const double divisor = all.divisor / all.pipelines;
  if (!are_equal(divisor, all.divisor_squares / all.pipelines))
    throw InvalidArgument(
        "pipeline: the pipelines beside each other give different divisors for gradients, ",
        divisor, " in the mean (0: none); give the same on all ranks");
}

// By what the losses are multiplied.
double loss_scale(const Beside& all, std::optional<double> divisor) {
  if (!divisor && !(all.weight > 0))
    throw InvalidArgument(
        "pipeline: the weights of a step must not all be zero; their sum "
        "over all micro-batches is ",
        all.weight);
  const double mean = all.scaled > 0 ? all.scale / all.scaled : 1;
  if (all.scaled > 0 && !are_equal(mean, all.scale_squares / all.scaled))
    throw GradientError(
        "pipeline: the gradients of some stages come together as a mean over ranks and those of "
        "others as a sum; give all stages the same reduction");
  return 1 / (divisor.value_or(all.weight) * mean);
}

}  // namespace

std::vector<int> PipelinePlan::other_axes() const {
  const int mine = mesh.mesh().index(axis);
  return numbers_below(mesh.mesh().dims(), [&](int a) { return a != mine; });
}

std::vector<int> PipelinePlan::sample_axes() const {
  if (!options.sample_axes) return other_axes();
  return mapped(*options.sample_axes,
                [&](const std::string& name) { return mesh.mesh().index(name); });
}

bool PipelinePlan::counts() const {
  const std::vector<int> samples = sample_axes(), here = mesh.coordinate();
  return std::ranges::all_of(other_axes(), [&](int a) {
    return here[a] == 0 || std::ranges::find(samples, a) != samples.end();
  });
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
  const Mesh& ranks = plan.mesh.mesh();
  if (ranks.size() > 1) plan.mesh.manager().fail_groups_within(ranks, what);
}

StepFacts agree_on_step(PipelinePlan& plan, const PipelineBatch& batch, bool training,
                        std::uint64_t step, std::optional<double> divisor) {
  StepFacts facts;
  facts.training = training;
  facts.step = step;
  if (plan.last()) facts.weights = weights_of(batch);
  std::vector<std::uint64_t> signatures(static_cast<std::size_t>(plan.training.micro_batches));
  Greeting mine = greeting_of(plan, batch, facts, divisor);
  std::exception_ptr problem;
  try {
    fill(mine, signatures, plan, batch, facts, divisor);
  } catch (const GradientError&) {
    problem = std::current_exception();
  } catch (const std::exception& e) {  // of the user's own stage, too
    problem = std::make_exception_ptr(InvalidArgument(e.what()));
  }
  mine.problem = problem ? 1 : 0;
  const Group group = plan.group();
  const Greetings got = greet(plan, mine, signatures);

  facts.micro_batches = static_cast<int>(got.of[plan.training.placement.front()].inputs);
  const std::int64_t targets = got.of[plan.training.placement.back()].targets;
  facts.targets = targets > 0;
  Hash modes;
  bool differ = false;
  for (const Greeting& one : got.of) {
    modes.number(one.trained);
    differ = differ || one.settled != mine.settled;
    // A rank that failed late in a step that others ended is behind.
    facts.step = std::max(facts.step, one.step);
  }
  if (differ) plan.forget_shapes();
  Beside all = summed(got.of, mine, facts);
  if (!problem) {
    const std::string differs = disagreement(group, got.of, mine, facts, targets);
    if (!differs.empty()) problem = std::make_exception_ptr(InvalidArgument(differs));
    if (problem) all.problems += 1;
  }
  all = add_up(plan, all, facts.step);
  if (all.problems > 0)
    agree::all<void, GradientError>(plan.mesh.all(), "pipeline", [&] {
      if (problem) std::rethrow_exception(problem);
    });
  require_alike(all);
  facts.total_weight = all.weight;
  if (training) facts.scale = loss_scale(all, divisor);
  modes.number(training ? 1 : 0);
  for (int k = 0; k < facts.micro_batches; ++k) {
    Hash one;
    one.number(modes.value()).number(got.signatures[k]);
    facts.signatures.push_back(one.value());
  }
  return facts;
}

}  // namespace tessera::detail
