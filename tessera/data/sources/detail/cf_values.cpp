#include "tessera/data/sources/detail/cf_values.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>

#include <cmath>

namespace tessera::detail {

namespace {

std::vector<double> numbers_of(const VariableInfo& variable, const char* attribute) {
  const auto found = variable.attributes.find(attribute);
  if (found == variable.attributes.end()) return {};
  const auto* numbers = std::get_if<std::vector<double>>(&found->second);
  if (!numbers || numbers->empty())
    throw VariableError("attribute ", attribute, " of ", variable.name,
                        " must be a number, and is text or empty");
  return *numbers;
}

double number_or(const VariableInfo& variable, const char* attribute, double otherwise) {
  const auto numbers = numbers_of(variable, attribute);
  return numbers.empty() ? otherwise : numbers.front();
}

// True where a stored value stands for "no value".
at::Tensor missing_mask(const at::Tensor& stored, const VariableInfo& variable,
                        const std::optional<at::Scalar>& fill) {
  const bool integral = !at::isFloatingType(stored.scalar_type());
  // In the stored type a comparison with a number that the type cannot hold would throw or round.
  const at::Tensor wide = integral ? stored.to(at::kLong) : stored;
  at::Tensor mask = at::zeros_like(stored, at::kBool);
  const auto add = [&](const at::Scalar& mark) {
    if (!integral && std::isnan(mark.toDouble()))
      mask |= stored.isnan();
    else if (!integral || mark.isIntegral(false))
      mask |= wide == mark;
  };
  if (fill) add(*fill);
  for (const double mark : numbers_of(variable, "missing_value"))
    add(integral && std::abs(mark) < 0x1p62 && mark == std::trunc(mark)
            ? at::Scalar(static_cast<std::int64_t>(mark))
            : at::Scalar(mark));
  const std::vector<double> range = numbers_of(variable, "valid_range");
  if (!range.empty() && range.size() != 2)
    throw VariableError("attribute valid_range of ", variable.name,
                        " must be two numbers, and has ", range.size());
  const double low = range.empty() ? number_or(variable, "valid_min", -INFINITY) : range[0];
  const double high = range.empty() ? number_or(variable, "valid_max", INFINITY) : range[1];
  const at::Tensor real =
      integral && (std::isfinite(low) || std::isfinite(high)) ? wide.to(at::kDouble) : wide;
  if (std::isfinite(low)) mask |= real < low;
  if (std::isfinite(high)) mask |= real > high;
  return mask;
}

bool holds(at::ScalarType dtype, double value) {
  return at::isFloatingType(dtype) ||
         at::scalar_tensor(value, at::kDouble).to(dtype).to(at::kDouble).item<double>() == value;
}

}  // namespace

at::Tensor cf_values(const at::Tensor& stored, const VariableInfo& about,
                     const std::optional<at::Scalar>& fill, const ReadOptions& options,
                     const std::string& source) {
  if (const auto mark = about.attributes.find("_Unsigned");
      mark != about.attributes.end() && mark->second == Attribute("true"))
    throw VariableError(about.name, " in ", source,
                        " holds unsigned numbers in a signed type (_Unsigned), which is not "
                        "decoded here: read it with "
                        "ReadOptions::decode = false and convert");
  at::Tensor mask = missing_mask(stored, about, fill);
  // An integer holds no NaN, marked or not.
  if (!at::isFloatingType(options.dtype) && at::isFloatingType(stored.scalar_type()))
    mask |= stored.isnan();
  const bool some_missing = mask.any().item<bool>();
  if (some_missing && (std::isnan(options.missing) ? !at::isFloatingType(options.dtype)
                                                   : !holds(options.dtype, options.missing)))
    throw VariableError(
        about.name, " in ", source, " has missing values in the box asked for, and ",
        c10::toString(options.dtype), " cannot hold ", options.missing,
        ": give ReadOptions::missing a value that it can hold, or read a floating type");
  const double scale = number_or(about, "scale_factor", 1.0),
               offset = number_or(about, "add_offset", 0.0);
  at::Tensor value = scale == 1.0 && offset == 0.0
                         ? stored.to(options.dtype)
                         : stored.to(at::kDouble).mul_(scale).add_(offset).to(options.dtype);
  if (some_missing) value = at::where(mask, at::full_like(value, options.missing), value);
  return value;
}

}  // namespace tessera::detail
