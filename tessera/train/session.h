#pragma once
// Session: the parts of a training step for a loop that the user writes. The Trainer is such a
// loop.
//
//   Session session(strategy, {{"net", net.ptr()}}, {.clip = {.max_norm = 1.0}});
//   session.add(std::make_shared<torch::optim::AdamW>(net->parameters(), 1e-3));
//   for (std::int64_t step = 0; step < 1000; ++step) {
//     for (int k = 0; k < 4; ++k) {                       // micro-batches, of any sizes
//       const auto [x, y] = read();
//       session.micro_batch([&] { return torch::mse_loss(net(x), y); }, x.size(0), k == 3);
//     }
//     const StepResult done = session.step();             // one small all-reduce
//     if (done.stop != Stop::none) break;                 // SIGTERM on any rank, at the same step
//   }
//
// The gradients of a step are those of the mean over all samples of all ranks and micro-batches.
// One all-reduce a step carries the step's weight and loss, the overflow flag of float16, and the
// votes to stop.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/state.h"
#include "tessera/gradient/step_weight.h"
#include "tessera/nn/clip.h"
#include "tessera/train/precision.h"
#include "tessera/train/stop.h"
#include "tessera/train/strategy.h"

namespace tessera {

/// What a step does with gradients whose norm is infinite or NaN on any rank, where a norm is taken
/// (SessionOptions::clip, measure_norm). An overflow of float16 is left out and never comes here.
enum class NonFinite : unsigned char {
  /// Throws NonFiniteGradient on every rank; no optimizer has stepped.
  error,
  /// Leaves the step out (StepResult::stepped).
  skip,
  /// Steps with them, not clipped.
  step
};

/// Gradients of a step are infinite or NaN (SessionOptions::non_finite).
class NonFiniteGradient : public Error {
 public:
  using Error::Error;
};

struct SessionOptions {
  PrecisionChoice precision = Precision::as_is;
  LossScalerOptions scaler = {};
  /// Gradients are clipped by norm. With the default no norm is taken.
  ClipOptions clip = {};
  /// Takes the norm of every step, even if nothing is clipped.
  bool measure_norm = false;
  NonFinite non_finite = NonFinite::error;
  /// Each element of a gradient to at most this magnitude, before the norm.
  double clip_value = std::numeric_limits<double>::infinity();
  /// Notes SIGTERM and SIGUSR1 while the session lives.
  bool signals = true;
};

/// The same on every rank.
struct StepResult {
  /// Mean over the step's samples on all ranks and micro-batches.
  double loss = 0;
  /// Sum of the weights over all ranks that have other samples.
  double weight = 0;
  /// The norm is that before clipping; NaN where none was taken.
  double norm = std::numeric_limits<double>::quiet_NaN();
  /// False: a gradient overflowed on some rank (float16), or was not finite and
  /// SessionOptions::non_finite says to skip, and the step was left out.
  bool stepped = true;
  Stop stop = Stop::none;
  /// Some rank has asked for a checkpoint (Session::request_save).
  bool save = false;
};

/// Mean over `weight` samples of all ranks together.
struct TotalLoss {
  double loss = 0;
  double weight = 0;
};

class Session : Pinned {
 public:
  /// Has the precision convert the modules (ours: numbers with a fraction alone) and calls
  /// strategy.setup(). Throws InvalidArgument for a strategy that is in use (require_free()), and
  /// for parameters of another dtype than the precision asks for where the strategy does not move
  /// modules, and for what has no values (tessera/nn/deferred.h) and gets none in setup(); names
  /// "optimizer" and "train" are taken. `from`: the checkpoint that load() will be
  /// given; needed where Abilities::restores_after_setup is false, and then collective over the
  /// reader's group.
  Session(std::shared_ptr<Strategy> strategy, const NamedModules& modules,
          const SessionOptions& options = {}, const CheckpointReader* from = nullptr);
  /// Calls strategy.teardown(), unless another session has set the strategy up since.
  ~Session();

  /// Throws InvalidArgument if a living session trains by this strategy: two would undo each
  /// other's setup(). Not collective.
  static void require_free(const Strategy& strategy);
  /// This session evaluates from now on, at most: another one may set the strategy up. Or it trains
  /// again.
  void rest(bool on) { resting_ = on; }

