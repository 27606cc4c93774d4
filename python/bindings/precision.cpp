#include "precision.h"

#include <ATen/ops/empty.h>

#include <limits>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/train/session.h"

namespace tessera::python {

PythonStep python_step(std::int64_t address) {
  return reinterpret_cast<PythonStep>(address);  // NOLINT(performance-no-int-to-ptr)
}

at::Tensor PythonOptimizer::step(LossClosure closure) {
  stepping(closure, [&] {
    if (step_(number_) != 0) throw Error("the step of optimizer ", number_, " has failed");
  });
  return {};
}

void PythonOptimizer::stepping(const LossClosure& closure, const std::function<void()>& body) {
  closure_ = closure;
  std::exception_ptr raised;
  try {
    body();
  } catch (...) {
    raised = std::current_exception();
  }
  closure_ = nullptr;
  if (evaluation_) std::rethrow_exception(std::exchange(evaluation_, nullptr));
  if (raised) std::rethrow_exception(raised);
}

at::Tensor PythonOptimizer::evaluate() {
  if (!closure_) throw InvalidArgument("an evaluation outside of step_again()");
  try {
    return closure_();
  } catch (const std::exception&) {
    evaluation_ = std::current_exception();
    throw;
  } catch (...) {
    evaluation_ = std::current_exception();
    throw Error("this step is left out");
  }
}

double PythonPrecision::ask_python(Hook hook, std::vector<std::uint64_t> numbers,
                                   const std::vector<at::Tensor>& given) const {
  constexpr const char* kNames[] = {"convert_modules", "loss_scale", "skips_overflow",
                                    "update",          "clip",       "step"};
  numbers.insert(numbers.begin(), static_cast<std::uint64_t>(hook));
  try {
    const auto answer = ask(function_, numbers, given);
    return answer ? answer->at(0).item<double>() : std::numeric_limits<double>::quiet_NaN();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    throw Error("the precision '", name_, "', ", kNames[static_cast<unsigned>(hook)],
                "(): ", e.what());
  }
}

void PythonPrecision::convert_modules(const NamedModules&, bool) {
  if (has(Hook::convert_modules)) together(*strategy_, [&] { ask_python(Hook::convert_modules); });
}

double PythonPrecision::loss_scale() const {
  double scale = 1;
  if (has(Hook::loss_scale)) together(*strategy_, [&] { scale = ask_python(Hook::loss_scale); });
  return scale;
}

bool PythonPrecision::skips_overflow() const {
  bool skips = false;
  if (has(Hook::skips_overflow))
    together(*strategy_, [&] { skips = ask_python(Hook::skips_overflow) != 0; });
  return skips;
}

void PythonPrecision::update(bool overflow) {
  if (has(Hook::update)) together(*strategy_, [&] { ask_python(Hook::update, {overflow}); });
}

double PythonPrecision::clip(Strategy& strategy, const std::vector<at::Tensor>& parameters,
                             const ClipOptions& options) {
  if (!has(Hook::clip)) return PrecisionPlugin::clip(strategy, parameters, options);
  double norm = 0;
  std::vector<at::Tensor> given = parameters;
  given.push_back(at::empty({2}, at::kDouble));
  auto* const limits = given.back().mutable_data_ptr<double>();
  limits[0] = options.max_norm;
  limits[1] = options.norm_type;
  together(strategy, [&] { norm = ask_python(Hook::clip, {}, given); });
  return norm;
}

void PythonPrecision::step(torch::optim::Optimizer& optimizer, const LossClosure& closure) {
  if (!has(Hook::step)) return PrecisionPlugin::step(optimizer, closure);
  auto& one = dynamic_cast<PythonOptimizer&>(optimizer);
  const auto number = static_cast<std::uint64_t>(one.number());
  // What ended an evaluation is told by those that made it, and what the step itself raises here.
  std::exception_ptr own;
  one.stepping(closure, [&] {
    try {
      ask_python(Hook::step, {number, closure != nullptr});
    } catch (...) {
      own = std::current_exception();
    }
  });
  if (own) together(*strategy_, [&] { std::rethrow_exception(own); });
}

}  // namespace tessera::python
