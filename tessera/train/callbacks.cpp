#include "tessera/train/callbacks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"

namespace tessera {

namespace {

using SteadyClock = std::chrono::steady_clock;

bool improves(double value, double best, Better better, double least) {
  return better == Better::smaller ? value < best - least : value > best + least;
}

double monitored(const Trainer& trainer, const std::string& monitor, const char* who) {
  const auto it = trainer.metrics().find(monitor);
  if (it != trainer.metrics().end()) return it->second;
  throw InvalidArgument(who, " looks at '", monitor, "', which was not logged; known are ",
                        list(keys_of(trainer.metrics())), ". Give it one of these, or log it");
}

void check_decay(double decay) {
  if (!(decay >= 0 && decay < 1))
    throw InvalidArgument("Ema: the decay is ", decay, ", not in [0, 1)");
}

}  // namespace

// ---- checkpoints ----

CheckpointCallback::CheckpointCallback(CheckpointCallbackOptions options)
    : options_(std::move(options)) {
  if (options_.every_steps < 0 || options_.every_epochs < 0 || options_.every.count() < 0 ||
      options_.keep_last < 0 || options_.best < 1)
    throw InvalidArgument(
        "CheckpointCallbackOptions: periods and keep_last are at least 0, best at least 1");
}

void CheckpointCallback::on_setup(Trainer& trainer) {
  if (!trainer.options().checkpoint.given())
    throw InvalidArgument("CheckpointCallback: TrainerOptions::checkpoint.folder is empty");
  const int others = trainer.options().checkpoint.options.keep_last;
  if (others > 0 && !options_.monitor.empty())
    throw InvalidArgument("CheckpointCallback: the ", options_.best,
                          " best checkpoints are to be kept, and CheckpointOptions::"
                          "keep_last keeps the last ",
                          others, ": choose CheckpointCallbackOptions::keep_last alone");
  if (options_.on_exception) trainer.save_on_exception();
  last_.clear();
  best_.clear();
  asked_ = false;
  saved_at_ = SteadyClock::now();
}

void CheckpointCallback::on_step_end(Trainer& trainer, const StepResult& result) {
  const bool due = trainer.every(options_.every_steps);
  const bool agreed = options_.every.count() > 0 && result.save;
  if (due || agreed) {
    trainer.request_save();
    periodic(trainer);
  }
  if (options_.every.count() == 0) return;
  if (agreed) {
    saved_at_ = SteadyClock::now();
    asked_ = false;
  } else if (!asked_ && SteadyClock::now() - saved_at_ >= options_.every) {
    trainer.request_save_of_all();
    asked_ = true;
  }
}

void CheckpointCallback::on_epoch_end(Trainer& trainer) {
  if (options_.every_epochs == 0 || (trainer.epoch() + 1) % options_.every_epochs != 0) return;
  trainer.request_save();
  periodic(trainer);
}

// The checkpoint of this step is one of the periodic ones, of which the last are kept.
void CheckpointCallback::periodic(Trainer& trainer) {
  const std::string name = concat("step-", trainer.step());
  if (std::ranges::find(last_, name) == last_.end()) last_.push_back(name);
  // More than one where the run went on from one that nobody had asked for.
  while (options_.keep_last > 0 && last_.size() > static_cast<std::size_t>(options_.keep_last)) {
    const std::string old = last_.front();
    last_.erase(last_.begin());
    if (!needed(old)) trainer.request_remove(old);
  }
}

bool CheckpointCallback::needed(const std::string& checkpoint) const {
  return std::ranges::find(last_, checkpoint) != last_.end() ||
         std::ranges::any_of(best_, [&](const auto& b) { return b.first == checkpoint; });
}

void CheckpointCallback::on_validation_end(Trainer& trainer, bool complete) {
  if (!complete || options_.monitor.empty() || trainer.stage() != RunStage::train) return;
  const double value = monitored(trainer, options_.monitor, "CheckpointCallback");
  if (std::isnan(value)) return;
  const auto worse = std::ranges::find_if(
      best_, [&](const auto& b) { return improves(value, b.second, options_.better, 0); });
  if (worse == best_.end() && best_.size() >= static_cast<std::size_t>(options_.best)) return;
  const std::string name = concat("step-", trainer.step());
  // Two validations after one step: one checkpoint, with the better value.
  const auto same = std::ranges::find_if(best_, [&](const auto& b) { return b.first == name; });
  if (same < worse) return;
  const auto at = best_.insert(worse, {name, value});
  best_.erase(std::remove_if(at + 1, best_.end(), [&](const auto& b) { return b.first == name; }),
              best_.end());
  trainer.request_save(name);
  if (best_.size() <= static_cast<std::size_t>(options_.best)) return;
  const std::string old = best_.back().first;
  best_.pop_back();
  if (!needed(old)) trainer.request_remove(old);
}

void CheckpointCallback::on_fit_end(Trainer& trainer) {
  if (!options_.at_end) return;
  // Of one that is there already a run that goes on does again what came after it.
  if (!needed(concat("step-", trainer.step()))) trainer.request_save();
  periodic(trainer);
}

void CheckpointCallback::save(Trainer&, CheckpointState& state, const std::string& prefix) {
  state.set_integer(prefix + "last", static_cast<std::int64_t>(last_.size()));
  for (std::size_t i = 0; i < last_.size(); ++i) state.set(concat(prefix, "last.", i), last_[i]);
  state.set_integer(prefix + "best", static_cast<std::int64_t>(best_.size()));
  for (std::size_t i = 0; i < best_.size(); ++i) {
    state.set(concat(prefix, "best.", i), best_[i].first);
    state.set_real(concat(prefix, "best_value.", i), best_[i].second);
  }
}

void CheckpointCallback::loaded(Trainer& trainer, const CheckpointState& state,
                                const std::string& prefix) {
  last_.clear();
  best_.clear();
  for (std::int64_t i = 0; i < state.get_integer(prefix + "last"); ++i)
    last_.push_back(state.get(concat(prefix, "last.", i)));
  for (std::int64_t i = 0; i < state.get_integer(prefix + "best"); ++i)
    best_.emplace_back(state.get(concat(prefix, "best.", i)),
                       state.get_real(concat(prefix, "best_value.", i)));
  // One that a signal or an exception left is not among those that were asked for; it goes when its
  // turn comes.
  const std::string here = concat("step-", trainer.step());
  if (trainer.step() > 0 && !needed(here)) last_.push_back(here);
}

// ---- metrics that stop or slow a run ----

detail::PatientCallback::PatientCallback(std::string monitor, EarlyStoppingOptions options)
    : monitor_(std::move(monitor)), options_(options) {
  if (options_.patience < 1 || !(options_.least >= 0))
    throw InvalidArgument("a patience of ", options_.patience,
                          " validations and a least improvement of ", options_.least,
                          ": the first is at least 1, the other at least 0");
}

bool detail::PatientCallback::waits(double value) {
  if (!std::isnan(value) && (!best_ || improves(value, *best_, options_.better, options_.least))) {
    best_ = value;
    waited_ = 0;
    return false;
  }
  return ++waited_ >= options_.patience;
}

void detail::PatientCallback::on_setup(Trainer&) {
  best_.reset();
  waited_ = 0;
}

void detail::PatientCallback::save(Trainer&, CheckpointState& state, const std::string& prefix) {
  state.set_integer(prefix + "has_best", best_.has_value());
  state.set_real(prefix + "best", best_.value_or(0));
  state.set_integer(prefix + "waited", waited_);
}

void detail::PatientCallback::loaded(Trainer&, const CheckpointState& state,
                                     const std::string& prefix) {
  best_.reset();
  const double best = state.get_real(prefix + "best");
  // Checkpoints of before may have NaN, which nothing improves on.
  if (state.get_integer(prefix + "has_best") != 0 && !std::isnan(best)) best_ = best;
  waited_ = state.get_integer(prefix + "waited");
}

EarlyStopping::EarlyStopping(std::string monitor, EarlyStoppingOptions options)
    : PatientCallback(std::move(monitor), options) {}

void EarlyStopping::on_validation_end(Trainer& trainer, bool complete) {
  if (!complete || trainer.stage() != RunStage::train) return;
  const double value = monitored(trainer, monitor_, "EarlyStopping");
  if (!std::isfinite(value))
    trainer.request_stop(concat(monitor_, " is ", value));
  else if (waits(value))
    trainer.request_stop(concat(monitor_, " has not improved",
                                best_ ? concat(" on ", *best_) : std::string(), " for ", waited_,
                                " validations"));
}

ReduceOnPlateau::ReduceOnPlateau(std::string monitor, double factor, EarlyStoppingOptions options)
    : PatientCallback(std::move(monitor), options), factor_(factor) {
  if (!(factor > 0 && factor < 1))
    throw InvalidArgument("ReduceOnPlateau: the factor is ", factor, ", not between 0 and 1");
}

void ReduceOnPlateau::on_validation_end(Trainer& trainer, bool complete) {
  if (!complete || trainer.stage() != RunStage::train) return;
  if (!waits(monitored(trainer, monitor_, "ReduceOnPlateau"))) return;
  waited_ = 0;
  trainer.scale_learning_rate(factor_);
}

// ---- what a user looks at ----

void LearningRateMonitor::on_step_end(Trainer& trainer, const StepResult&) {
  if (!trainer.every(trainer.options().log_every_steps)) return;
  std::map<std::string, double> rates;
  const auto& optimizers = trainer.session().optimizers();
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    auto& groups = optimizers[i]->param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g)
      rates[g == 0 ? concat("lr/", i) : concat("lr/", i, ".", g)] = groups[g].options().get_lr();
  }
  trainer.log(rates);
}