  /// Adds an optimizer, made after the session (setup() may have replaced what parameters hold).
  /// Returns its number.
  std::size_t add(std::shared_ptr<torch::optim::Optimizer> optimizer);
  const std::vector<std::shared_ptr<torch::optim::Optimizer>>& optimizers() const {
    return optimizers_;
  }
  Strategy& strategy() const { return *strategy_; }
  const NamedModules& modules() const { return modules_; }
  const SessionOptions& options() const { return options_; }
  /// Training or evaluation mode of all modules.
  void train(bool on);

  /// Forward and backward of one micro-batch. `forward` gives the mean loss over its samples,
  /// 0-dim; `weight`: how many they are (or tokens, cells, area), 0 for a rank without any. `last`:
  /// of the step, whose backward reduces the gradients; if no micro-batch was, step() does. Returns
  /// the loss, detached. Throws what forward throws.
  at::Tensor micro_batch(const std::function<at::Tensor()>& forward, double weight,
                         bool last = true);
  /// Tensors of a batch as the precision converts them (to float32 or float64, complex ones to the
  /// same width), if the strategy moves modules.
  void convert(MicroBatch& batch) const;
  /// The two halves of micro_batch(), for manual optimisation: forward in a forward_scope(), then
  /// this outside of it.
  void backward(const at::Tensor& loss, double weight, bool last = true);
  /// Stands for them where something else runs forward and backward (a Pipeline): `run` is given a
  /// divisor, adds the gradients of the sum of weight * loss over all samples of all ranks, divided
  /// by it, to the parameters, and returns the mean loss and the sum of weights, the same on every
  /// rank. What reduces gradients does so in `run`, but within no_sync() where more is to come.
  ///
  ///   session.add_gradients([&](double divisor) {
  ///     const auto scope = [&] { return session.forward_scope(); };
  ///     const auto done = pipeline.step(batch, {.divisor = divisor, .forward_scope = scope});
  ///     return TotalLoss{done.loss, done.weight};
  ///   });
  ///
  /// `run` is called outside autocast, in which backward has no place: its forwards enter
  /// forward_scope(). Throws InvalidArgument in a step that has micro-batches of the other kind.
  TotalLoss add_gradients(const std::function<TotalLoss(double divisor)>& run, bool last = true);
  /// What the precision puts around a forward (autocast), until the result is destroyed; or null.
  std::shared_ptr<void> forward_scope() const;
  /// How often add_gradients() has been called.
  std::int64_t added_gradients() const { return additions_; }

  /// Divides, unscales and clips the gradients, and steps these optimizers (none named: all). All
  /// gradients are cleared then. `before`: called with the final gradients, before the optimizers,
  /// unless the step is left out; what it throws leaves the parameters as they are. Throws
  /// InvalidArgument on every rank for a weight that was negative, not finite, or zero on all;
  /// GradientError where what reduces a parameter's gradients does not say how;
  /// NonFiniteGradient as the options say; NotAvailable for an optimizer that calls the loss again
  /// (LBFGS).
  StepResult step(const std::vector<std::size_t>& which = {},
                  const std::function<void(const StepResult&)>& before = {});
  /// One step of an optimizer that calls the loss again (LBFGS): `evaluate` makes the micro-batches
  /// of the step, by micro_batch() or backward(), always the same ones, and is called as often as
  /// the optimizer asks, with gradients cleared. Each time the gradients are brought to the mean
  /// and clipped, by one all-reduce, so that all ranks see the same loss and search alike. The
  /// result is that of the first evaluation. Where an evaluation throws, or is not finite and the
  /// options say to skip, the parameters are what they were before, and the optimizer's history
  /// begins anew. Throws NotAvailable for float16, and where ranks hold other plain parameters
  /// (Strategy::by_hand), of which the optimizer would take its products on each rank alone.
  StepResult step_again(const std::function<void()>& evaluate, std::size_t optimizer = 0);

  /// Strategy::share_buffers(), unless another session has set the strategy up since. Done by
  /// step() and step_again(); collective.
  void share_buffers();

  /// What the last step() came to; without one, that of no step.
  const StepResult& last_step() const { return last_; }
  /// The sum of weight * loss that this rank gave to the last step().
  double own_loss() const { return own_loss_; }

