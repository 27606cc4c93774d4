#pragma once
// Callback: code that a trainer calls at the stations of a run. All ranks call all of them, in the
// same order; what is to be printed is printed by the first rank alone (Trainer::first_rank()).

#include <ATen/core/Tensor.h>

#include <exception>
#include <map>
#include <string>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/state.h"
#include "tessera/train/session.h"
#include "tessera/train/strategy.h"

namespace tessera {

class Trainer;

class Callback : Pinned {
 public:
  virtual ~Callback();

  /// Names its state in checkpoints: unique in a trainer, without dots.
  virtual std::string name() const = 0;

  /// The modules are prepared, the optimizers made; nothing is loaded yet.
  virtual void on_setup(Trainer&) {}
  /// A checkpoint was loaded by then, if any.
  virtual void on_fit_start(Trainer&) {}
  virtual void on_epoch_start(Trainer&) {}
  /// A micro-batch, before it is placed.
  virtual void on_batch_start(Trainer&, const MicroBatch&) {}
  virtual void on_before_backward(Trainer&, const at::Tensor& /*loss*/) {}
  virtual void on_after_backward(Trainer&) {}
  /// The gradients are final, the optimizers have not stepped. Not called for a step that is left
  /// out.
  virtual void on_before_step(Trainer&, const StepResult&) {}
  virtual void on_batch_end(Trainer&, const MicroBatch&) {}
  /// An optimizer step is over.
  virtual void on_step_end(Trainer&, const StepResult&) {}
  virtual void on_validation_start(Trainer&) {}
  /// Trainer::metrics() has the results, if the validation is complete: false where a signal ended
  /// it, or an exception in a validation that a callback of a run makes.
  virtual void on_validation_end(Trainer&, bool /*complete*/) {}
  /// Trainer::metrics() has the means of the epoch.
  virtual void on_epoch_end(Trainer&) {}
  virtual void on_test_start(Trainer&) {}
  virtual void on_test_end(Trainer&) {}
  virtual void on_predict_start(Trainer&) {}
  virtual void on_predict_end(Trainer&) {}
  /// The run is over, for whatever reason but an exception.
  virtual void on_fit_end(Trainer&) {}
  /// This rank may be the only one that knows: no collective calls. What it throws is
  /// dropped.
  virtual void on_exception(Trainer&, const std::exception&) {}
  /// New numbers for the log; on every rank that has them.
  virtual void on_log(Trainer&, const std::map<std::string, double>&) {}

  /// Adds to a checkpoint, by names that begin with `prefix`: tensors, values that are the same on
  /// every rank, and values of each rank.
  virtual void save(Trainer&, CheckpointState&, const std::string& /*prefix*/) {}
  /// The same names, from a checkpoint; tensors have been written into already. Values that it
  /// does not have are as save() set them.
  virtual void loaded(Trainer&, const CheckpointState&, const std::string& /*prefix*/) {}
};

}  // namespace tessera
