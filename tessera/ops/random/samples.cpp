// Draws whose parameters are tensors: categories by their weights, normal numbers of means and
// deviations, gamma, Dirichlet, Poisson and binomial numbers, and the slopes of rrelu. By global
// index, like all draws.

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

#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "tessera/ops/random/detail/draws.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::sample_rules {
namespace {

using MaybeGenerator = std::optional<at::Generator>;

at::Tensor flat_doubles(const at::Tensor& t) {
  return t.to(at::TensorOptions(at::kCPU).dtype(at::kDouble)).contiguous();
}

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
    const auto at = std::ranges::upper_bound(sums, numbers[k] * sums.back());
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
  for (std::int64_t k = 0; k < count; ++k) drawn[k] = times[k].second;
}

// Rows may be sharded, a row's categories may not.
Plan multinomial(const OpCall& call) {
  refuse_generator(call.name(), call.value("generator").toOptional<at::Generator>());
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
  plan.local = [made, spec, count, categories, replace](const OperatorHandle&, Stack a) {
    const at::Tensor& given = a[0].toTensor();
    const at::Tensor weights = flat_doubles(given);
    // One number for each draw, or without replacement for each category.
    Shape global = made, local = spec.local_shape();
    if (!replace) global.back() = local.back() = categories;
    std::vector<double> numbers;
    each_element(next_draw(*context_of(spec)), global, spec.local_offset(), local,
                 [&](std::int64_t, const Words& w) { numbers.push_back(unit_double(w[0], w[1])); });
    at::Tensor result = at::empty(spec.local_shape(), at::kLong);
    const double* row = weights.const_data_ptr<double>();
    const double* number = numbers.data();
    auto* drawn = result.mutable_data_ptr<std::int64_t>();
    for (std::int64_t left = result.numel() / count; left > 0; --left) {
      const std::vector<double> sums = running_sums(row, categories);
      if (replace)
        with_replacement(sums, number, count, drawn);
      else
        without_replacement(row, number, categories, count, drawn);
      row += categories;
      number += replace ? count : categories;
      drawn += count;
    }
    return Stack{result.to(given.device())};
  };
  return plan;
}

// ---- numbers whose distribution each element gives ----

// As many uniform numbers for one element as a method asks for: Philox again, of the element's own
// words.
class Numbers {
 public:
  explicit Numbers(const Words& w) : key_{w[0], w[1]}, counter_{0, 0, w[2], w[3]} {}
  // In [0, 1).
  double unit() {
    if (left_ == 0) {
      words_ = philox(counter_, key_);
      ++counter_[0];
      left_ = 4;
    }
    left_ -= 2;
    return unit_double(words_[left_], words_[left_ + 1]);
  }
  // In (0, 1].
  double positive() { return 1 - unit(); }
  double normal() {
    const double u = positive();
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * unit());
  }

 private:
  const std::array<std::uint32_t, 2> key_;
  Words counter_, words_ = {};
  std::size_t left_ = 0;
};

// std::lgamma writes to a variable of the process.
double log_gamma(double x) {
  int sign = 0;
  return lgamma_r(x, &sign);
}

// Marsaglia and Tsang, "A simple method for generating gamma variables" (2000); below 1 with their
// power of a uniform number.
double standard_gamma(double shape, Numbers& numbers) {
  if (!(shape >= 0)) return std::numeric_limits<double>::quiet_NaN();
  if (std::isinf(shape)) return shape;
  if (shape < 1)
    return standard_gamma(shape + 1, numbers) * std::pow(numbers.positive(), 1 / shape);
  const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = numbers.normal(), root = 1 + c * x, v = root * root * root;
    if (v > 0 && std::log(numbers.positive()) < x * x / 2 + d - d * v + d * std::log(v))
      return d * v;
  }
}

