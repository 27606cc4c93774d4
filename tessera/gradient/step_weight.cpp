#include "tessera/gradient/step_weight.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>
#include <utility>

#include "tessera/base/text.h"

namespace tessera {

StepWeight::StepWeight(Group group, Reduced reduced)
    : group_(std::move(group)), reduced_(reduced) {}

at::Tensor StepWeight::weigh(const at::Tensor& loss, double weight) {
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point()) {
    throw InvalidArgument(
        "StepWeight::weigh takes a 0-dim floating-point loss: the mean over the micro-batch");
  }
  if (!std::isfinite(weight) || weight < 0) {
    valid_ = false;
    weight = 0;
  }
  weight_ += weight;
  // The same operators whatever the weight, since a sharded loss makes ranks call together. A
  // product alone would keep the NaN of a mean over nothing.
  const at::Tensor counts = at::full({}, weight > 0, loss.options().dtype(at::kBool));
  const at::Tensor weighed = at::where(counts, loss, at::zeros({}, loss.options())) * weight;
  const at::NoGradGuard no_grad;
  const at::Tensor value = weighed.detach().to(at::kDouble);
  sum_ = sum_.defined() ? sum_ + value : value;
  return weighed;
}

double StepWeight::finish(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  const double mine = weight_;
  const Sums own = take();
  at::Tensor sums = at::tensor({own.weight, own.loss}, at::kDouble);
  at::Tensor travelling = sums;
  for (const at::Tensor& p : parameters) {
    if (p.defined() && p.is_cuda()) {
      travelling = sums.to(p.device());
      break;
    }
  }
  group_.all_reduce(travelling, ReduceOp::sum, {.name = "step_weight"});
  sums = travelling.to(at::kCPU);
  const double total = sums[0].item<double>();
  if (!(total > 0)) {
    throw InvalidArgument(concat("StepWeight over group '", group_.name(),
                                 "': the weights of a step must be finite, not negative, and not "
                                 "all zero; their sum over ranks and micro-batches is ",
                                 total, ", this rank gave ", mine));
  }
  const double factor = (reduced_ == Reduced::averaged ? group_.size() : 1) / total;
  for (const at::Tensor& p : parameters) {
    if (p.defined() && p.grad().defined()) p.grad().mul_(factor);
  }
  return sums[1].item<double>() / total;
}

StepWeight::Sums StepWeight::take() {
  const at::NoGradGuard no_grad;
  const Sums sums{valid_ ? weight_ : std::numeric_limits<double>::quiet_NaN(),
                  sum_.defined() ? sum_.item<double>() : 0.0};
  reset();
  return sums;
}

void StepWeight::reset() {
  weight_ = 0;
  valid_ = true;
  sum_ = at::Tensor();
}

}  // namespace tessera
