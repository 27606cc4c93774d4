// Draws whose parameters are tensors: categories by their weights, normal numbers of means and
// deviations, and the slopes of rrelu. By global index, like all draws.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/ops/random/draws.h"
#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::sample_rules {

namespace {

using MaybeGenerator = std::optional<at::Generator>;

void refuse_given(const char* op, const MaybeGenerator& generator) {
  if (generator && generator->defined())
    throw ShardingError(concat("aten::", op,
                               ": a generator is given, but sharded tensors draw by global index: "
                               "leave it out and use tessera::manual_seed"));
}

// The row-major numbers in [0, 1) of rows `first`, ... of a tensor [rows, columns].
struct RowsOfDraw {
  std::vector<std::int64_t> global, offset, local;

  std::vector<double> numbers(const MeshContext& context) const {
    std::vector<double> all;
    each_element(next_draw(context), global, offset, local,
                 [&](std::int64_t, const std::array<std::uint32_t, 4>& w) {
                   all.push_back(unit_double(w[0], w[1]));
                 });
    return all;
  }
};

// The sums of the weights up to each category. Throws if there is nothing to draw from.
std::vector<double> running_sums(const double* weights, std::int64_t categories) {
  std::vector<double> sums;
  double sum = 0;
  for (std::int64_t c = 0; c < categories; ++c) {
    TORCH_CHECK(weights[c] >= 0 && std::isfinite(weights[c]),
                "multinomial: a probability is infinite, not a number, or less than 0");
    sums.push_back(sum += weights[c]);
  }
  TORCH_CHECK(sum > 0, "multinomial: the sum of the probabilities is 0");
  return sums;
}

// With replacement: where a number below the sum falls. A category of weight 0 covers nothing.
void with_replacement(const std::vector<double>& sums, const double* numbers, std::int64_t count,
                      std::int64_t* drawn) {
  for (std::int64_t k = 0; k < count; ++k) {
    const auto at = std::upper_bound(sums.begin(), sums.end(), numbers[k] * sums.back());
    drawn[k] = at - sums.begin();
  }
}

// Without: the categories whose exponential waiting times, of rates that are the weights, end
// first (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
void without_replacement(const double* weights, const double* numbers, std::int64_t categories,
                         std::int64_t count, std::int64_t* drawn) {
  std::vector<std::pair<double, std::int64_t>> times;
  for (std::int64_t c = 0; c < categories; ++c) {
    times.emplace_back(weights[c] > 0 ? -std::log1p(-numbers[c]) / weights[c]
                                      : std::numeric_limits<double>::infinity(),
                       c);
  }
  std::partial_sort(times.begin(), times.begin() + count, times.end());
  for (std::int64_t k = 0; k < count; ++k) drawn[k] = times[static_cast<std::size_t>(k)].second;
}

// Rows may be sharded, a row's categories may not.
Plan multinomial(const OpCall& call) {
  if (call.has("generator")) refuse_given("multinomial", call.value("generator").toGenerator());
  const TensorInfo& of = call.tensor(0);
  const int dims = of.spec.dims();
  const std::int64_t count = call.integer("num_samples");
  const bool replace = call.boolean("replacement");
  const auto refuse = [](const std::string& what) {
    throw InvalidArgument("aten::multinomial: " + what);
  };
  if (dims != 1 && dims != 2)
    refuse(concat("the probabilities have ", dims, " dims: [categories] or [rows, categories]"));
  if (!at::isFloatingType(of.dtype))
    refuse(concat("of ", c10::toString(of.dtype), " probabilities: give floating-point ones"));
  const std::int64_t categories = of.spec.shape().back();
  if (count < 1) refuse(concat("num_samples is ", count, ": at least 1"));
  if (!replace && count > categories)
    refuse(concat(count, " of ", categories, " categories cannot be drawn without replacement"));
  LabelProblem p(call);
  p.inputs = {last_dims_unsharded(dims, 1)};
  p.outputs = p.inputs;
  std::vector<std::int64_t> made = of.spec.shape();
  made.back() = count;
  p.output_shapes = {made};
  Plan plan = solve(p);
  const ShardSpec& spec = plan.outputs[0].spec;
  RowsOfDraw draw{made, spec.local_offset(), spec.local_shape()};
  if (!replace) draw.global.back() = draw.local.back() = categories;
  plan.local = [draw, spec, count, categories, replace](const c10::OperatorHandle&,
                                                        torch::jit::Stack a) {
    const at::Tensor& given = a[0].toTensor();
    const at::Tensor weights =
        given.to(at::TensorOptions(at::kCPU).dtype(at::kDouble)).contiguous();
    const std::vector<double> numbers = draw.numbers(*context_of(spec));
    at::Tensor result = at::empty(spec.local_shape(), at::kLong);
    const double* row = weights.const_data_ptr<double>();
    const double* number = numbers.data();
    auto* drawn = result.mutable_data_ptr<std::int64_t>();
    for (std::int64_t left = result.numel() / count; left > 0; --left) {
      const std::vector<double> sums = running_sums(row, categories);
      if (replace) {
        with_replacement(sums, number, count, drawn);
      } else {
        without_replacement(row, number, categories, count, drawn);
      }
      row += categories;
      number += replace ? count : categories;
      drawn += count;
    }
    return torch::jit::Stack{result.to(given.device())};
  };
  return plan;
}

// What libtorch gives for the gradient of a draw with respect to its parameters.
struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& mean,
                            const at::Tensor& deviation, const at::Tensor& drawn) {
    ctx->save_for_backward({mean, deviation});
    return drawn.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list&) {
    const auto saved = ctx->get_saved_variables();
    return {at::zeros_like(saved[0]), at::zeros_like(saved[1]), at::Tensor()};
  }
};

