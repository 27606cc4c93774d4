#pragma once
// The callbacks that come with the library. docs/trainer.md says what each promises.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/train/callback.h"
#include "tessera/train/trainer.h"

namespace tessera {

/// Whether a metric is better where it is smaller or larger.
enum class Better : unsigned char { smaller, larger };

struct CheckpointCallbackOptions {
  /// It saves after so many optimizer steps, epochs, and so much time by any rank's clock; 0: not.
  std::int64_t every_steps = 0, every_epochs = 0;
  std::chrono::milliseconds every{0};
  /// The last so many of these periodic ones are kept, and with them what a signal or an exception
  /// has left and the run went on from; 0: all.
  int keep_last = 1;
  /// A validation is saved if its metric ("val/loss") is among the `best` best, which are kept: not
  /// beside CheckpointOptions::keep_last, which would remove them (InvalidArgument in fit()).
  std::string monitor = {};
  int best = 1;
  Better better = Better::smaller;
  /// It saves at the end of the run.
  bool at_end = true;
  /// It saves the last complete state after an exception (Trainer::save_on_exception).
  bool on_exception = false;
};

/// Saves checkpoints named "step-N".
class CheckpointCallback : public Callback {
 public:
  /// Throws InvalidArgument for options out of range.
  explicit CheckpointCallback(CheckpointCallbackOptions options);
  std::string name() const override { return "checkpoint"; }
  void on_setup(Trainer& trainer) override;
  void on_step_end(Trainer& trainer, const StepResult& result) override;
  void on_epoch_end(Trainer& trainer) override;
  void on_validation_end(Trainer& trainer, bool complete) override;
  void on_fit_end(Trainer& trainer) override;
  void save(Trainer& trainer, CheckpointState& state, const std::string& prefix) override;
  void loaded(Trainer& trainer, const CheckpointState& state, const std::string& prefix) override;
  /// Name and metric of the best so far, best first.
  const std::vector<std::pair<std::string, double>>& best() const { return best_; }

 private:
  void periodic(Trainer& trainer);
  bool needed(const std::string& checkpoint) const;
  CheckpointCallbackOptions options_;
  std::vector<std::string> last_;
  std::vector<std::pair<std::string, double>> best_;
  std::chrono::steady_clock::time_point saved_at_;
  bool asked_ = false;
};

struct EarlyStoppingOptions {
  /// Validations in a row without an improvement.
  int patience = 3;
  Better better = Better::smaller;
  /// Less than this is no improvement.
  double least = 0;
};

namespace detail {

/// Waits for a metric: knows its best value, and how long that has stood. Each fit() begins anew,
/// unless it goes on from a checkpoint.
class PatientCallback : public Callback {
 public:
  void on_setup(Trainer& trainer) override;
  void save(Trainer& trainer, CheckpointState& state, const std::string& prefix) override;
  void loaded(Trainer& trainer, const CheckpointState& state, const std::string& prefix) override;

 protected:
  /// Throws InvalidArgument for options out of range.
  PatientCallback(std::string monitor, EarlyStoppingOptions options);
  /// True where `value` is at least the `patience`-th in a row that has not improved. NaN never
  /// has.
  bool waits(double value);

  std::string monitor_;
  EarlyStoppingOptions options_;
  std::optional<double> best_;
  std::int64_t waited_ = 0;
};

}  // namespace detail

/// Stops when a metric of validations no longer improves, or is not finite.
class EarlyStopping : public detail::PatientCallback {
 public:
  /// Throws InvalidArgument for options out of range.
  explicit EarlyStopping(std::string monitor, EarlyStoppingOptions options = {});
  std::string name() const override { return "early_stopping"; }
  /// Throws InvalidArgument with the known names where there is no such metric.
  void on_validation_end(Trainer& trainer, bool complete) override;
};

/// Multiplies all learning rates by `factor` when a metric of validations has not improved for
/// `patience` of them.
class ReduceOnPlateau : public detail::PatientCallback {
 public:
  ReduceOnPlateau(std::string monitor, double factor, EarlyStoppingOptions options = {});
  std::string name() const override { return "reduce_on_plateau"; }
  void on_validation_end(Trainer& trainer, bool complete) override;

 private:
  double factor_;
};

/// Logs the learning rates, "lr/0" or "lr/0.1" for the second group of the first optimizer, as
/// often as the trainer logs.
class LearningRateMonitor : public Callback {
 public:
  std::string name() const override { return "learning_rate"; }
  void on_step_end(Trainer& trainer, const StepResult& result) override;
};

/// Stops the run after so much time by any rank's clock, that of the runs before it included.
class Timer : public Callback {
 public:
  explicit Timer(std::chrono::milliseconds limit) : limit_(limit) {}
  std::string name() const override { return "timer"; }
  void on_setup(Trainer& trainer) override;
  void on_fit_start(Trainer&) override { began_ = std::chrono::steady_clock::now(); }
  void on_step_end(Trainer& trainer, const StepResult& result) override;
  void save(Trainer& trainer, CheckpointState& state, const std::string& prefix) override;
  void loaded(Trainer& trainer, const CheckpointState& state, const std::string& prefix) override;
  /// The time is that of this run and those before it.
  std::chrono::milliseconds elapsed() const;

 private:
  std::chrono::milliseconds limit_, before_{0};
  std::optional<std::chrono::steady_clock::time_point> began_;
};

/// An exponential moving average of the parameters: after each step, average = decay * average +
/// (1 - decay) * parameter. Validations use the average. Sharded as the parameters are.
class Ema : public Callback {
 public:
  /// Throws InvalidArgument for a decay outside [0, 1).
  explicit Ema(double decay = 0.999, bool validate_with_average = true);
  /// A decay that changes: of the step that has just been made, counted from 1. At a value outside
  /// [0, 1) the step throws InvalidArgument.
  explicit Ema(std::function<double(std::int64_t step)> decay, bool validate_with_average = true);
  std::string name() const override { return "ema"; }
  void on_setup(Trainer& trainer) override;
  /// The average begins at the values the parameters have then, unless a checkpoint had one.
  void on_fit_start(Trainer& trainer) override;
  void on_step_end(Trainer& trainer, const StepResult& result) override;
  void on_validation_start(Trainer& trainer) override;
  void on_validation_end(Trainer& trainer, bool complete) override;
  /// The parameters come back from a validation that an exception ended.
  void on_exception(Trainer& trainer, const std::exception& e) override;
  void save(Trainer& trainer, CheckpointState& state, const std::string& prefix) override;
  void loaded(Trainer&, const CheckpointState&, const std::string&) override { loaded_ = true; }
  /// The keys are the names of the parameters, the module in front; of a tied one the first.
  const std::map<std::string, at::Tensor>& average() const { return average_; }

 private:
  void swap();
  std::function<double(std::int64_t)> decay_;
  bool validate_;
  std::map<std::string, at::Tensor> average_, parameters_;
  bool swapped_ = false, loaded_ = false;
};

}  // namespace tessera