void Timer::on_setup(Trainer&) {
  before_ = {};
  began_.reset();
}

std::chrono::milliseconds Timer::elapsed() const {
  if (!began_) return before_;
  return before_ +
         std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - *began_);
}

void Timer::on_step_end(Trainer& trainer, const StepResult&) {
  if (elapsed() >= limit_)
    trainer.request_stop(concat("the limit of ", limit_.count(), " ms is over"));
}

void Timer::save(Trainer&, CheckpointState& state, const std::string& prefix) {
  state.set_of_rank(prefix + "elapsed", integer_bytes(elapsed().count()));
}

void Timer::loaded(Trainer&, const CheckpointState& state, const std::string& prefix) {
  const std::string name = prefix + "elapsed";
  const auto elapsed = integer_from_bytes(state.get_of_rank(name), name);
  if (elapsed < 0)
    throw InvalidArgument("the checkpoint's '", name, "' is ", elapsed, " ms: it is damaged");
  // Bounded, so that what is added to it does not overflow, and the limit ends the run.
  before_ = bounded_limit(std::chrono::milliseconds(elapsed));
  began_.reset();
}

// ---- averages ----

Ema::Ema(double decay, bool validate_with_average)
    : decay_([decay](std::int64_t) { return decay; }), validate_(validate_with_average) {
  check_decay(decay);
}