// Few: uniform numbers until their product falls below exp(-rate) (Knuth). Many: transformed
// rejection (Hoermann, "The transformed rejection method for generating Poisson random variables",
// 1993, algorithm PTRS).
double poisson(double rate, Numbers& numbers) {
  TORCH_CHECK(rate >= 0 && std::isfinite(rate), "poisson: a rate is ", rate,
              ", and must be a finite number of at least 0");
  if (rate < 10) {
    const double least = std::exp(-rate);
    double count = 0;
    double product = numbers.positive();
    while (product > least) {
      ++count;
      product *= numbers.positive();
    }
    return count;
  }
  const double b = 0.931 + 2.53 * std::sqrt(rate), a = -0.059 + 0.02483 * b,
               inverse_alpha = 1.1239 + 1.1328 / (b - 3.4), limit = 0.9277 - 3.6224 / (b - 2);
  for (;;) {
    const double u = numbers.unit() - 0.5, v = numbers.positive(), us = 0.5 - std::abs(u);
    if (us <= 0) continue;
    const double k = std::floor((2 * a / us + b) * u + rate + 0.43);
    if (us >= 0.07 && v <= limit) return k;
    if (k < 0 || (us < 0.013 && v > us)) continue;
    if (std::log(v * inverse_alpha / (a / (us * us) + b)) <=
        k * std::log(rate) - rate - log_gamma(k + 1))
      return k;
  }
}

// For a probability of at most one half. Few successes: the gaps between them, which are geometric
// (Devroye, "Non-uniform random variate generation", 1986, X.4). Many: transformed rejection
// (Hoermann, "The generation of binomial random variates", 1993, algorithm BTRS).
double successes(double count, double p, Numbers& numbers) {
  if (count * p < 10) {
    const double log_failure = std::log1p(-p);
    double done = 0;
    for (double k = 0;; ++k) {
      done += std::max(1.0, std::ceil(std::log(numbers.positive()) / log_failure));
      if (!(done <= count)) return k;
    }
  }
  const double odds = p / (1 - p), deviation = std::sqrt(count * p * (1 - p)),
               b = 1.15 + 2.53 * deviation, a = -0.0873 + 0.0248 * b + 0.01 * p,
               limit = 0.92 - 4.2 / b, alpha = (2.83 + 5.1 / b) * deviation,
               mode = std::floor((count + 1) * p);
  const double at_mode = log_gamma(mode + 1) + log_gamma(count - mode + 1);
  for (;;) {
    const double u = numbers.unit() - 0.5, v = numbers.positive(), us = 0.5 - std::abs(u);
    if (us <= 0) continue;
    const double k = std::floor((2 * a / us + b) * u + count * p + 0.5);
    if (k < 0 || k > count) continue;
    if (us >= 0.07 && v <= limit) return k;
    if (std::log(v * alpha / (a / (us * us) + b)) <=
        at_mode - log_gamma(k + 1) - log_gamma(count - k + 1) + (k - mode) * std::log(odds))
      return k;
  }
}

double binomial(double count, double p, Numbers& numbers) {
  if (std::isnan(count) || std::isnan(p)) return std::numeric_limits<double>::quiet_NaN();
  TORCH_CHECK(std::isfinite(count), "binomial: a count is infinite");
  if (count <= 0 || p <= 0) return 0;
  count = std::floor(count);
  if (p >= 1) return count;
  return p <= 0.5 ? successes(count, p, numbers) : count - successes(count, 1 - p, numbers);
}

// Draws each element by itself, from the parameters at its place. `trailing`: dims at the end that
// a rank needs complete.
template <class Draw>
Plan each_by_itself(const OpCall& call, int trailing, Draw draw) {
  refuse_generator(call.name(), call.value("generator").toOptional<at::Generator>());
  const TensorInfo& first = call.tensor(0);
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    if (!at::isFloatingType(t.dtype))
      throw InvalidArgument(call.name(), " of ", c10::toString(t.dtype),
                            " parameters: give floating-point ones");
    if (t.spec.shape() != first.spec.shape())
      throw ShardingError(call.name(), " of parameters of shapes ", list(first.spec.shape()),
                          " and ", list(t.spec.shape()), ": expand them to one shape");
    p.inputs.push_back(last_dims_unsharded(t.spec.dims(), trailing));
  }
  p.outputs = {p.inputs[0]};
  p.output_shapes = {first.spec.shape()};
  Plan plan = solve(p);
  plan.local = [spec = plan.outputs[0].spec, parameters = call.tensors().size(), draw](
                   const OperatorHandle&, Stack a) {
    const at::Tensor& like = a[0].toTensor();
    const at::Tensor one = flat_doubles(like),
                     two = parameters > 1 ? flat_doubles(a[1].toTensor()) : one;
    at::Tensor made = at::empty(spec.local_shape(), at::kDouble);
    const double *x = one.const_data_ptr<double>(), *y = two.const_data_ptr<double>();
    auto* drawn = made.mutable_data_ptr<double>();
    each_element(next_draw(*context_of(spec)), spec.shape(), spec.local_offset(),
                 spec.local_shape(), [&](std::int64_t i, const Words& w) {
                   Numbers numbers(w);
                   drawn[i] = draw(x[i], y[i], numbers);
                 });
    return Stack{made.to(like.options())};
  };
  return plan;
}

