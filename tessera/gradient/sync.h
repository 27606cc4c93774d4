#pragma once
// What brings the gradients of several ranks together, whoever made it, and how to hold it back.
//
//   {
//     const NoSync scope = no_sync(*net);  // DistributedDataParallel on a sub-module, sharded
//     loss(batch[0]).backward();           // parameters, a wrapper of the user's own: all wait
//   }
//   loss(batch[1]).backward();             // the gradients of both batches are reduced
//
// A wrapper of the user's own takes part by an interface of three functions:
//
//   struct Mine : GradientSync {
//     bool syncing() const override { return on; }
//     void set_syncing(bool now) override { on = now; }
//     void reduce() override { ... }       // what has been accumulated and not been reduced
//     // So that StepWeight, pipelines and the trainer know what becomes of a gradient:
//     std::optional<double> scale(const at::Tensor&) const override { return 1.0 / group.size(); }
//     std::vector<int> ranks(const at::Tensor&) const override { return group.ranks(); }
//     bool on = true;
//   };
//   auto mine = std::make_shared<Mine>();
//   attach_gradient_sync(net->parameters(), mine);

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/pinned.h"

namespace tessera {

/// Gradients that would come together wrongly: a mean of what is to be summed, a sum of what is
/// complete, a gradient of another shape than its parameter's. The message names the parameter and
/// says how to reduce it.
class GradientError : public Error {
 public:
  using Error::Error;
};

/// What a gradient that backward hands from a sharded tensor to a plain one is.
enum class GradientForm : unsigned char {
  /// Each rank has its own part of a sum: the derivative of the global loss by this rank's local.
  partial,
  /// The same value on every rank: the whole derivative.
  complete
};

/// Reduces gradients of parameters over ranks. Found by the parameters that it is attached to.
class GradientSync : Pinned {
 public:
  virtual ~GradientSync();

  /// True if the next backward reduces what it accumulates.
  virtual bool syncing() const = 0;
  /// Switches that off, or back to what it was. Called at the outermost ends of nested scopes.
  virtual void set_syncing(bool on) = 0;
  /// Reduces now what has been accumulated and not been reduced. Collective.
  virtual void reduce() = 0;

  /// The factor by which the sum over ranks of the gradients of `parameter` is multiplied: 1 for a
  /// sum, 1 / n for a mean over n ranks. The same on every rank. Nothing: unknown.
  virtual std::optional<double> scale(const at::Tensor& parameter) const;
  /// The global ranks whose gradients of `parameter` are in that sum, this one among them, each
  /// once; for a sharded parameter, the ranks of its mesh, which compute one loss together. Empty:
  /// unknown; StepWeight then skips its check.
  virtual std::vector<int> ranks(const at::Tensor& parameter) const;
  /// Told during backward that `parameter` gets a gradient of this form, over these global ranks
  /// (more than one). Throws GradientError if what this does with gradients does not fit.
  virtual void receives(const at::Tensor& parameter, GradientForm form,
                        const std::vector<int>& ranks);

 private:
  friend class NoSync;
  void pause();
  void resume();

  std::mutex mutex_;
  int scopes_ = 0;
  bool before_ = true;
};

/// Makes `sync` known to what asks for all that reduce these parameters: no_sync(),
/// reduce_gradients(), StepWeight, the checks of mixed reductions. Held weakly: whoever made it
/// keeps it. Throws InvalidArgument for a parameter that is no leaf that requires grad.
void attach_gradient_sync(const std::vector<at::Tensor>& parameters,
                          const std::shared_ptr<GradientSync>& sync);

/// All that reduce any of the parameters, each once: in the order in which they were attached to a
/// parameter, and else in that of the parameters.
std::vector<std::shared_ptr<GradientSync>> gradient_syncs(
    const std::vector<at::Tensor>& parameters);

/// What becomes of the gradients that several ranks have of one parameter.
struct GradientSum {
  /// How many reduce it, one after the other.
  int reducers = 0;
  /// The factor by which the sum of the ranks' gradients is multiplied in the end.
  double scale = 1;
  /// How many ranks' gradients are in the sum; 0: not known.
  std::int64_t count = 1;
  /// Those of these ranks that this one knows of: all where one reduces it; a mean over the ranks
  /// of a host and then over hosts reaches others, too.
  std::vector<int> ranks = {};

  /// True if the gradients of all of `others` are in the sum, as far as that is known here.
  bool covers(const std::vector<int>& others) const;
  /// True if the result is the mean over several ranks.
  bool is_mean() const;
};

/// What all that reduce `parameter` make of its gradients. Nothing if one of them does not say by
/// what it multiplies, or if they share ranks and are not both means.
std::optional<GradientSum> gradient_sum(const at::Tensor& parameter);

/// Reduces now what has been accumulated and not been reduced, whoever reduces it: after no_sync()
/// scopes without a last backward, and for a rank whose backward touched no parameter while those
/// of others did. Collective.
void reduce_gradients(const std::vector<at::Tensor>& parameters);

/// While it lives, backward accumulates locally and nothing is sent, for all that reduce any of the
/// parameters; the next backward outside reduces what has come together. When the last scope over
/// something ends, by an exception too, it goes back to what it was before the first. All ranks
/// must open and close scopes alike. Something that reduces other parameters as well waits with
/// those, too.
class NoSync {
 public:
  explicit NoSync(const std::vector<at::Tensor>& parameters);
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) noexcept = default;

 private:
  struct Resume {
    std::shared_ptr<GradientSync> sync;
    void operator()(GradientSync*) const;
  };
  std::vector<std::unique_ptr<GradientSync, Resume>> paused_;
};

}  // namespace tessera
