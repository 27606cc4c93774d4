#include "tessera/train/session.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/train/detail/all_modules.h"

namespace tessera {

namespace {

// Places in the numbers that the ranks add up each step.
enum StepSum { kWeight, kLoss, kOverflow, kSave, kRequested, kUsr1, kTerminated, kStepSums };

Stop stop_of(const std::vector<double>& votes) {
  if (votes[kTerminated] > 0) return Stop::terminated;
  if (votes[kUsr1] > 0) return Stop::usr1;
  return votes[kRequested] > 0 ? Stop::requested : Stop::none;
}

void add_vote(Stop stop, std::vector<double>& votes) {
  votes[kRequested] = stop == Stop::requested;
  votes[kUsr1] = stop == Stop::usr1;
  votes[kTerminated] = stop == Stop::terminated;
}

constexpr const char* kMixed =
    "a step has micro-batches by backward() and by add_gradients(): use one of them";

}  // namespace

Session::Session(std::shared_ptr<Strategy> strategy, const NamedModules& modules,
                 const SessionOptions& options, const CheckpointReader* from)
    : strategy_(std::move(strategy)),
      modules_(modules),
      options_(options),
      weight_(Group(), StepWeight::Reduced::summed) {
  if (!strategy_) throw InvalidArgument("a session without a strategy");
  require_free(*strategy_);
  if (!(options_.clip_value > 0))
    throw InvalidArgument("SessionOptions::clip_value is ", options_.clip_value,
                          ", but must be above 0");
  if (!(options_.clip.max_norm > 0))
    throw InvalidArgument("SessionOptions::clip.max_norm is ", options_.clip.max_norm,
                          ", but must be above 0");
  all_ = std::make_shared<detail::AllModules>(modules_);
  for (const NamedModule& m : modules_) {
    if (m.name == "optimizer" || m.name == "train" || m.name == "loop" || m.name == "callback")
      throw InvalidArgument("a module named '", m.name, "': the checkpoint uses that name");
  }
  precision_ = make_precision(options_.precision, options_.scaler);
  if (precision_->session_ && !precision_->session_->resting_)
    throw InvalidArgument("the precision '", precision_->name(),
                          "' is in use by another session: end that one first, or give this "
                          "one an object of its own");
  listen(options_.signals);
  // Only a strategy that shards or a pipeline fills what is deferred.
  require_values("Session", named_tensors(*all_), /*may_be_deferred=*/true);
  precision_->convert_modules(modules_, strategy_->abilities().moves_modules);
  if (from && !strategy_->abilities().restores_after_setup) restore_modules(*from);
  strategy_->setup(modules_);
  try {
    require_values(concat("the strategy '", strategy_->name(), "'"), named_tensors(*all_));
  } catch (...) {
    strategy_->teardown();
    throw;
  }
  strategy_->session_ = this;
  precision_->session_ = this;
}

void Session::require_free(const Strategy& strategy) {
  if (strategy.session_ && !strategy.session_->resting_)
    throw InvalidArgument(
        "the strategy '", strategy.name(),
        "' is in use by another session: end that one first, or give this one a strategy of "
        "its own (a fit() inside a callback of another one, too)");
}

void Session::require_own() const {
  if (strategy_->session_ != this)
    throw InvalidArgument("the strategy '", strategy_->name(),
                          "' has been set up by another session since: this one trains no "
                          "longer");
  if (precision_->session_ != this)
    throw InvalidArgument("the precision '", precision_->name(),
                          "' has been taken by another session since: this one trains no "
                          "longer");
}

Session::~Session() {
  if (precision_->session_ == this) precision_->session_ = nullptr;
  try {
    if (strategy_->session_ == this) {
      strategy_->session_ = nullptr;
      strategy_->teardown();
    }
  } catch (...) {  // the error that ends the session is told already
  }
}

void Session::convert(MicroBatch& batch) const {
  if (!strategy_->abilities().moves_modules) return;
  for (at::Tensor& t : batch.tensors) t = precision_->convert_input(t);
}

std::size_t Session::add(std::shared_ptr<torch::optim::Optimizer> optimizer) {
  if (!optimizer) throw InvalidArgument("a session was given no optimizer");
  std::vector<NamedTensor> stepped;
  for (const auto& group : optimizer->param_groups())
    for (const at::Tensor& p : group.params())
      stepped.push_back({concat("parameter ", stepped.size()), p, true});
  require_values(concat("optimizer ", optimizers_.size()), stepped);
  optimizers_.push_back(std::move(optimizer));
  module_parameters_.clear();
  clean_ = false;
  return optimizers_.size() - 1;
}

void Session::train(bool on) {
  for (const NamedModule& m : modules_) m.module->train(on);
}

at::Tensor Session::micro_batch(const std::function<at::Tensor()>& forward, double weight,
                                bool last) {
  strategy_->before_forward(last);
  at::Tensor loss;
  {
    const auto scope = forward_scope();
    loss = forward();
  }
  backward(loss, weight, last);
  return loss.detach();
}

void Session::begin_gradients() {
  require_own();
  if (made_ == Made::nothing && !clean_) clear_gradients();
}

void Session::backward(const at::Tensor& loss, double weight, bool last) {
  if (made_ == Made::added) throw InvalidArgument(kMixed);
  begin_gradients();
  at::Tensor weighed = weight_.weigh_in(loss, strategy_->loss_weight(weight), unit_);
  made_ = Made::backward;
  try {
    if (const double scale = loss_scale(); scale != 1) weighed = weighed * scale;
    if (strategy_->abilities().owns_accumulation || last) {
      strategy_->backward(weighed);
      owed_ = !last || strategy_->abilities().owns_accumulation;
    } else {
      const auto scope = strategy_->no_sync();
      strategy_->backward(weighed);
      owed_ = true;
    }
  } catch (...) {
    clear_gradients();
    throw;
  }
}

std::shared_ptr<void> Session::forward_scope() const {
  return precision_->forward_scope(strategy_->root_device());
}

TotalLoss Session::add_gradients(const std::function<TotalLoss(double)>& run, bool last) {
  if (!run) throw InvalidArgument("add_gradients: there is no function");
  if (made_ == Made::backward) throw InvalidArgument(kMixed);
  begin_gradients();
  made_ = Made::added;
  const bool reduces = last || strategy_->abilities().owns_accumulation;
  try {
    const auto scope = reduces ? nullptr : strategy_->no_sync();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(strategy_->root_device().type()));
    const TotalLoss total = run(unit_ / loss_scale());
    owed_ = !last || strategy_->abilities().owns_accumulation;
    // Every rank knows the sum, and those that share a loss count once.
    weight_.count(total.loss, total.weight * strategy_->loss_sharing() / strategy_->size());
    ++additions_;
    return total;
  } catch (...) {
    clear_gradients();
    throw;
  }
}

