#include "tessera/train/trainer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/launch/launch.h"
#include "tessera/train/strategies.h"

namespace tessera {

Callback::~Callback() = default;
Logger::~Logger() = default;

namespace {

// Evaluation mode while it lives; a part that the user keeps in another mode goes back to that.
class EvaluationScope {
 public:
  explicit EvaluationScope(const NamedModules& modules) {
    for (const NamedModule& m : modules) {
      for (const auto& part : m.module->modules()) modes_.emplace_back(part, part->is_training());
      m.module->eval();
    }
  }
  ~EvaluationScope() {
    // A module before its children, whose modes it sets too.
    for (const auto& [part, mode] : modes_) part->train(mode);
  }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

}  // namespace

Trainer::Trainer(TrainerOptions options) : options_(std::move(options)) {
  if (!options_.strategy) options_.strategy = std::make_shared<SingleDevice>();
  if (options_.accumulate < 1 || options_.log_every_steps < 1 ||
      options_.validate_every_epochs < 0 || options_.validate_every_steps < 0)
    throw InvalidArgument(concat("TrainerOptions: accumulate ", options_.accumulate,
                                 ", log_every_steps ", options_.log_every_steps,
                                 ", validate_every_epochs ", options_.validate_every_epochs,
                                 ", validate_every_steps ", options_.validate_every_steps,
                                 ": the first two are at least 1, the others at least 0"));
  std::set<std::string> names;
  for (const auto& callback : options_.callbacks) {
    if (!callback) throw InvalidArgument("TrainerOptions: a callback is null");
    const std::string name = callback->name();
    if (name.empty() || name.find('.') != std::string::npos || !names.insert(name).second)
      throw InvalidArgument(concat("TrainerOptions: a callback named '", name,
                                   "': names are not empty, have no dot, and are unique"));
  }
  for (const auto& logger : options_.loggers)
    if (!logger) throw InvalidArgument("TrainerOptions: a logger is null");
  const TrainerCheckpoints& saves = options_.checkpoint;
  if (saves.folder.empty() && (saves.resume || !saves.from.empty()))
    throw InvalidArgument("TrainerOptions: to resume, name the folder of the checkpoints");
}

Trainer::~Trainer() { end_session(); }

Session& Trainer::session() const {
  if (!session_) throw Error("this trainer runs no task");
  return *session_;
}

// ---- a run ----

FitResult Trainer::fit(Task& task, std::shared_ptr<BatchSource> training,
                       std::shared_ptr<BatchSource> validation) {
  end_session();
  try {
    together(strategy(), [&] {
      const auto saved = begin_or_resume(task, validation != nullptr);
      training_ = std::make_shared<AgreedBatches>(training, strategy(), options_.uneven);
      if (validation)
        validation_ =
            std::make_shared<AgreedBatches>(validation, strategy(), options_.uneven_validation);
      if (saved) load(*saved);
      if (first_rank())
        for (const auto& logger : options_.loggers) logger->start(step_);
      each([&](Callback& c) { c.on_fit_start(*this); });
      keep_whole_state();
      run();
      // A signal after the last vote is not lost.
      stop_ = std::max(stop_, session_->vote());
      each([&](Callback& c) { c.on_fit_end(*this); });
      safe_point();
      if (checkpointer_) checkpointer_->wait();
      remove_what_was_asked();
      stop_ = std::max(stop_, session_->vote());
      if (first_rank())
        for (const auto& logger : options_.loggers) logger->flush();
      if (stop_ == Stop::usr1 && options_.requeue && first_rank())
        // Not the launch's job_id: under torchrun that is torchrun's own.
        requeue_slurm_job(Environment::of_process().get("SLURM_JOB_ID").value_or(""));
    });
  } catch (...) {
    end_by_exception(/*saves=*/true);
    throw;
  }
  whole_.reset();
  session_->listen(false);
  training_.reset();
  validation_.reset();
  return {stop_, reason_, step_, epoch_, metrics_, saved_};
}

// The strategy is set up before its ranks are asked for anything, unless it wants the values first.
std::unique_ptr<CheckpointReader> Trainer::begin_or_resume(Task& task, bool validates) {
  const bool first = !strategy().abilities().restores_after_setup;
  std::unique_ptr<CheckpointReader> saved;
  const auto look = [&] {
    make_checkpointer();
    saved = resumed_from();
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
  stage_ = Stage::train;
  epoch_ = step_ = previous_step_ = 0;
  rate_scale_ = 1;
  rates_scaled_ = false;
  in_epoch_ = epoch_over_ = validation_due_ = own_loss_ = false;
  stop_ = Stop::none;
  reason_.clear();
  saved_.clear();
  to_save_.clear();
  to_remove_.clear();
  ready_to_remove_.clear();
  metrics_.clear();
  window_metrics_.clear();
  epoch_metrics_.clear();
  saves_on_exception_ = false;
  whole_.reset();
  session_ = std::make_unique<Session>(options_.strategy, task.modules(), options_.session, from);
  base_rates_.clear();
  for (const auto& optimizer : task.optimizers()) {
    session_->add(optimizer);
    base_rates_.emplace_back();
    for (auto& group : optimizer->param_groups())
      base_rates_.back().push_back(group.options().get_lr());
  }
  schedules_ = task.schedules();
  for (const Schedule& s : schedules_) {
    if (s.optimizer >= base_rates_.size() || !s.factor)
      throw InvalidArgument(concat("a schedule for optimizer ", s.optimizer, " of ",
                                   base_rates_.size(), ", or without a function"));
  }
  each([&](Callback& c) { c.on_setup(*this); });
}

void Trainer::agree_on_options(const Task& task, bool validates) const {
  if (strategy().size() == 1) return;
  const TrainerOptions& o = options_;
  const SessionOptions& s = o.session;
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
      o.checkpoint.folder.empty() ? "none" : "some", "\ncheckpoint.resume ", o.checkpoint.resume,
      "\ncheckpoint.background ", o.checkpoint.background, "\na validation source ", validates,
      "\nTask::automatic ", task.automatic(), "\ncheckpoint.from ", o.checkpoint.from);
  const std::vector<std::string> all = strategy().all_gather(mine);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    const auto first = std::mismatch(all[0].begin(), all[0].end(), all[r].begin(), all[r].end());
    const auto line = [&](const std::string& text, std::string::const_iterator at) {
      const auto where = static_cast<std::size_t>(at - text.begin());
      const std::size_t before = where == 0 ? std::string::npos : text.rfind('\n', where - 1);
      const std::size_t begin = before == std::string::npos ? 0 : before + 1;
      return text.substr(begin, text.find('\n', begin) - begin);
    };
    throw MismatchError(concat("the ranks train with other options: rank 0 has '",
                               line(all[0], first.first), "', rank ", r, " has '",
                               line(all[r], first.second), "'"));
  }
}

void Trainer::end_session() {
  training_.reset();
  validation_.reset();
  checkpointer_.reset();
  whole_.reset();
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
  while (run_step()) {
    if (stop_ != Stop::none) return;
    if (options_.max_steps >= 0 && step_ >= options_.max_steps) return;
  }
  if (fresh && training_->index() == 0)
    throw InvalidArgument(
        concat("epoch ", epoch_, " has no batch",
               options_.uneven == UnevenData::drop
                   ? " on some rank, where the others' are dropped: give each rank at least one"
                   : " on any rank: look at the data that the trainer was given"));
  end_epoch();
}

// One optimizer step; false at the end of the epoch.
bool Trainer::run_step() {
  set_learning_rates();
  int done = 0;
  for (; done < options_.accumulate; ++done) {
    auto batch = training_->next();
    if (!batch) break;
    const bool last = done + 1 == options_.accumulate || training_->known_end();
    train_micro_batch(*batch, last);
  }
  if (done == 0) return false;
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
  strategy().place(batch);
  session_->convert(batch);
  Metrics own;
  Step step(*session_, own, Stage::train, step_, epoch_, weight, last);
  if (task_->automatic()) {
    strategy().before_forward(last);
    at::Tensor loss;
    const std::int64_t added = session_->added_gradients();
    {
      const AutocastScope scope = session_->autocast();
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

void Trainer::set_learning_rates() {
  for (std::size_t i = 0; i < base_rates_.size(); ++i) {
    double factor = rate_scale_;
    bool scheduled = rates_scaled_;
    for (const Schedule& s : schedules_) {
      if (s.optimizer != i) continue;
      factor *= s.factor(step_, epoch_);
      scheduled = true;
    }
    if (!scheduled) continue;
    auto& groups = session_->optimizers()[i]->param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g)
      groups[g].options().set_lr(base_rates_[i][g] * factor);
  }
}

void Trainer::after_step(const StepResult& result) {
  previous_step_ = step_;
  step_ = session_->steps();
  stop_ = std::max(stop_, result.stop);
  // The same on every rank already: one rank's share of the weight, so that the mean stays.
  if (!own_loss_ && result.weight > 0) {
    window_metrics_.add("loss", result.loss, result.weight);
    epoch_metrics_.add("loss", result.loss, result.weight);
  }
  metrics_["train/loss"] = result.loss;
  each([&](Callback& c) { c.on_step_end(*this, result); });
  if (session_->take_save()) request_save();
  if (every(options_.log_every_steps)) {
    std::map<std::string, double> values;
    for (const auto& [name, value] : window_metrics_.reduce(strategy()))
      values["train/" + name] = value;
    window_metrics_.clear();
    log(values);
  }
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
  std::map<std::string, double> values;
  for (const auto& [name, value] : epoch_metrics_.reduce(strategy()))
    values["train/" + name + "_epoch"] = value;
  epoch_metrics_.clear();
  log(values);
  epoch_over_ = true;
  each([&](Callback& c) { c.on_epoch_end(*this); });
  safe_point();
  epoch_over_ = in_epoch_ = false;
  ++epoch_;
}

// ---- evaluation ----

bool Trainer::validate_now() {
  const Stage before = stage_;
  stage_ = Stage::validate;
  each([&](Callback& c) { c.on_validation_start(*this); });
  Metrics own;
  const bool ended = evaluate(*validation_, Stage::validate, own,
                              [&](const MicroBatch& b, Step& s) { task_->validation_step(b, s); });
  stage_ = before;
  if (ended) {
    std::map<std::string, double> values;
    for (const auto& [name, value] : own.reduce(strategy())) values["val/" + name] = value;
    log(values);
    validation_due_ = false;
  }
  each([&](Callback& c) { c.on_validation_end(*this, ended); });
  if (!ended) return false;
  stop_ = std::max(stop_, session_->vote());
  return true;
}

bool Trainer::evaluate(AgreedBatches& batches, Stage stage, Metrics& metrics,
                       const std::function<void(const MicroBatch&, Step&)>& call) {
  const at::NoGradGuard no_grad;
  const EvaluationScope evaluating(session_->modules());
  batches.rewind();
  PeriodicVote vote(strategy());
  bool ended = true;
  for (std::int64_t n = 0; options_.validation_batches < 0 || n < options_.validation_batches ||
                           stage == Stage::predict;
       ++n) {
    if (vote.poll(session_->wanted() >= Stop::usr1)) {
      stop_ = std::max(stop_, session_->vote());
      ended = false;
      break;
    }
    auto batch = batches.next();
    if (!batch) break;
    const double weight = task_->weight(*batch);
    strategy().place(*batch);
    session_->convert(*batch);
    Step step(*session_, metrics, stage, step_, epoch_, weight, true);
    const AutocastScope scope = session_->autocast();
    call(*batch, step);
  }
  return ended;
}

std::map<std::string, double> Trainer::validate(Task& task, std::shared_ptr<BatchSource> batches) {
  return evaluate_alone(task, std::move(batches), Stage::validate);
}

std::map<std::string, double> Trainer::test(Task& task, std::shared_ptr<BatchSource> batches) {
  return evaluate_alone(task, std::move(batches), Stage::test);
}

std::map<std::string, double> Trainer::evaluate_alone(Task& task,
                                                      std::shared_ptr<BatchSource> batches,
                                                      Stage stage) {
  std::map<std::string, double> values;
  try {
    together(strategy(), [&] {
      prepare(task);
      AgreedBatches agreed(batches, strategy(), options_.uneven_validation);
      stage_ = stage;
      const bool testing = stage == Stage::test;
      each([&](Callback& c) { testing ? c.on_test_start(*this) : c.on_validation_start(*this); });
      Metrics own;
      evaluate(agreed, stage, own, [&](const MicroBatch& b, Step& s) {
        testing ? task.test_step(b, s) : task.validation_step(b, s);
      });
      for (const auto& [name, value] : own.reduce(strategy()))
        values[(testing ? "test/" : "val/") + name] = value;
      log(values);
      if (first_rank())
        for (const auto& logger : options_.loggers) logger->flush();
      each([&](Callback& c) { testing ? c.on_test_end(*this) : c.on_validation_end(*this, true); });
      stage_ = Stage::train;
      session_->listen(false);
    });
  } catch (...) {
    end_by_exception(/*saves=*/false);
    throw;
  }
  return values;
}

std::vector<std::vector<at::Tensor>> Trainer::predict(Task& task,
                                                      std::shared_ptr<BatchSource> batches) {
  std::vector<std::vector<at::Tensor>> all;
  try {
    together(strategy(), [&] {
      prepare(task);
      AgreedBatches agreed(batches, strategy(), options_.uneven_validation);
      stage_ = Stage::predict;
      each([&](Callback& c) { c.on_predict_start(*this); });
      Metrics own;
      evaluate(agreed, Stage::predict, own, [&](const MicroBatch& b, Step& s) {
        auto made = task.predict_step(b, s);
        if (b.real > 0) all.push_back(std::move(made));
      });
      each([&](Callback& c) { c.on_predict_end(*this); });
      stage_ = Stage::train;
      session_->listen(false);
    });
  } catch (...) {
    end_by_exception(/*saves=*/false);
    throw;
  }
  return all;
}

// After fit() with the same task, its session; else a new one, with the checkpoint's values.
void Trainer::prepare(Task& task) {
  if (session_ && task_ == &task) return;
  end_session();
  if (const auto saved = begin_or_resume(task, false)) load(*saved);
  if (first_rank())
    for (const auto& logger : options_.loggers) logger->start(step_);
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
