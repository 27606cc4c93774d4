// Validations, tests and predictions of a trainer.

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "tessera/train/trainer.h"

namespace tessera {

// ---- evaluation ----

bool Trainer::validate_now() {
  const RunStage before = stage_;
  stage_ = RunStage::validate;
  each([&](Callback& c) { c.on_validation_start(*this); });
  Metrics own;
  const bool ended = evaluate(*validation_, RunStage::validate, own,
                              [&](const MicroBatch& b, Step& s) { task_->validation_step(b, s); });
  stage_ = before;
  if (ended) {
    log(reduced(own, "val/"));
    validation_due_ = false;
  }
  each([&](Callback& c) { c.on_validation_end(*this, ended); });
  if (!ended) return false;
  stop_ = std::max(stop_, session_->vote());
  return true;
}

bool Trainer::evaluate(AgreedBatches& batches, RunStage stage, Metrics& metrics,
                       const std::function<void(const MicroBatch&, Step&)>& call) {
  const at::NoGradGuard no_grad;
  // A part that the user keeps in another mode goes back to that; a module before its children,
  // whose modes it sets too.
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
  const auto as_before = c10::make_scope_exit([&] {
    for (const auto& [part, mode] : modes) part->train(mode);
  });
  for (const NamedModule& m : session_->modules()) {
    for (const auto& part : m.module->modules()) modes.emplace_back(part, part->is_training());
    m.module->eval();
  }
  batches.rewind();
  PeriodicVote vote(strategy());
  bool ended = true;
  for (std::int64_t n = 0; options_.validation_batches < 0 || n < options_.validation_batches ||
                           stage == RunStage::predict;
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
    const auto scope = session_->forward_scope();
    call(*batch, step);
  }
  session_->share_buffers();
  return ended;
}

std::map<std::string, double> Trainer::validate(Task& task, std::shared_ptr<BatchSource> batches) {
  return evaluate_alone(task, std::move(batches), RunStage::validate);
}

std::map<std::string, double> Trainer::test(Task& task, std::shared_ptr<BatchSource> batches) {
  return evaluate_alone(task, std::move(batches), RunStage::test);
}

std::map<std::string, double> Trainer::evaluate_alone(Task& task,
                                                      std::shared_ptr<BatchSource> batches,
                                                      RunStage stage) {
  const bool testing = stage == RunStage::test;
  require_free(&task, testing ? "test()" : "validate()");
  std::map<std::string, double> values;
  const bool inside = running_;
  bool began = false;
  const auto body = [&] {
    prepare(task);
    AgreedBatches agreed(batches, strategy(), options_.uneven_validation);
    // Inside a run that of the run comes back.
    const auto run_goes_on =
        c10::make_scope_exit([&, run = std::exchange(stage_, stage)] { stage_ = run; });
    began = true;
    each([&](Callback& c) { testing ? c.on_test_start(*this) : c.on_validation_start(*this); });
    Metrics own;
    const bool ended = evaluate(agreed, stage, own, [&](const MicroBatch& b, Step& s) {
      testing ? task.test_step(b, s) : task.validation_step(b, s);
    });
    values = reduced(own, testing ? "test/" : "val/");
    log(values);
    if (first_rank())
      for (const auto& logger : options_.loggers) logger->flush();
    each([&](Callback& c) { testing ? c.on_test_end(*this) : c.on_validation_end(*this, ended); });
  };
  try {
    run_together(/*fits=*/false, body);
  } catch (...) {
    // The run around it may go on, with what its callbacks have begun.
    if (inside && began && !testing) each([&](Callback& c) { c.on_validation_end(*this, false); });
    throw;
  }
  return values;
}

std::vector<std::vector<at::Tensor>> Trainer::predict(Task& task,
                                                      std::shared_ptr<BatchSource> batches) {
  require_free(&task, "predict()");
  std::vector<std::vector<at::Tensor>> all;
  run_together(/*fits=*/false, [&] {
    prepare(task);
    AgreedBatches agreed(batches, strategy(), options_.uneven_validation);
    const auto run_goes_on =
        c10::make_scope_exit([&, run = std::exchange(stage_, RunStage::predict)] { stage_ = run; });
    each([&](Callback& c) { c.on_predict_start(*this); });
    Metrics own;
    evaluate(agreed, RunStage::predict, own, [&](const MicroBatch& b, Step& s) {
      auto made = task.predict_step(b, s);
      if (b.real > 0) all.push_back(std::move(made));
    });
    each([&](Callback& c) { c.on_predict_end(*this); });
  });
  return all;
}

// After fit() with the same task, and inside it, its session; else a new one, with the checkpoint's
// values.
void Trainer::prepare(Task& task) {
  if (session_ && task_ == &task) return;
  if (const auto saved = begin_or_resume(task, /*fits=*/false, false)) load(*saved);
  if (first_rank())
    for (const auto& logger : options_.loggers) logger->append(step_);
}

}  // namespace tessera