Ema::Ema(std::function<double(std::int64_t)> decay, bool validate_with_average)
    : decay_(std::move(decay)), validate_(validate_with_average) {
  if (!decay_) throw InvalidArgument("Ema: the function of the decay is empty");
}

void Ema::on_setup(Trainer& trainer) {
  const at::NoGradGuard no_grad;
  average_.clear();
  parameters_.clear();
  swapped_ = loaded_ = false;
  std::set<const c10::TensorImpl*> seen;
  for (const NamedModule& m : trainer.session().modules()) {
    for (const auto& item : m.module->named_parameters()) {
      // A tied one has several names, and would be swapped as often.
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      const std::string name = m.name + "." + item.key();
      parameters_[name] = item.value();
      average_[name] = item.value().detach().clone();
    }
  }
}

void Ema::on_fit_start(Trainer&) {
  if (loaded_) return;
  const at::NoGradGuard no_grad;
  for (auto& [name, average] : average_) average.copy_(parameters_.at(name));
}

void Ema::on_step_end(Trainer& trainer, const StepResult& result) {
  if (!result.stepped) return;
  const double decay = decay_(trainer.step());
  check_decay(decay);
  const at::NoGradGuard no_grad;
  for (auto& [name, average] : average_) average.mul_(decay).add_(parameters_.at(name), 1 - decay);
}

void Ema::on_validation_start(Trainer&) {
  if (validate_ && !swapped_) swap();
}

void Ema::on_validation_end(Trainer&, bool) {
  if (swapped_) swap();
}

void Ema::on_exception(Trainer&, const std::exception&) {
  if (swapped_) swap();
}

void Ema::swap() {
  const at::NoGradGuard no_grad;
  for (auto& [name, average] : average_) {
    const at::Tensor kept = average.clone();
    average.copy_(parameters_.at(name));
    at::Tensor parameter = parameters_.at(name).detach();
    parameter.copy_(kept);
  }
  swapped_ = !swapped_;
}

void Ema::save(Trainer& trainer, CheckpointState& state, const std::string& prefix) {
  const HandShards shards = trainer.strategy().hand_shards();
  for (const auto& [name, average] : average_) state.add(prefix + name, average, shards, name);
}

}  // namespace tessera