  /// This rank wants a checkpoint: the next step() tells all (StepResult::save).
  void request_save() { save_ = true; }
  /// True if any step() since the last call has reported it.
  bool take_save() { return std::exchange(agreed_save_, false); }
  /// Begins or ends to note signals (SessionOptions::signals).
  void listen(bool on);
  /// This rank wants to stop: all learn of it at the next step().
  void request_stop(Stop stop) { requested_ = std::max(requested_, stop); }
  /// What this rank wants, its signals included. Not agreed on.
  Stop wanted() const;
  /// A vote right now, where no step is near.
  Stop vote();

  // ---- state ----

  /// Modules, optimizers, precision, counters, and the random state of every rank: to be saved by a
  /// Checkpointer after adding to it. Tensors are shared, not copied.
  CheckpointState state();
  /// What state() has, from a checkpoint of any number of ranks. `extra`: more to load, or nullptr.
  /// Collective over the reader's group. Throws InvalidArgument on every rank, before anything is
  /// changed, for a checkpoint of other modules (tensors under their names that they do not have,
  /// or the other way round) or of other optimizers (number, kinds, parameter groups).
  void load(const CheckpointReader& saved, CheckpointState* extra = nullptr);
  /// What state() has beside modules and optimizers, under names that begin with `prefix`: for a
  /// program that saves those by itself.
  void add_counters(CheckpointState& state, const std::string& prefix = "train.") const;
  /// Goes on from them. `saved_ranks`: how many ranks saved; those beyond keep their random state.
  /// Throws InvalidArgument where they are not in `state`.
  void restore_counters(const CheckpointState& state, int saved_ranks,
                        const std::string& prefix = "train.");
  /// Optimizer steps so far, those left out included.
  std::int64_t steps() const { return steps_; }
  double loss_scale() const;

 private:
  /// Reduces what is owed, adds up over the ranks, and brings these gradients to the mean.
  StepResult finish_gradients(const std::vector<at::Tensor>& own);
  /// A parameter's sum of the ranks' gradients was multiplied by it.
  using Multiples = std::unordered_map<const c10::TensorImpl*, double>;
  void restore_modules(const CheckpointReader& saved);
  /// Throws InvalidArgument if another session has set the strategy up since.
  void require_own() const;
  void begin_gradients();
  void clear_gradients();
  bool overflowed();
  /// `reduced`: by the strategy, if nothing else does.
  double multiple_of(const at::Tensor& parameter, bool reduced) const;
  Multiples find_multiples();
  /// Scales to the mean, and clips by value. `weight`: of the step, times the scale of the loss.
  /// Without `multiples` each is 1.
  void scale_gradients(const std::vector<at::Tensor>& parameters, double weight,
                       const std::optional<Multiples>& multiples) const;
  std::vector<at::Tensor> parameters_of(const std::vector<std::size_t>& which) const;
  std::vector<std::size_t> all_optimizers() const;
  std::vector<at::Tensor> all_parameters();

  std::shared_ptr<Strategy> strategy_;
  NamedModules modules_;
  SessionOptions options_;
  std::shared_ptr<torch::nn::Module> all_;
  /// The modules have a checkpoint's values since before setup().
  bool restored_ = false;
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers_;
  /// They are as setup() left them; empty: to be asked for.
  std::vector<at::Tensor> module_parameters_;
  /// Gradients that were there before the first backward are gone.
  bool clean_ = false;
  bool resting_ = false;
  double own_loss_ = 0;
  StepWeight weight_;
  /// Losses are divided by it, and gradients multiplied: about the weight of a step, so that hardly
  /// anything is left to multiply. That of the last step; the same on every rank.
  double unit_ = 1;
  std::shared_ptr<PrecisionPlugin> precision_;
  std::unique_ptr<StopSignals> signals_;
  Stop requested_ = Stop::none;
  bool save_ = false, agreed_save_ = false;
  StepResult last_;
  /// Gradients are owed since a backward inside no_sync().
  bool owed_ = false;
  /// What has made this step's gradients.
  enum class Made : unsigned char { nothing, backward, added } made_ = Made::nothing;
  std::int64_t additions_ = 0;
  std::int64_t steps_ = 0;
};

/// Runs a part of a job that ranks do together: an exception that leaves it on one rank ends the
/// others' waits, with its message and rank first (Strategy::abort), and goes on here.
void together(Strategy& strategy, const std::function<void()>& body);

}  // namespace tessera
