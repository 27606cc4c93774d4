#include "tessera/gradient/step_weight.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/gradient/reducer.h"
#include "tessera/gradient/sync.h"

namespace tessera {

StepWeight::StepWeight(Group group, std::optional<Reduced> others)
    : group_(std::move(group)), others_(others) {}

// By what the sum of the ranks' gradients was multiplied. Throws GradientError if it is the sum of
// other ranks than the step counts.
std::optional<double> StepWeight::scale(const at::Tensor& parameter, std::size_t index) const {
  const auto sum = gradient_sum(parameter);
  if (!sum) return std::nullopt;
  if (sum->reducers > 0) {
    // A mean over more ranks would hold samples that the step does not count.
    const bool fits =
        sum->covers(group_.ranks()) && (!sum->is_mean() || sum->count == group_.size());
    if (fits) return sum->scale;
    throw GradientError("StepWeight over group '", group_.name(), "': the gradient of parameter ",
                        index, " (shape ", parameter.sizes(), ") comes together over ", sum->count,
                        " ranks (here ", list(sum->ranks),
                        "), and the step counts the samples of ranks ", list(group_.ranks()),
                        ". Give StepWeight the ranks over which gradients come "
                        "together, or reduce this one over the others, too");
  }
  if (group_.size() == 1) return 1.0;
  if (!others_) return std::nullopt;
  return *others_ == Reduced::averaged ? 1.0 / group_.size() : 1.0;
}

at::Tensor StepWeight::weigh(const at::Tensor& loss, double weight) {
  return weigh(loss, weight, 1, true);
}

at::Tensor StepWeight::weigh_in(const at::Tensor& loss, double weight, double unit) {
  return weigh(loss, weight, unit, true);
}

at::Tensor StepWeight::weigh_global(const at::Tensor& loss, double weight) {
  return weigh(loss, weight, 1, group_.rank() == 0);
}

at::Tensor StepWeight::weigh(const at::Tensor& loss, double weight, double unit, bool counts) {
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point()) {
    throw InvalidArgument(
        "StepWeight::weigh takes a 0-dim floating-point loss: the mean over the micro-batch");
  }
  if (!std::isfinite(weight) || weight < 0) {
    valid_ = false;
    weight = 0;
  }
  if (counts) weight_ += weight;
  // A plain tensor in the host's memory: its value costs nothing, and nobody else has to know.
  // (Sharded ones show a CPU device, too.)
  const c10::DispatchKeySet keys = loss.key_set();
  const bool plain = loss.is_cpu() && !keys.has_backend(c10::BackendComponent::PrivateUse1Bit) &&
                     !keys.has_backend(c10::BackendComponent::PrivateUse2Bit) &&
                     !keys.has_backend(c10::BackendComponent::PrivateUse3Bit);
  if (plain && weight > 0) {
    if (counts) host_sum_ += loss.item<double>() * weight;
    return weight == unit ? loss : loss * (weight / unit);
  }
  // The same operators whatever the weight, since a sharded loss makes ranks call together. A
  // product alone would keep the NaN of a mean over nothing.
  const at::Tensor any = at::full({}, weight > 0, loss.options().dtype(at::kBool));
  const at::Tensor kept = at::where(any, loss, at::zeros({}, loss.options()));
  const at::Tensor weighed = kept * (weight / unit);
  const at::NoGradGuard no_grad;
  // All ranks ask for the value of a sharded loss, and one of them counts it.
  const at::Tensor value = kept.detach().to(at::kDouble) * (counts ? weight : 0.0);
  sum_ = sum_.defined() ? sum_ + value : value;
  return weighed;
}

void StepWeight::count(double loss, double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    valid_ = false;
  } else if (weight > 0) {
    weight_ += weight;
    host_sum_ += loss * weight;
  }
}

