#include "tessera/train/trainer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/launch/launch.h"
#include "tessera/train/detail/run_meter.h"
#include "tessera/train/strategies.h"

namespace tessera {

Callback::~Callback() = default;
Logger::~Logger() = default;

Trainer::Trainer(TrainerOptions options) : options_(std::move(options)) {
  if (!options_.strategy) options_.strategy = std::make_shared<SingleDevice>();
  if (options_.accumulate < 1 || options_.log_every_steps < 1 ||
      options_.validate_every_epochs < 0 || options_.validate_every_steps < 0)
    throw InvalidArgument("TrainerOptions: accumulate ", options_.accumulate, ", log_every_steps ",
                          options_.log_every_steps, ", validate_every_epochs ",
                          options_.validate_every_epochs, ", validate_every_steps ",
                          options_.validate_every_steps,
                          ": the first two are at least 1, the others at least 0");
  std::set<std::string> names;
  for (const auto& callback : options_.callbacks) {
    if (!callback) throw InvalidArgument("TrainerOptions: a callback is null");
    const std::string name = callback->name();
    if (name.empty() || name.find('.') != std::string::npos || !names.insert(name).second)
      throw InvalidArgument("TrainerOptions: a callback named '", name,
                            "': names are not empty, have no dot, and are unique");
  }
  for (const auto& logger : options_.loggers)
    if (!logger) throw InvalidArgument("TrainerOptions: a logger is null");
  const TrainerCheckpoints& saves = options_.checkpoint;
  if (!saves.given() && (saves.resume || !saves.from.empty()))
    throw InvalidArgument("TrainerOptions: to resume, name the folder of the checkpoints");
}

Trainer::~Trainer() { end_session(); }

Session& Trainer::session() const {
  if (!session_) throw Error("this trainer runs no task");
  return *session_;
}

// ---- a run ----

void Trainer::require_free(const Task* task, const char* what) {
  if (running_ && task && task_ == task) return;
  if (running_)
    throw InvalidArgument(what,
                          " inside a run of the same trainer: give it a trainer, and a "
                          "strategy, of its own");
  if (session_ && task && task_ == task) return;
  end_session();
  Session::require_free(strategy());
}

void Trainer::run_together(bool fits, const std::function<void()>& body) {
  // The run that this is a part of ends by the exception, or its callback goes on.
  if (running_) return together(strategy(), body);
  const auto end = [this] {
    running_ = false;
    progress_.reset();
    meter_.reset();
    if (!session_) return;
    session_->listen(false);
    session_->rest(true);
  };
  running_ = true;
  if (session_) session_->rest(false);
  try {
    together(strategy(), [&] {
      try {
        body();
      } catch (const TimeoutError&) {  // others stand still, and what is in flight with them
        throw;
      } catch (...) {
        let_save_end();
        throw;
      }
    });
  } catch (...) {
    end_by_exception(fits);
    end();
    throw;
  }
  end();
}

FitResult Trainer::fit(Task& task, std::shared_ptr<BatchSource> training,
                       std::shared_ptr<BatchSource> validation) {
  require_free(nullptr, "fit()");
  run_together(/*fits=*/true, [&] {
    const auto saved = begin_or_resume(task, /*fits=*/true, validation != nullptr);
    training_ = std::make_shared<AgreedBatches>(training, strategy(), options_.uneven);
    if (validation)
      validation_ =
          std::make_shared<AgreedBatches>(validation, strategy(), options_.uneven_validation);
    if (saved) load(*saved);
    if (first_rank())
      for (const auto& logger : options_.loggers) logger->start(step_);
    each([&](Callback& c) { c.on_fit_start(*this); });
    keep_whole_state();
    begin_progress();
    run();
    // A signal after the last vote is not lost.
    stop_ = std::max(stop_, session_->vote());
    each([&](Callback& c) { c.on_fit_end(*this); });
    safe_point();
    if (checkpointer_) checkpointer_->wait();
    remove_all(ready_to_remove_);
    remove_all(to_remove_);
    pass_on_warnings();
    end_progress();
    stop_ = std::max(stop_, session_->vote());
    if (first_rank())
      for (const auto& logger : options_.loggers) logger->flush();
    if (stop_ == Stop::usr1 && options_.requeue && first_rank())
      // Not the launch's job_id: under torchrun that is torchrun's own.
      requeue_slurm_job(Environment::of_process().get("SLURM_JOB_ID").value_or(""));
  });
  whole_.reset();
  whole_before_.reset();
  set_learning_rates(/*back=*/true);
  training_.reset();
  validation_.reset();
  return {stop_, reason_, step_, epoch_, metrics_, saved_};
}

// The strategy is set up before its ranks are asked for anything, unless it wants the values first.
std::unique_ptr<CheckpointReader> Trainer::begin_or_resume(Task& task, bool fits, bool validates) {
  const bool first = !strategy().abilities().restores_after_setup;
  std::unique_ptr<CheckpointReader> saved;
  const auto look = [&] {
    if (fits || options_.checkpoint.resume) make_checkpointer(fits);
    saved = resumed_from();
    if (!fits) checkpointer_.reset();
  };
  if (first) {
    agree_on_options(task, validates);
    look();
  }
  begin(task, saved.get());
  if (!first) {
    agree_on_options(task, validates);
    look();
  }
  return saved;
}

void Trainer::begin(Task& task, const CheckpointReader* from) {
  task_ = &task;
  static_cast<detail::RunState&>(*this) = {};
  task.setup(strategy());
  session_ = std::make_unique<Session>(options_.strategy, task.modules(), options_.session, from);
  base_rates_.clear();
  for (const auto& optimizer : task.optimizers()) {
    session_->add(optimizer);
    base_rates_.emplace_back();
    for (auto& group : optimizer->param_groups())
      base_rates_.back().push_back(group.options().get_lr());
  }
  schedules_ = task.schedules();
  for (const LearningRateSchedule& s : schedules_) {
    if (s.optimizer >= base_rates_.size() || !s.factor)
      throw InvalidArgument("a schedule for optimizer ", s.optimizer, " of ", base_rates_.size(),
                            ", or without a function");
  }
  each([&](Callback& c) { c.on_setup(*this); });
}

void Trainer::agree_on_options(const Task& task, bool validates) const {
  if (strategy().size() == 1) return;
  const TrainerOptions& o = options_;
  const SessionOptions& s = o.session;
  std::string names;
  for (const auto& callback : o.callbacks) names += concat("\na callback ", callback->name());
  const std::string mine = concat(
      "max_epochs ", o.max_epochs, "\nmax_steps ", o.max_steps, "\naccumulate ", o.accumulate,
      "\nvalidate_every_epochs ", o.validate_every_epochs, "\nvalidate_every_steps ",
      o.validate_every_steps, "\nvalidation_batches ", o.validation_batches, "\nlog_every_steps ",
      o.log_every_steps, "\nuneven ", static_cast<int>(o.uneven), "\nuneven_validation ",
      static_cast<int>(o.uneven_validation), "\nprecision ", to_string(s.precision),
      "\nscaler.initial ", s.scaler.initial, "\nscaler.growth ", s.scaler.growth,
      "\nscaler.backoff ", s.scaler.backoff, "\nscaler.interval ", s.scaler.interval,
      "\nscaler.smallest ", s.scaler.smallest, "\nclip.max_norm ", s.clip.max_norm,
      "\nclip.norm_type ", s.clip.norm_type, "\nclip_value ", s.clip_value, "\nmeasure_norm ",
      s.measure_norm, "\nnon_finite ", static_cast<int>(s.non_finite), "\ncheckpoint.folder ",
      o.checkpoint.given() ? "some" : "none", "\ncheckpoint.resume ", o.checkpoint.resume,
      "\ncheckpoint.background ", o.checkpoint.background, "\na validation source ", validates,
      "\nTask::automatic ", task.automatic(), "\ncheckpoint.from ", o.checkpoint.from, names);
  if (const DistributedManager* manager = strategy().manager())
    return agree::same(manager->group(ranks()), "the options of the trainer", mine);
  for (const std::string& other : strategy().all_gather(mine))
    if (other != mine) throw MismatchError("the ranks train with other options");
}

void Trainer::end_session() {
  if (session_) set_learning_rates(/*back=*/true);
  training_.reset();
  validation_.reset();
  checkpointer_.reset();
  whole_.reset();
  whole_before_.reset();
  session_.reset();
  task_ = nullptr;
}

void Trainer::end_by_exception(bool saves) noexcept {
  const auto end = [&](const std::exception& e) {
    tell(e);
    if (saves) save_whole_state(e);
    end_session();
  };
  try {
    throw;
  } catch (const std::exception& e) {
    end(e);
  } catch (...) {
    end(Error("something was thrown that is no std::exception"));
  }
}

void Trainer::tell(const std::exception& e) noexcept {
  for (const auto& callback : options_.callbacks) {
    try {
      callback->on_exception(*this, e);
    } catch (...) {  // the first error is the one that counts
    }
  }
  if (!first_rank()) return;
  for (const auto& logger : options_.loggers) {
    try {
      logger->flush();
    } catch (...) {
    }
  }
}

bool Trainer::limit_reached() const {
  return (options_.max_epochs >= 0 && epoch_ >= options_.max_epochs) ||
         (options_.max_steps >= 0 && step_ >= options_.max_steps);
}

void Trainer::run() {
  if (step_due_) end_step(StepResult(*step_due_));
  if (validation_due_ && validation_ && !validate_now()) return safe_point();
  while (stop_ == Stop::none && !limit_reached()) run_epoch();
}

void Trainer::run_epoch() {
  const bool fresh = !in_epoch_;
  if (fresh) {
    training_->start_epoch(static_cast<std::uint64_t>(epoch_));
    in_epoch_ = true;
    each([&](Callback& c) { c.on_epoch_start(*this); });
  }
  expect_steps();
  while (run_step()) {
    if (stop_ != Stop::none) return;
    if (options_.max_steps < 0 || step_ < options_.max_steps) continue;
    // The last step of the run may be that of the epoch.
    if (!training_->ended()) return;
    break;
  }
  if (fresh && training_->index() == 0)
    throw InvalidArgument(
        "epoch ", epoch_, " has no batch",
        options_.uneven == UnevenData::drop
            ? " on some rank, where the others' are dropped: give each rank at least one"
            : " on any rank: look at the data that the trainer was given");
  end_epoch();
}

// One optimizer step; false at the end of the epoch.
bool Trainer::run_step() {
  set_learning_rates();
  meter_->begin_step();
  int done = 0;
  for (; done < options_.accumulate; ++done) {
    auto batch = training_->next();
    if (!batch) break;
    const bool last = done + 1 == options_.accumulate || training_->known_end();
    train_micro_batch(*batch, last);
  }
  if (done == 0) {
    meter_->drop_step();
    return false;
  }
  if (task_->automatic()) {
    after_step(session_->step({}, [&](const StepResult& result) {
      each([&](Callback& c) { c.on_before_step(*this, result); });
    }));
  } else if (session_->steps() != step_) {
    after_step(session_->last_step());
  }
  return true;
}

void Trainer::train_micro_batch(MicroBatch& batch, bool last) {
  each([&](Callback& c) { c.on_batch_start(*this, batch); });
  const double weight = task_->weight(batch);
  meter_->batch(batch, weight);
  strategy().place(batch);
  session_->convert(batch);
  Metrics own;
  Step step(*session_, own, RunStage::train, step_, epoch_, weight, last);
  if (task_->automatic()) {
    strategy().before_forward(last);
    at::Tensor loss;
    const std::int64_t added = session_->added_gradients();
    {
      const auto scope = session_->forward_scope();
      loss = task_->training_step(batch, step);
    }
    if (loss.defined() || session_->added_gradients() == added) {
      each([&](Callback& c) { c.on_before_backward(*this, loss); });
      session_->backward(loss, weight, last);
    }
    each([&](Callback& c) { c.on_after_backward(*this); });
  } else {
    task_->training_step(batch, step);
  }
  own_loss_ = own_loss_ || own.has("loss");
  window_metrics_.add(own);
  epoch_metrics_.add(own);
  each([&](Callback& c) { c.on_batch_end(*this, batch); });
}

// `back`: to what the optimizers began with.
void Trainer::set_learning_rates(bool back) {
  for (std::size_t i = 0; i < base_rates_.size() && i < session_->optimizers().size(); ++i) {
    double factor = rate_scale_;
    bool scheduled = rates_scaled_;
    for (const LearningRateSchedule& s : schedules_) {
      if (s.optimizer != i) continue;
      if (!back) factor *= s.factor(step_, epoch_);
      scheduled = true;
    }
    if (!scheduled) continue;
    auto& groups = session_->optimizers()[i]->param_groups();
    std::vector<double>& base = base_rates_[i];
    // Of a group that was added since, what it began with.
    while (base.size() < groups.size()) base.push_back(groups[base.size()].options().get_lr());
    for (std::size_t g = 0; g < groups.size(); ++g)
      groups[g].options().set_lr(base[g] * (back ? 1 : factor));
  }
  if (back) base_rates_.clear();
}

void Trainer::after_step(const StepResult& result) {
  previous_step_ = step_;
  step_ = session_->steps();
  meter_->end_step(result.weight, step_ - previous_step_);
  stop_ = std::max(stop_, result.stop);
  // The same on every rank already: one rank's share of the weight, so that the mean stays.
  if (!own_loss_ && result.weight > 0) {
    window_metrics_.add("loss", result.loss, result.weight);
    epoch_metrics_.add("loss", result.loss, result.weight);
  }
  metrics_["train/loss"] = result.loss;
  show_step(result);
  if (!std::isfinite(result.loss)) warn_of_loss(result.loss, !std::isfinite(session_->own_loss()));
  step_due_ = result;
  keep_whole_state();
  end_step(result);
}

void Trainer::end_step(const StepResult& result) {
  each([&](Callback& c) { c.on_step_end(*this, result); });
  step_due_.reset();
  if (session_->take_save()) request_save();
  if (every(options_.log_every_steps)) log_window();
  if (validation_ && every(options_.validate_every_steps)) {
    validation_due_ = true;  // by the next run, if this one ends here
    keep_whole_state();
    if (stop_ == Stop::none && !validate_now()) return safe_point();
  }
  safe_point();
}

void Trainer::end_epoch() {
  keep_whole_state();
  if (validation_ && options_.validate_every_epochs > 0 &&
      (epoch_ + 1) % options_.validate_every_epochs == 0 && !validate_now())
    return safe_point();
  const auto values = reduced(epoch_metrics_, "train/", "_epoch");
  epoch_metrics_.clear();
  log(values);
  epoch_over_ = true;
  each([&](Callback& c) { c.on_epoch_end(*this); });
  safe_point();
  epoch_over_ = in_epoch_ = false;
  ++epoch_;
}

std::map<std::string, double> Trainer::reduced(const Metrics& metrics, const std::string& prefix,
                                               const std::string& suffix) {
  std::string not_a_number;
  const auto values = metrics.reduce(strategy(), &not_a_number);
  return named(values, not_a_number, prefix, suffix);
}

std::map<std::string, double> Trainer::named(const std::map<std::string, double>& values,
                                             const std::string& not_a_number,
                                             const std::string& prefix, const std::string& suffix) {
  std::map<std::string, double> all;
  for (const auto& [name, value] : values) all[concat(prefix, name, suffix)] = value;
  if (!not_a_number.empty() && !std::exchange(warned_not_finite_, true))
    warn(concat("after step ", step_, " the metric ", not_a_number, " in ", prefix, "..."));
  return all;
}

void Trainer::warn_of_loss(double value, bool mine) {
  if (std::exchange(warned_not_finite_, true)) return;
  std::vector<int> whose;
  const auto said = strategy().all_gather(std::string(mine ? "1" : ""));
  for (std::size_t r = 0; r < said.size(); ++r)
    if (!said[r].empty()) whose.push_back(static_cast<int>(r));
  warn(concat("the loss of step ", step_, " is ", value, ", by ranks ", list(whose),
              ": look at their data and the learning rate. SessionOptions::non_finite, with "
              "measure_norm, ends the run there or leaves such steps out"));
}

void Trainer::warn(const std::string& text) const {
  if (first_rank()) TORCH_WARN("Trainer: ", text);
}

void Trainer::log(const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) metrics_[name] = value;
  if (values.empty()) return;
  each([&](Callback& c) { c.on_log(*this, values); });
  if (!first_rank()) return;
  for (const auto& logger : options_.loggers) logger->log(values, step_, epoch_);
}

void Trainer::log_here(const std::map<std::string, double>& values) {
  if (!first_rank() || values.empty()) return;
  each([&](Callback& c) { c.on_log(*this, values); });
  for (const auto& logger : options_.loggers) logger->log(values, step_, epoch_);
}

void Trainer::request_stop(const std::string& reason) {
  if (reason_.empty()) reason_ = reason;
  session().request_stop(Stop::requested);
}

}  // namespace tessera
