#include "special.h"

#include <algorithm>
#include <limits>

#include "out_forms.h"

namespace tessera::test {

const char* name_of(Special special) {
  static constexpr const char* names[] = {"",
                                          "ties",
                                          "NaN",
                                          "infinities",
                                          "large",
                                          "integers",
                                          "booleans",
                                          "an expanded input",
                                          "conjugated",
                                          "one tensor twice",
                                          "inference mode",
                                          "other values before",
                                          "inputs that overlap",
                                          "mixed dtypes",
                                          "out=",
                                          "float16 that overflows",
                                          "gradients on one rank alone"};
  return names[static_cast<int>(special)];
}

namespace {

bool is_expandable(const at::Tensor& t) {
  return t.dim() > 0 && t.size(0) > 0 && differentiable(t);
}
bool are_alike(const Tensors& inputs) {
  return inputs.size() > 1 && inputs[0].sizes() == inputs[1].sizes() &&
         inputs[0].scalar_type() == inputs[1].scalar_type();
}

// It would change something: a case that is drawn for it is about it.
bool fits(Special special, const OperatorCase& one, const Tensors& inputs) {
  // Of nothing, kernels take dtypes that they refuse of something.
  const bool numbers = one.any_type && std::ranges::all_of(inputs, [](const at::Tensor& t) {
                         return t.numel() > 0;
                       });
  switch (special) {
    case Special::ties:
      return one.ties;
    case Special::nan:
    case Special::infinite:
    case Special::large:
      return one.not_finite;
    case Special::integers:
    case Special::booleans:
      return numbers;
    case Special::expanded:
      return std::ranges::any_of(inputs, is_expandable);
    case Special::conjugated:
      return one.any_type && one.complex && differentiable(inputs[0]);
    case Special::shared:
      return are_alike(inputs);
    case Special::overlapping:
      return are_alike(inputs) && inputs[0].dim() > 0 && differentiable(inputs[0]);
    case Special::mixed:
      return one.any_type && std::ranges::any_of(inputs, differentiable);
    case Special::overflow:
      return one.any_type && one.not_finite && std::ranges::any_of(inputs, differentiable);
    case Special::one_rank:
      return one.in_step && differentiable(inputs[0]);
    default:
      return true;
  }
}

}  // namespace

Special draw_special(const OperatorCase& one, const Tensors& inputs, Draw& draw) {
  if (!draw.chance(70) || one.random || !one.special) return Special::none;
  std::vector<Special> possible;
  for (int i = 1; i <= static_cast<int>(Special::last); ++i) {
    if (fits(static_cast<Special>(i), one, inputs)) possible.push_back(static_cast<Special>(i));
  }
  return draw.of(possible);
}

std::optional<at::ScalarType> type_of(Special special) {
  switch (special) {
    case Special::conjugated:
      return at::kComplexDouble;
    case Special::overflow:
      return at::kHalf;
    case Special::none:
    case Special::nan:
    case Special::shared:
    case Special::expanded:
    case Special::inference:
    case Special::again:
    case Special::out:
      return std::nullopt;
    default:
      return at::kDouble;
  }
}

at::Tensor special_values(const at::Tensor& value, Special special, Draw& draw) {
  // Both parts of complex numbers: products with 1, which Partial(product) is made of, spread a NaN
  // from one to the other.
  const auto number = [&](double with) {
    return value.is_complex() ? at::Scalar(c10::complex<double>(with, with)) : at::Scalar(with);
  };
  const auto sprinkled = [&](double with) {
    at::Tensor t = value.clone(at::MemoryFormat::Preserve);
    for (std::int64_t n = t.numel(); n > 0; n -= 7) {
      if (t.dim() == 0) return draw.chance(50) ? at::full_like(t, number(with)) : t;
      at::Tensor place = t;
      while (place.dim() > 0) place = place.select(0, draw.below(static_cast<int>(place.size(0))));
      place.fill_(number(draw.chance(50) ? with : -with));
    }
    return t;
  };
  switch (special) {
    case Special::ties:
      return at::round(value);
    case Special::nan:
      return sprinkled(std::numeric_limits<double>::quiet_NaN());
    case Special::infinite:
      return sprinkled(std::numeric_limits<double>::infinity());
    case Special::large:
      return value * 1e120;
    case Special::integers:
      return (value * 2).round().to(at::kLong);
    case Special::booleans:
      return value.gt(0);
    case Special::overflow:
      // Up to 1000 or so: of one sign, so that a part of a sum overflows only where the sum does.
      return (value.abs() * 400).to(at::kHalf);
    default:
      return value;
  }
}

void make_special(Instance& instance, Special special, Draw& draw) {
  Tensors& inputs = instance.inputs;
  const auto f = instance.function;
  const auto any_of = [&](bool (*is)(const at::Tensor&)) {
    std::vector<std::size_t> which;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (is(inputs[i])) which.push_back(i);
    return draw.of(which);
  };
  if (special == Special::expanded) {
    const std::size_t i = any_of(is_expandable);
    const at::Tensor t = inputs[i];
    inputs[i] = t.narrow(0, 0, 1).clone();
    instance.function = [f, i, shape = t.sizes().vec()](const Tensors& given) {
      Tensors all = given;
      all[i] = all[i].expand(shape);
      return f(all);
    };
  } else if (special == Special::conjugated) {
    instance.function = [f](const Tensors& given) {
      Tensors all = given;
      all[0] = all[0].conj();
      return f(all);
    };
  } else if (special == Special::shared) {
    instance.function = [f](const Tensors& given) {
      Tensors all = given;
      all[1] = all[0];
      return f(all);
    };
  } else if (special == Special::overlapping) {
    const std::int64_t n = inputs[0].size(0);
    inputs[0] = at::cat({inputs[0], inputs[1].narrow(0, 0, std::min<std::int64_t>(n, 1))});
    instance.function = [f, n](const Tensors& given) {
      Tensors all = given;
      all[0] = given[0].narrow(0, 0, n);
      all[1] = given[0].narrow(0, n > 0 ? 1 : 0, n);
      return f(all);
    };
  } else if (special == Special::mixed) {
    const std::size_t i = any_of(differentiable);
    instance.function = [f, i](const Tensors& given) {
      Tensors all = given;
      all[i] = all[i].to(at::kFloat);
      return f(all);
    };
  } else if (special == Special::again) {
    instance.function = [f](const Tensors& given) {
      Tensors others;
      for (const at::Tensor& t : given) {
        const at::NoGradGuard guard;
        others.push_back(differentiable(t) ? t.detach() * 0.5 : t.detach().clone());
      }
      {
        const at::NoGradGuard guard;
        repeat_with_other_numbers([&] { f(others); });
      }
      return f(given);
    };
  }
}

}  // namespace tessera::test