StepResult Session::step(const std::vector<std::size_t>& which,
                         const std::function<void(const StepResult&)>& before) {
  if (optimizers_.empty()) throw InvalidArgument("a step of a session without optimizers");
  require_own();
  const std::vector<std::size_t> stepped = which.empty() ? all_optimizers() : which;
  const std::vector<at::Tensor> own = parameters_of(stepped);
  for (const std::size_t i : stepped)
    if (dynamic_cast<const torch::optim::LBFGS*>(optimizers_[i].get()))
      throw NotAvailable(
          "LBFGS calls the loss again: step it by Session::step_again(), in a task whose "
          "automatic() is false");
  StepResult result;
  try {
    result = finish_gradients(own);
    if (result.stepped && before) before(result);
    // From here on the parameters are no longer those of the step before.
    ++steps_;
    if (result.stepped)
      for (const std::size_t i : stepped) precision_->step(*optimizers_[i], nullptr);
  } catch (...) {
    clear_gradients();
    throw;
  }
  clear_gradients();
  share_buffers();
  return last_ = result;
}

void Session::share_buffers() {
  if (strategy_->session_ == this) strategy_->share_buffers();
}

StepResult Session::step_again(const std::function<void()>& evaluate, std::size_t optimizer) {
  if (!evaluate) throw InvalidArgument("step_again: there is no function");
  if (optimizer >= optimizers_.size())
    throw InvalidArgument("optimizer ", optimizer, " of ", optimizers_.size());
  if (precision_->skips_overflow())
    throw NotAvailable(
        "step_again() with the precision ", precision_->name(),
        ": a search along the loss cannot leave out an overflow; choose bfloat16 or float32");
  if (!strategy_->by_hand().empty())
    throw NotAvailable(
        "step_again() with parameters that are sharded by hand: the optimizer would take its "
        "products over each rank's shard alone");
  struct LeftOut {};
  StepResult first;
  bool evaluated = false;
  const std::vector<at::Tensor> own = parameters_of({optimizer});
  std::vector<at::Tensor> before;
  for (const at::Tensor& p : own) before.push_back(p.detach().clone());
  // Back from the point that the search was trying; its history is that of another place.
  const auto undo = [&] {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < own.size(); ++i) own[i].detach().copy_(before[i]);
    optimizers_[optimizer]->state().clear();
    clear_gradients();
  };
  const auto closure = [&] {
    const at::AutoGradMode with_grad(true);
    clear_gradients();
    evaluate();
    const StepResult one = finish_gradients(own);
    if (!evaluated) first = one;
    first.stop = std::max(first.stop, one.stop);
    first.save = first.save || one.save;
    evaluated = true;
    if (!one.stepped) throw LeftOut();
    return at::scalar_tensor(one.loss, at::kDouble);
  };
  try {
    precision_->step(*optimizers_[optimizer], closure);
    clear_gradients();
  } catch (const LeftOut&) {
    undo();
    first.stepped = false;
  } catch (...) {
    undo();
    throw;
  }
  ++steps_;
  share_buffers();
  return last_ = first;
}