double StepWeight::finish(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  const double mine = weight_;
  const Sums own = take();
  at::Tensor sums = at::tensor({own.weight, own.loss}, at::kDouble);
  at::Tensor travelling = sums;
  for (const at::Tensor& p : parameters) {
    if (p.defined() && !p.is_cpu()) {
      travelling = sums.to(p.device());
      break;
    }
  }
  group_.all_reduce(travelling, ReduceOp::sum, {.name = "step_weight"});
  sums = travelling.to(at::kCPU);
  const double total = sums[0].item<double>();
  if (!(total > 0)) {
    throw InvalidArgument("StepWeight over group '", group_.name(),
                          "': the weights of a step must be finite, not negative, and not "
                          "all zero; their sum over ranks and micro-batches is ",
                          total, ", this rank gave ", mine);
  }
  std::vector<double> factors;
  for (const at::Tensor& p : parameters) {
    if (!p.defined() || !p.requires_grad()) {
      factors.push_back(1);
      continue;
    }
    const auto by = scale(p, factors.size());
    if (!by || *by == 0)
      throw GradientError(
          "StepWeight over group '", group_.name(),
          "': it is not known how the gradient of parameter ", factors.size(), " (shape ",
          p.sizes(),
          ") came together: nothing known reduces it, or it is weighted by hand already. For what "
          "the program reduces itself, give StepWeight::Reduced");
    factors.push_back(1 / (*by * total));
  }
  // A tied parameter is given under each of its names.
  std::unordered_set<const at::TensorImpl*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& p = parameters[i];
    if (p.defined() && p.grad().defined() && seen.insert(p.unsafeGetTensorImpl()).second)
      p.grad().mul_(factors[i]);
  }
  return sums[1].item<double>() / total;
}

StepWeight::Sums StepWeight::take() {
  const at::NoGradGuard no_grad;
  const Sums sums{valid_ ? weight_ : std::numeric_limits<double>::quiet_NaN(),
                  host_sum_ + (sum_.defined() ? sum_.item<double>() : 0.0)};
  reset();
  return sums;
}

void StepWeight::reset() {
  weight_ = 0;
  valid_ = true;
  host_sum_ = 0;
  sum_ = at::Tensor();
}

namespace {

// Value `mean`, gradient `factor` times what comes: the weight of this rank's loss in the mean.
struct ScaledGradient : torch::autograd::Function<ScaledGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& loss,
                            const at::Tensor& mean, double factor,
                            const std::vector<std::int64_t>& averaged) {
    context->saved_data["factor"] = factor;
    context->saved_data["averaged"] = averaged;
    return mean.to(loss.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto averaged = context->saved_data["averaged"].toIntVector();
    detail::announce_average(std::vector<int>(averaged.begin(), averaged.end()));
    return {gradients[0] * context->saved_data["factor"].toDouble(), at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor mean_loss(const at::Tensor& loss, double samples, const Group& group,
                     ReduceOp reduction) {
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point())
    throw InvalidArgument(
        "mean_loss takes a 0-dim floating-point loss: reduce it over this rank's own samples "
        "first");
  const bool averaged = reduction.kind == ReduceOp::Kind::avg;
  if (!averaged && reduction.kind != ReduceOp::Kind::sum)
    throw InvalidArgument("mean_loss: gradients that are reduced by ", to_string(reduction.kind),
                          " are weighted by hand; it takes ReduceOp::avg and sum");
  const bool valid = std::isfinite(samples) && samples >= 0;
  // An invalid weight travels as NaN, so that every rank throws instead of one throwing and the
  // others waiting.
  const at::Tensor sums = at::empty({2}, at::kDouble);
  sums[0] = valid ? samples : std::nan("");
  sums[1] = valid && samples > 0 ? samples * loss.detach().to(at::kDouble).item<double>() : 0.0;
  const at::Tensor travelling = sums.to(loss.device());
  group.all_reduce(travelling, ReduceOp::sum, {.name = "mean_loss"});
  const at::Tensor both = travelling.to(at::kCPU);
  const double total = both[0].item<double>();
  if (!(total > 0))
    throw InvalidArgument(
        "mean_loss over group '", group.name(),
        "': the ranks' sample counts must be finite, not negative, and not all zero; their sum is ",
        total, ", this rank gave ", samples);
  const auto& ranks = group.ranks();
  return ScaledGradient::apply(loss, both[1] / both[0],
                               (averaged ? group.size() : 1) * samples / total,
                               averaged ? std::vector<std::int64_t>(ranks.begin(), ranks.end())
                                        : std::vector<std::int64_t>());
}

}  // namespace tessera
