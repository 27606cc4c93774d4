#include "special.h"

#include <algorithm>
#include <limits>

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
                                          "out="};
  return names[static_cast<int>(special)];
}

Special draw_special(const OperatorCase& one, const Tensors& inputs, at::ScalarType type,
                     Draw& draw) {
  if (!draw.chance(35) || one.random || !one.special) return Special::none;
  const bool complex = type == at::kComplexDouble;
  // Of nothing, kernels take dtypes that they refuse of something.
  const bool numbers =
      one.any_type && !complex &&
      std::ranges::all_of(inputs, [](const at::Tensor& t) { return t.numel() > 0; });
  switch (draw.below(15)) {
    case 0:
      return complex || !one.ties ? Special::none : Special::ties;
    case 1:
      return one.not_finite ? Special::nan : Special::none;
    case 2:
      return complex || !one.not_finite ? Special::none : Special::infinite;
    case 3:
      return type == at::kDouble ? Special::large : Special::none;
    case 4:
      return numbers ? Special::integers : Special::none;
    case 5:
      return numbers ? Special::booleans : Special::none;
    case 6:
      return Special::expanded;
    case 7:
      return complex ? Special::conjugated : Special::none;
    case 8:
      return Special::shared;
    case 9:
      return Special::inference;
    case 10:
      return Special::overlapping;
    case 11:
      return one.any_type && type == at::kDouble ? Special::mixed : Special::none;
    case 13:
      return Special::out;
    default:
      return Special::again;
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
    default:
      return value;
  }
}

void make_special(Instance& instance, Special special, Draw& draw) {
  Tensors& inputs = instance.inputs;
  const auto f = instance.function;
  if (special == Special::expanded) {
    const auto i = static_cast<std::size_t>(draw.below(static_cast<int>(inputs.size())));
    const at::Tensor t = inputs[i];
    if (t.dim() == 0 || t.size(0) == 0 || !differentiable(t)) return;
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
  } else if (special == Special::shared && inputs.size() > 1 &&
             inputs[0].sizes() == inputs[1].sizes() &&
             inputs[0].scalar_type() == inputs[1].scalar_type()) {
    instance.function = [f](const Tensors& given) {
      Tensors all = given;
      all[1] = all[0];
      return f(all);
    };
  } else if (special == Special::overlapping && inputs.size() > 1 && inputs[0].dim() > 0 &&
             inputs[0].sizes() == inputs[1].sizes() && differentiable(inputs[0]) &&
             differentiable(inputs[1])) {
    const std::int64_t n = inputs[0].size(0);
    inputs[0] = at::cat({inputs[0], inputs[1].narrow(0, 0, std::min<std::int64_t>(n, 1))});
    instance.function = [f, n](const Tensors& given) {
      Tensors all = given;
      all[0] = given[0].narrow(0, 0, n);
      all[1] = given[0].narrow(0, n > 0 ? 1 : 0, n);
      return f(all);
    };
  } else if (special == Special::mixed) {
    const auto i = static_cast<std::size_t>(draw.below(static_cast<int>(inputs.size())));
    if (!differentiable(inputs[i])) return;
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
        f(others);
      }
      return f(given);
    };
  }
}

}  // namespace tessera::test
