#pragma once
// Task: what is trained, how a loss comes about, and by which optimizers.
//
//   struct Winds : Task {
//     UNet net;
//     NamedModules modules() override { return {{"net", net.ptr()}}; }
//     Optimizers optimizers() override {
//       return {std::make_shared<torch::optim::AdamW>(net->parameters(), 1e-3)};
//     }
//     at::Tensor training_step(const MicroBatch& batch, Step&) override {
//       return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
//     }
//   };

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/state.h"
#include "tessera/train/session.h"
#include "tessera/train/strategy.h"

namespace tessera {

// Metrics: named numbers that ranks collect by themselves and bring together when somebody asks.
//
//   Metrics metrics;
//   metrics.add("loss", 0.7, rows);                  // a mean over samples
//   metrics.add("samples", rows, Metrics::Kind::sum);
//   const auto all = metrics.reduce(strategy);       // the same on every rank

class Metrics {
 public:
  enum class Kind : unsigned char {
    /// Weighted.
    mean,
    /// Ranks with other samples add up: those that share them (Strategy::sharing) count once.
    sum,
    min,
    max
  };
  /// A value of weight 0 does not count, even if it is NaN. Throws InvalidArgument for a weight
  /// that is negative or not finite, and for a name that has another kind already.
  void add(const std::string& name, double value, double weight = 1, Kind kind = Kind::mean);
  void add(const std::string& name, double value, Kind kind) { add(name, value, 1, kind); }
  /// All that another one has.
  void add(const Metrics& other);
  /// Reduces over all ranks, which may have other names: one that no rank has given a weight is
  /// left out. The same bits on every rank. Collective: one all-gather. Throws MismatchError on
  /// every rank if a name has two kinds. `not_a_number` gets the first name that is NaN, and by
  /// which ranks, or stays empty.
  std::map<std::string, double> reduce(Strategy& strategy,
                                       std::string* not_a_number = nullptr) const;
  /// The same of what all ranks have, by rank, without a message. `sharing`: Strategy::sharing().
  static std::map<std::string, double> reduce(const std::vector<Metrics>& ranks, int sharing,
                                              std::string* not_a_number = nullptr);
  void clear() { all_.clear(); }
  bool has(const std::string& name) const { return all_.contains(name); }
  bool empty() const { return all_.empty(); }

  /// This rank's share as bytes, exact.
  std::string state() const;
  /// Throws ConfigurationError for other bytes.
  void restore(const std::string& state);

 private:
  struct Sum {
    Kind kind = Kind::mean;
    double value = 0, weight = 0;
    void add(double other, double other_weight);
  };
  std::map<std::string, Sum> all_;
};

using Optimizers = std::vector<std::shared_ptr<torch::optim::Optimizer>>;

/// The learning rate of an optimizer's groups as a factor of what they were made with. A function
/// of counters alone, so that a resumed run goes on where it was.
struct LearningRateSchedule {
  /// (optimizer steps so far, epoch) to factor.
  std::function<double(std::int64_t step, std::int64_t epoch)> factor;
  std::size_t optimizer = 0;
};
/// Linear from 0 to 1 over `warmup` steps, then a half cosine to `floor` at step `total`.
std::function<double(std::int64_t, std::int64_t)> warmup_cosine(std::int64_t warmup,
                                                                std::int64_t total,
                                                                double floor = 0);
/// `gamma` to the number of `every` epochs that are over.
std::function<double(std::int64_t, std::int64_t)> step_decay(std::int64_t every, double gamma);

enum class RunStage : unsigned char { train, validate, test, predict };

/// Where in a run a call is made, and what it may report.
class Step {
 public:
  Step(Session& session, Metrics& metrics, RunStage stage, std::int64_t step, std::int64_t epoch,
       double weight, bool last)
      : session_(session),
        metrics_(metrics),
        stage_(stage),
        step_(step),
        epoch_(epoch),
        weight_(weight),
        last_(last) {}
  RunStage stage() const { return stage_; }
  /// Optimizer steps so far.
  std::int64_t step() const { return step_; }
  std::int64_t epoch() const { return epoch_; }
  /// The last micro-batch of its optimizer step.
  bool last() const { return last_; }
  Strategy& strategy() const { return session_.strategy(); }
  /// Manual optimisation calls it: forward_scope(), backward(), step().
  Session& session() const { return session_; }
  /// Reports a metric, by default the mean over this batch's samples. Not collective, unless
  /// `value` is a sharded tensor.
  void log(const std::string& name, double value, Metrics::Kind kind = Metrics::Kind::mean);
  void log(const std::string& name, const at::Tensor& value,
           Metrics::Kind kind = Metrics::Kind::mean);
  /// The value has a weight of its own.
  void log(const std::string& name, double value, double weight) {
    metrics_.add(name, value, weight);
  }

 private:
  Session& session_;
  Metrics& metrics_;
  RunStage stage_;
  std::int64_t step_, epoch_;
  double weight_;
  bool last_;
};

class Task : Pinned {
 public:
  virtual ~Task();

  /// Called on every rank before modules(), once in each run: fit(), validate(), test() and
  /// predict(). The place to make, move, wrap and group what needs the strategy (its ranks and its
  /// device); collective calls are allowed. A second run finds what the first one has made. An
  /// exception on one rank ends the run of all.
  virtual void setup([[maybe_unused]] Strategy& strategy) {}
  /// What the strategy prepares and checkpoints hold. The same at each call.
  virtual NamedModules modules() = 0;
  /// Called once, after the strategy has prepared the modules. All of them step together unless
  /// automatic() is false.
  virtual Optimizers optimizers() = 0;
  virtual std::vector<LearningRateSchedule> schedules() { return {}; }
  /// The mean loss over the batch's samples, 0-dim. Or an undefined tensor, after
  /// step.session().add_gradients() has made the gradients (a pipeline: run_pipeline()). With
  /// automatic() false: does everything through step.session(), and returns the loss for the log,
  /// or an undefined tensor.
  virtual at::Tensor training_step(const MicroBatch& batch, Step& step) = 0;
  /// Reports by step.log(). All ranks are called equally often, with empty batches at the end if
  /// they have fewer.
  virtual void validation_step(const MicroBatch& batch, Step& step);
  /// The default calls validation_step().
  virtual void test_step(const MicroBatch& batch, Step& step) { validation_step(batch, step); }
  /// Throws NotAvailable unless overridden.
  virtual std::vector<at::Tensor> predict_step(const MicroBatch& batch, Step& step);
  /// How much a batch's mean counts: samples by default; tokens, cells, area.
  virtual double weight(const MicroBatch& batch) const { return static_cast<double>(batch.real); }
  virtual bool automatic() const { return true; }
  /// More for the checkpoint: add() and set() here; what set() set is read back by loaded().
  virtual void save(CheckpointState&) {}
  virtual void loaded(const CheckpointState&) {}
};

}  // namespace tessera