at::Tensor draw_normal(const at::Tensor& mean, const at::Tensor& deviation,
                       const MaybeGenerator& generator) {
  refuse_given("normal", generator);
  TORCH_CHECK(!deviation.is_complex() &&
                  (deviation.numel() == 0 || deviation.detach().min().ge(0).item<bool>()),
              "normal: a standard deviation is less than 0");
  at::Tensor drawn;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor shape = mean + deviation;
    drawn = mean + deviation * at::randn_like(shape);
  }
  return mean.requires_grad() || deviation.requires_grad()
             ? WithoutGradient::apply(mean, deviation, drawn)
             : drawn;
}

at::Tensor normal_of_tensors(const at::Tensor& mean, const at::Tensor& deviation,
                             MaybeGenerator generator) {
  return draw_normal(mean, deviation, generator);
}
at::Tensor normal_of_means(const at::Tensor& mean, double deviation, MaybeGenerator generator) {
  TORCH_CHECK(deviation >= 0, "normal: the standard deviation is ", deviation, ", less than 0");
  return draw_normal(mean, at::full_like(mean, deviation), generator);
}
at::Tensor normal_of_deviations(double mean, const at::Tensor& deviation,
                                MaybeGenerator generator) {
  return draw_normal(at::full_like(deviation, mean), deviation, generator);
}

// What each element is multiplied by: where it is positive by 1.
at::Tensor slopes(const at::Tensor& x, const at::Tensor& noise, const at::Scalar& lower,
                  const at::Scalar& upper) {
  const at::NoGradGuard no_grad;
  const double low = lower.toDouble(), high = upper.toDouble();
  const at::Tensor drawn = at::rand_like(x) * (high - low) + low;
  const at::Tensor by = at::where(x.le(0), drawn, at::ones_like(drawn));
  at::Tensor(noise).copy_(by);
  return by;
}

void check_slopes(double lower, double upper) {
  TORCH_CHECK(std::isfinite(lower) && std::isfinite(upper) && lower <= upper, "rrelu: slopes from ",
              lower, " to ", upper, ": the range is empty or infinite");
}

at::Tensor rrelu_with_noise(const at::Tensor& x, at::Tensor& noise, const at::Scalar& lower,
                            const at::Scalar& upper, bool training, MaybeGenerator generator) {
  refuse_given("rrelu_with_noise", generator);
  check_slopes(lower.toDouble(), upper.toDouble());
  if (!training) return at::leaky_relu(x, (lower.toDouble() + upper.toDouble()) / 2);
  return x * slopes(x, noise, lower, upper);
}

at::Tensor& rrelu_with_noise_in_place(at::Tensor& x, at::Tensor& noise, const at::Scalar& lower,
                                      const at::Scalar& upper, bool training,
                                      MaybeGenerator generator) {
  refuse_given("rrelu_with_noise_", generator);
  check_slopes(lower.toDouble(), upper.toDouble());
  if (!training) return at::leaky_relu_(x, (lower.toDouble() + upper.toDouble()) / 2);
  return x.mul_(slopes(x, noise, lower, upper));
}

const bool registered = [] {
  register_rule("aten::multinomial", multinomial, RuleOptions{.for_replicated = true});
  register_decomposition("normal.Tensor_Tensor", normal_of_tensors);
  register_decomposition("normal.Tensor_float", normal_of_means);
  register_decomposition("normal.float_Tensor", normal_of_deviations);
  register_decomposition("rrelu_with_noise", rrelu_with_noise);
  register_decomposition("rrelu_with_noise_", rrelu_with_noise_in_place);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::sample_rules
