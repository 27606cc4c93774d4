#pragma once
// Precision: in which dtypes a task computes, what is cast, how its loss is scaled and how its
// optimizers step. One of ours, or an object of the user's own:
//
//   struct Rounded : PrecisionPlugin {
//     std::string name() const override { return "rounded"; }
//     void step(torch::optim::Optimizer& optimizer, const LossClosure& closure) override { ... }
//   };
//   SessionOptions{.precision = Precision::bfloat16_mixed};
//   SessionOptions{.precision = std::make_shared<Rounded>()};

#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <variant>

#include "tessera/train/strategy.h"

namespace tessera {

/// What a session asks of a precision, in the order of a run. What is not overridden is that of
/// as_is. An object is for one session at a time (a second one throws InvalidArgument), and keeps
/// its state from one to the next.
class PrecisionPlugin : Pinned {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;
  virtual ~PrecisionPlugin();
  /// Messages and configuration files show it. The trainer refuses ranks that have others
  /// (MismatchError).
  virtual std::string name() const = 0;
  /// Converts parameters and buffers in place. Before Strategy::setup(), which may replace what
  /// they hold. Unless it `moves` modules, the strategy leaves them as the user made them, and what
  /// would have to be converted is an error.
  virtual void convert_modules(const NamedModules& /*modules*/, bool /*moves*/) {}
  /// A tensor of a batch, where the strategy moves modules.
  virtual at::Tensor convert_input(const at::Tensor& tensor) const { return tensor; }
  /// Around each forward, on this thread, until the result is destroyed.
  virtual std::shared_ptr<void> forward_scope(c10::Device /*device*/) const { return nullptr; }
  /// Losses are multiplied by it before backward, and gradients divided when they are brought to
  /// the mean, before they are clipped. The same on every rank, finite and above 0.
  virtual double loss_scale() const { return 1; }
  /// True: a gradient that is not finite on any rank leaves the step out on all.
  virtual bool skips_overflow() const { return false; }
  /// When the gradients of a step are final. `overflow`: it is left out; the same on every rank.
  virtual void update(bool /*overflow*/) {}
  /// Clips by the norm, and returns what it was. Collective.
  virtual double clip(Strategy& strategy, const std::vector<at::Tensor>& parameters,
                      const ClipOptions& options) {
    return strategy.clip(parameters, options);
  }
  /// Steps one optimizer, by gradients that are final. With a `closure` it is one that calls the
  /// loss again (Session::step_again()), which puts the parameters back where a search fails.
  virtual void step(torch::optim::Optimizer& optimizer, const LossClosure& closure) {
    optimizer.step(closure);
  }
  /// What a checkpoint keeps, numbers and tensors, under names that begin with `prefix`. Also
  /// called before a load, which writes into the tensors.
  virtual void add_state(CheckpointState& /*state*/, const std::string& /*prefix*/) {}
  /// Goes on from what was loaded. A number may be absent from a checkpoint; a tensor may not.
  virtual void restore(const CheckpointState& /*state*/, const std::string& /*prefix*/) {}

 private:
  friend class Session;
  const Session* session_ = nullptr;
};

/// Ours.
enum class Precision : unsigned char {
  /// Nothing is converted.
  as_is,
  /// Parameters, buffers and batches are converted.
  float32,
  float64,
  /// Parameters stay as they are; forward runs under libtorch's autocast.
  bfloat16_mixed,
  /// The same, and the loss is scaled so that small gradients do not vanish.
  float16_mixed
};
std::string to_string(Precision precision);
using PrecisionChoice = std::variant<Precision, std::shared_ptr<PrecisionPlugin>>;
/// Its name; "none" for a null pointer.
std::string to_string(const PrecisionChoice& choice);

struct LossScalerOptions {
  double initial = 65536;
  /// The scale grows by it after `interval` steps in a row without an overflow.
  double growth = 2;
  /// An overflow multiplies the scale by it.
  double backoff = 0.5;
  int interval = 2000;
  /// Below this an overflow is not one of float16: an error.
  double smallest = 1.0 / 16384;
};

/// The factor on a loss. Grows until a gradient overflows, and shrinks then; the step with the
/// overflow is left out. Every rank learns the same and keeps the same factor.
class LossScaler {
 public:
  /// Throws InvalidArgument for options out of range.
  explicit LossScaler(const LossScalerOptions& options = {});
  double scale() const { return scale_; }
  /// `overflow`: agreed on by all ranks. Throws Error (on every rank) below the smallest scale.
  void update(bool overflow);
  std::string state() const;
  /// Throws ConfigurationError for another text.
  void restore(const std::string& state);

 private:
  LossScalerOptions options_;
  double scale_;
  std::int64_t since_ = 0;
};

/// The object of a choice: the user's own, or a new one of ours. Throws InvalidArgument for a null
/// pointer, one with the name of one of ours, and options out of range where the loss is scaled.
std::shared_ptr<PrecisionPlugin> make_precision(const PrecisionChoice& choice,
                                                const LossScalerOptions& scaler = {});

}  // namespace tessera
