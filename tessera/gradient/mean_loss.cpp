#include "tessera/gradient/mean_loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/gradient/reducer.h"

namespace tessera {
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
    throw InvalidArgument(concat("mean_loss: gradients that are reduced by ",
                                 to_string(reduction.kind),
                                 " are weighted by hand; it takes ReduceOp::avg and sum"));
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
    throw InvalidArgument(concat(
        "mean_loss over group '", group.name(),
        "': the ranks' sample counts must be finite, not negative, and not all zero; their sum is ",
        total, ", this rank gave ", samples));
  const auto& ranks = group.ranks();
  return ScaledGradient::apply(loss, both[1] / both[0],
                               (averaged ? group.size() : 1) * samples / total,
                               averaged ? std::vector<std::int64_t>(ranks.begin(), ranks.end())
                                        : std::vector<std::int64_t>());
}

}  // namespace tessera