StepResult Session::finish_gradients(const std::vector<at::Tensor>& own) {
  if (owed_) strategy_->reduce_gradients();
  owed_ = false;
  std::optional<Multiples> multiples;
  if (std::exchange(made_, Made::nothing) != Made::added) multiples = find_multiples();

  const StepWeight::Sums mine = weight_.take();
  own_loss_ = mine.loss;
  std::vector<double> sums(kStepSums);
  sums[kWeight] = mine.weight;
  sums[kLoss] = mine.loss;
  sums[kOverflow] = precision_->skips_overflow() && overflowed() ? 1.0 : 0.0;
  sums[kSave] = std::exchange(save_, false) ? 1.0 : 0.0;
  add_vote(wanted(), sums);
  sums = strategy_->reduced(sums, ReduceOp::sum);

  StepResult result;
  result.stop = stop_of(sums);
  result.save = sums[kSave] > 0;
  agreed_save_ = agreed_save_ || result.save;
  if (!(sums[kWeight] > 0))
    throw InvalidArgument(
        "the weights of a step must be finite, not negative, and not all zero; their sum over "
        "ranks and micro-batches is ",
        sums[kWeight], ", this rank gave ", mine.weight);
  result.loss = sums[kLoss] / sums[kWeight];
  result.weight = sums[kWeight] / strategy_->loss_sharing();
  result.stepped = sums[kOverflow] == 0;
  const bool measured = std::isfinite(options_.clip.max_norm) || options_.measure_norm;
  if (result.stepped) {
    scale_gradients(own, result.weight * loss_scale(), multiples);
    if (measured) result.norm = precision_->clip(*strategy_, own, options_.clip);
  }
  // Of what the ranks have added up alone: they may have other parameters.
  unit_ = result.weight;
  precision_->update(!result.stepped);
  if (result.stepped && measured && !std::isfinite(result.norm)) {
    if (options_.non_finite == NonFinite::error)
      throw NonFiniteGradient("the gradients after step ", steps_, " are not finite (the loss is ",
                              result.loss,
                              "): look for what diverges, or leave such steps out by "
                              "SessionOptions::non_finite = NonFinite::skip");
    result.stepped = options_.non_finite == NonFinite::step;
  }
  return result;
}

void Session::listen(bool on) {
  if (!on)
    signals_.reset();
  else if (!signals_)
    signals_ = std::make_unique<StopSignals>();
}

Stop Session::wanted() const {
  return signals_ ? std::max(requested_, signals_->received()) : requested_;
}

Stop Session::vote() {
  std::vector<double> votes(kStepSums);
  add_vote(wanted(), votes);
  return stop_of(strategy_->reduced(votes, ReduceOp::sum));
}

double Session::loss_scale() const {
  const double scale = precision_->loss_scale();
  if (!std::isfinite(scale) || scale <= 0)
    throw InvalidArgument("the precision '", precision_->name(), "' has a loss scale of ", scale,
                          ": give a finite one above 0");
  return scale;
}

void together(Strategy& strategy, const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& e) {  // another rank's news, or this rank's place in them
    strategy.abort(e.what());
    throw;
  } catch (const std::exception& e) {
    strategy.abort(concat("rank ", strategy.rank(), " threw: ", e.what()));
    throw;
  } catch (...) {
    strategy.abort(concat("rank ", strategy.rank(), " threw something that is no std::exception"));
    throw;
  }
}

}  // namespace tessera