// What is too small for the dtype is its smallest normal number: logarithms are taken of it.
at::Tensor at_least_smallest(const at::Tensor& drawn) {
  double least = std::numeric_limits<double>::min();
  if (drawn.scalar_type() == at::kHalf) least = 0x1p-14;
  if (drawn.scalar_type() == at::kFloat || drawn.scalar_type() == at::kBFloat16)
    least = std::numeric_limits<float>::min();
  return drawn.clamp_min(least);
}

Plan gammas(const OpCall& call, bool shares) {
  Plan plan = each_by_itself(call, shares ? 1 : 0, [](double shape, double, Numbers& numbers) {
    return standard_gamma(shape, numbers);
  });
  plan.local = [drawn = plan.local, shares](const OperatorHandle& op, Stack a) {
    at::Tensor t = at_least_smallest(drawn(op, std::move(a))[0].toTensor());
    if (shares && t.dim() > 0) t = at_least_smallest(t / t.sum(-1, true));
    return Stack{t};
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

at::Tensor normal_of_tensors(const at::Tensor& mean, const at::Tensor& deviation,
                             MaybeGenerator generator) {
  refuse_generator("aten::normal", generator);
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

at::Tensor normal_of_means(const at::Tensor& mean, double deviation, MaybeGenerator generator) {
  TORCH_CHECK(deviation >= 0, "normal: the standard deviation is ", deviation, ", less than 0");
  return normal_of_tensors(mean, at::full_like(mean, deviation), std::move(generator));
}
at::Tensor normal_of_deviations(double mean, const at::Tensor& deviation,
                                MaybeGenerator generator) {
  return normal_of_tensors(at::full_like(deviation, mean), deviation, std::move(generator));
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
  refuse_generator("aten::rrelu_with_noise", generator);
  check_slopes(lower.toDouble(), upper.toDouble());
  if (!training) return at::leaky_relu(x, (lower.toDouble() + upper.toDouble()) / 2);
  return x * slopes(x, noise, lower, upper);
}

at::Tensor& rrelu_with_noise_in_place(at::Tensor& x, at::Tensor& noise, const at::Scalar& lower,
                                      const at::Scalar& upper, bool training,
                                      MaybeGenerator generator) {
  refuse_generator("aten::rrelu_with_noise_", generator);
  check_slopes(lower.toDouble(), upper.toDouble());
  if (!training) return at::leaky_relu_(x, (lower.toDouble() + upper.toDouble()) / 2);
  return x.mul_(slopes(x, noise, lower, upper));
}

const AtStart registered([] {
  const RuleOptions always{.for_replicated = true};
  register_rule("aten::multinomial", multinomial, always);
  register_rule(
      "aten::poisson",
      [](const OpCall& c) {
        return each_by_itself(c, 0,
                              [](double rate, double, Numbers& n) { return poisson(rate, n); });
      },
      always);
  register_rule(
      "aten::binomial", [](const OpCall& c) { return each_by_itself(c, 0, binomial); }, always);
  register_rule("aten::_standard_gamma", [](const OpCall& c) { return gammas(c, false); }, always);
  register_rule("aten::_sample_dirichlet", [](const OpCall& c) { return gammas(c, true); }, always);
  register_decomposition("normal.Tensor_Tensor", normal_of_tensors);
  register_decomposition("normal.Tensor_float", normal_of_means);
  register_decomposition("normal.float_Tensor", normal_of_deviations);
  register_decomposition("rrelu_with_noise", rrelu_with_noise);
  register_decomposition("rrelu_with_noise_", rrelu_with_noise_in_place);
});

}  // namespace
}  // namespace tessera::detail::sample_rules
