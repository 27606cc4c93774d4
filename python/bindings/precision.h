#pragma once
// A precision of Python's, and the optimizers of Python's that it steps.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "callbacks.h"
#include "tessera/train/precision.h"

namespace tessera::python {

/// Steps the optimizer of a number, or makes the micro-batches of one evaluation for it. It returns
/// 0, or 1 after it has kept what was raised.
using PythonStep = int (*)(std::int64_t number);
PythonStep python_step(std::int64_t address);

/// The parameters of an optimizer of Python's.
class PythonOptimizer final : public torch::optim::Optimizer {
 public:
  PythonOptimizer(PythonStep step, std::int64_t number)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                  std::make_unique<torch::optim::OptimizerOptions>()),
        step_(step),
        number_(number) {}
  std::int64_t number() const { return number_; }
  at::Tensor step(LossClosure closure) override;
  /// `body` has Python step it, which may call evaluate() where there is a closure. What ended an
  /// evaluation is thrown first.
  void stepping(const LossClosure& closure, const std::function<void()>& body);
  /// The loss where the search is now, for the closure that Python's step() calls. What ends the
  /// search is kept: it comes back from Python as something else.
  at::Tensor evaluate();
  /// Those that it has now: groups may be added at any time.
  void take(const std::vector<at::Tensor>& parameters) {
    param_groups_.clear();
    param_groups_.emplace_back(parameters);
  }

 private:
  PythonStep step_;
  std::int64_t number_;
  LossClosure closure_;
  std::exception_ptr evaluation_;
};

/// What a function of Python's answers (_precision.py). What it raises on one rank ends the others'
/// waits (together()).
class PythonPrecision final : public PrecisionPlugin {
 public:
  /// In the order of _precision.py.
  enum class Hook : unsigned char {
    convert_modules,
    loss_scale,
    skips_overflow,
    update,
    clip,
    step
  };
  /// `hooks`: a bit for each that is Python's own; the others are those of as_is.
  PythonPrecision(std::string name, PythonFunction function, std::int64_t hooks,
                  std::shared_ptr<Strategy> strategy)
      : name_(std::move(name)),
        function_(function),
        hooks_(static_cast<std::uint64_t>(hooks)),
        strategy_(std::move(strategy)) {}

  std::string name() const override { return name_; }
  void convert_modules(const NamedModules& modules, bool moves) override;
  double loss_scale() const override;
  bool skips_overflow() const override;
  void update(bool overflow) override;
  double clip(Strategy& strategy, const std::vector<at::Tensor>& parameters,
              const ClipOptions& options) override;
  void step(torch::optim::Optimizer& optimizer, const LossClosure& closure) override;

 private:
  bool has(Hook hook) const { return (hooks_ >> static_cast<unsigned>(hook) & 1) != 0; }
  /// A number, or NaN where none was asked for.
  double ask_python(Hook hook, std::vector<std::uint64_t> numbers = {},
                    const std::vector<at::Tensor>& given = {}) const;

  const std::string name_;
  const PythonFunction function_;
  const std::uint64_t hooks_;
  const std::shared_ptr<Strategy> strategy_;
};

}  // namespace tessera::python
