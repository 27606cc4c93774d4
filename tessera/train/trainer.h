#pragma once
// Trainer: the default loop over a Session. Short enough to be forked: trainer.cpp is all of it.
//
//   TrainerOptions options;
//   options.strategy = std::make_shared<DDPStrategy>(manager);
//   options.max_epochs = 10;
//   options.callbacks = {std::make_shared<EarlyStopping>("val/loss")};
//   options.checkpoint.folder = "runs/7";
//   options.checkpoint.resume = true;
//   Trainer trainer(options);
//   const FitResult result = trainer.fit(task, batches_of(loader), batches_of(held_out));
//
// docs/trainer.md has the life of a step, and what is saved where.

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/train/batch_source.h"
#include "tessera/train/callback.h"
#include "tessera/train/logger.h"
#include "tessera/train/progress.h"
#include "tessera/train/session.h"
#include "tessera/train/strategy.h"
#include "tessera/train/task.h"

namespace tessera {

struct TrainerCheckpoints {
  /// The folder is on a file system that all ranks share; empty, without `io`: nothing is saved.
  std::string folder = {};
  /// Another place than a folder, on each rank an object of its own (checkpoint_io.h).
  std::shared_ptr<CheckpointIO> io = {};
  /// Goes on from the latest checkpoint in the folder, if there is one.
  bool resume = false;
  /// Goes on from this one, which must be there.
  std::string from = {};
  /// Saves run beside training (Checkpointer::start_save).
  bool background = true;
  CheckpointOptions options = {};
  /// A text that the first rank puts beside the checkpoints as config.yaml when a fit() begins, in
  /// place of that of the run before; empty: none (RunSettings).
  std::string configuration = {};

  bool given() const { return io || !folder.empty(); }
  /// Where they are: `io`, or the folder.
  std::shared_ptr<CheckpointIO> place() const;
};

struct TrainerOptions {
  /// Absent: one process (SingleDevice).
  std::shared_ptr<Strategy> strategy = {};
  /// The run ends at the first limit that is reached; below 0: no limit.
  std::int64_t max_epochs = 1;
  std::int64_t max_steps = -1;
  /// Micro-batches of an optimizer step; the last step of an epoch may have fewer.
  int accumulate = 1;
  /// Validates after so many epochs, and after so many steps; 0: not.
  std::int64_t validate_every_epochs = 1;
  std::int64_t validate_every_steps = 0;
  /// Batches of a validation or test; below 0: all.
  std::int64_t validation_batches = -1;
  /// Ranks with different numbers of batches, in training and in validation, test and prediction.
  UnevenData uneven = UnevenData::error;
  UnevenData uneven_validation = UnevenData::weight_zero;
  /// Precision, scaler, clipping, signals.
  SessionOptions session = {};
  TrainerCheckpoints checkpoint = {};
  std::vector<std::shared_ptr<Callback>> callbacks = {};
  std::vector<std::shared_ptr<Logger>> loggers = {};
  /// The first rank, when all is saved after SIGUSR1, asks Slurm to queue the job again
  /// (requeue_slurm_job).
  bool requeue = false;
  /// Numbers of the training go to the log after so many steps.
  std::int64_t log_every_steps = 50;
  /// What the first rank says of a run while it runs, and what of its pace goes to the log.
  ProgressOptions progress = {};
};

struct FitResult {
  /// none: a limit was reached.
  Stop stop = Stop::none;
  /// Who asked to stop, if a callback of this rank did.
  std::string reason;
  std::int64_t steps = 0, epochs = 0;
  std::map<std::string, double> metrics;
  /// The last checkpoint that was saved; empty: none.
  std::string checkpoint;
};

namespace detail {

class RunMeter;
struct Pace;

/// The state of a trainer's run, which begins with it as it is made.
struct RunState {
  Metrics window_metrics_, epoch_metrics_;
  std::map<std::string, double> metrics_;
  RunStage stage_ = RunStage::train;
  std::int64_t epoch_ = 0, step_ = 0, previous_step_ = 0;
  double rate_scale_ = 1;
  /// It was scaled, and so the optimizers' rates are not what they began with, even where it is 1.
  bool rates_scaled_ = false;
  /// A restored run goes on in the middle of an epoch.
  bool in_epoch_ = false;
  /// The epoch's end has been reported: a checkpoint goes on with the next one.
  bool epoch_over_ = false;
  /// A validation that the last step asked for has not ended.
  bool validation_due_ = false;
  /// The last step, if not all callbacks have had its end.
  std::optional<StepResult> step_due_;
  bool warned_not_finite_ = false;
  /// The task logs a "loss" of its own.
  bool own_loss_ = false;
  Stop stop_ = Stop::none;
  std::string reason_, saved_;
  /// Removed after the next save, and after this one.
  std::vector<std::string> to_save_, to_remove_, ready_to_remove_;
  bool saves_on_exception_ = false;
  /// So many warnings of the checkpointer were passed on.
  std::size_t passed_on_ = 0;
};

}  // namespace detail

/// All calls are collective over the strategy's ranks, with the same options and data of the same
/// kind: limits, intervals, policies, precision and callbacks that differ throw MismatchError on
/// every rank. An exception of one rank ends the others' within the groups' time limits, with its
/// message; a background save that is in flight may end before, for which it waits up to a minute.
/// Inside a run (from a callback) the same task may be evaluated; fit(), another task, and another
/// trainer of the same strategy throw InvalidArgument.
class Trainer : Pinned, detail::RunState {
 public:
  /// Throws InvalidArgument for options out of range, and callbacks with one name.
  explicit Trainer(TrainerOptions options);
  ~Trainer();

  /// Learning rates that schedules or callbacks have scaled are put back at the end, so that a task
  /// that keeps its optimizers begins the next run with them. Where `resume` finds a damaged
  /// checkpoint it throws FileError: name the one to go on from (TrainerCheckpoints::from).
  FitResult fit(Task& task, std::shared_ptr<BatchSource> training,
                std::shared_ptr<BatchSource> validation = nullptr);
  /// Results by name ("val/..." and "test/..."), the same on every rank. After fit() with the same
  /// task they use its session; otherwise they load the checkpoint that the options name. They
  /// write to no folder of checkpoints, and append to logs.
  std::map<std::string, double> validate(Task& task, std::shared_ptr<BatchSource> batches);
  std::map<std::string, double> test(Task& task, std::shared_ptr<BatchSource> batches);
  /// What predict_step() gave for this rank's batches, those of weight zero left out.
  std::vector<std::vector<at::Tensor>> predict(Task& task, std::shared_ptr<BatchSource> batches);

  // ---- for callbacks and programs ----

  const TrainerOptions& options() const { return options_; }
  Strategy& strategy() const { return *options_.strategy; }
  bool first_rank() const { return strategy().rank() == 0; }
  /// The session is that of the task being run; throws Error where there is none.
  Session& session() const;
  Task& task() const { return *task_; }
  RunStage stage() const { return stage_; }
  std::int64_t epoch() const { return epoch_; }
  /// Optimizer steps so far.
  std::int64_t step() const { return step_; }
  /// The last step was the `n`-th, the 2 n-th and so on (or, where a task makes several at once,
  /// one of them was).
  bool every(std::int64_t n) const { return n > 0 && step_ / n != previous_step_ / n; }
  /// The last value of everything that was reduced: "train/loss", "val/...". The same on every
  /// rank.
  const std::map<std::string, double>& metrics() const { return metrics_; }
  /// Asks to stop; all ranks do after the step at which any of them asked.
  void request_stop(const std::string& reason);
  /// A checkpoint at the end of the step or epoch, when every callback has had its turn. All ranks
  /// ask alike. By default the name is "step-N".
  void request_save(const std::string& name = {});
  /// The same, if one rank alone knows (its clock): all save after the next step at which any
  /// asked.
  void request_save_of_all() { session().request_save(); }
  /// An exception that ends the run leaves from now on a checkpoint of the last state that was
  /// whole, "step-N": written when the callbacks have been told, over groups made anew, if all
  /// ranks come there within a minute and were between the same two optimizer steps, and if the
  /// save that was in flight got to the disk; the run that goes on begins with on_step_end() of
  /// that step if it had not ended on all. Costs a list of the state, and a copy of buffers and of
  /// what the task and the callbacks save, twice a step.
  void save_on_exception() { saves_on_exception_ = true; }
  /// Removes a checkpoint of the folder, if it is there, when the one that is asked for next has
  /// been written, or at the end of the run. All ranks alike.
  void request_remove(const std::string& name) { to_remove_.push_back(name); }
  /// Multiplies all learning rates from now on; kept in checkpoints.
  void scale_learning_rate(double factor) {
    rate_scale_ *= factor;
    rates_scaled_ = true;
  }
  /// Gives numbers to metrics(), the loggers and the callbacks; the same on every rank.
  void log(const std::map<std::string, double>& values);
  /// A line on stderr (a warning of libtorch's), on the first rank.
  void warn(const std::string& text) const;
  /// Numbers of the first rank alone, such as times: to the loggers and its callbacks. Does nothing
  /// elsewhere.
  void log_here(const std::map<std::string, double>& values);

 private:
  /// Throws InvalidArgument inside a run, unless that is of `task`, and where the strategy is in
  /// use.
  void require_free(const Task* task, const char* what);
  /// Together with all ranks; an exception ends the session, if `body` is no part of another run.
  /// `fits`: the last whole state is saved, if that was asked for.
  void run_together(bool fits, const std::function<void()>& body);
  /// The checkpoint to go on from, still to be loaded; nullptr: there is none.
  std::unique_ptr<CheckpointReader> begin_or_resume(Task& task, bool fits, bool validates);
  void begin(Task& task, const CheckpointReader* from);
  /// What decides how often ranks call each other is the same on all of them, or MismatchError.
  void agree_on_options(const Task& task, bool validates) const;
  void end_session();
  void run();
  void run_epoch();
  bool run_step();
  void train_micro_batch(MicroBatch& batch, bool last);
  void set_learning_rates(bool back = false);
  void after_step(const StepResult& result);
  void end_step(const StepResult& result);
  void end_epoch();
  /// False: a signal ended it.
  bool validate_now();
  bool evaluate(AgreedBatches& batches, RunStage stage, Metrics& metrics,
                const std::function<void(const MicroBatch&, Step&)>& call);
  std::map<std::string, double> evaluate_alone(Task& task, std::shared_ptr<BatchSource> batches,
                                               RunStage stage);
  void prepare(Task& task);
  /// Reduces over all ranks, as "train/loss_epoch" is of "loss". Collective.
  std::map<std::string, double> reduced(const Metrics& metrics, const std::string& prefix,
                                        const std::string& suffix = "");
  std::map<std::string, double> named(const std::map<std::string, double>& values,
                                      const std::string& not_a_number, const std::string& prefix,
                                      const std::string& suffix);
  // What a run says of itself (trainer_progress.cpp).
  void begin_progress();
  /// Looks as far as the epoch that begins says how many steps there will be.
  void expect_steps();
  /// The run ends by itself. Collective.
  void end_progress();
  void show_step(const StepResult& result);
  std::string shown_metrics() const;
  /// How many steps there will be, as far as the first rank's data say that.
  std::int64_t expected_steps() const;
  /// The training's numbers since the last time, and the pace of all ranks. Collective.
  void log_window();
  /// What every rank has measured, and given besides (where a place for it is named).
  std::vector<detail::Pace> gather_pace(std::vector<Metrics>* besides);
  void show_saved();
  /// Once a run. Collective: the value is the same on every rank; `mine`: it comes from this one.
  void warn_of_loss(double value, bool mine);
  void safe_point();
  /// Those that are there; none is asked for afterwards.
  void remove_all(std::vector<std::string>& asked);
  void pass_on_warnings();
  void keep_whole_state();
  void let_save_end() const noexcept;
  void save_whole_state(const std::exception& e) noexcept;
  void write_whole_state();
  /// `copies`: of the tensors that the task and the callbacks gave.
  CheckpointState state(bool copies = false);
  void load(const CheckpointReader& saved);
  void load_loop(const CheckpointReader& saved);
  void load_position(const CheckpointReader& saved);
  const DistributedManager& manager();
  std::vector<int> ranks() const;
  std::string latest();
  /// Opens the checkpoint to go on from; nullptr: there is none.
  std::unique_ptr<CheckpointReader> resumed_from();
  /// One that only reads removes nothing.
  void make_checkpointer(bool writes);
  bool saves_on_all_ranks() const { return strategy().abilities().saves_on_all_ranks; }
  bool limit_reached() const;
  void tell(const std::exception& e) noexcept;
  /// A handler calls it: it tells the callbacks, and ends the session. `saves`: the last whole
  /// state, if that was asked for.
  void end_by_exception(bool saves) noexcept;
  template <class Call>
  void each(Call&& call) {
    for (const auto& callback : options_.callbacks) call(*callback);
  }

  TrainerOptions options_;
  Task* task_ = nullptr;
  std::unique_ptr<Session> session_;
  std::vector<std::vector<double>> base_rates_;
  std::vector<LearningRateSchedule> schedules_;
  /// A strategy of one rank that has no manager needs it for its checkpoints.
  std::shared_ptr<Strategy> alone_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::unique_ptr<Progress> progress_;
  bool said_how_many_ = false;
  std::unique_ptr<detail::RunMeter> meter_;
  /// The checkpoint that the run goes on from; empty: it begins anew.
  std::string resumed_;
  /// The first rank has saves that have begun, and are not told to be committed yet.
  struct Saving {
    std::string name;
    std::uint64_t before = 0;
    std::chrono::steady_clock::time_point began;
  };
  std::vector<Saving> saving_;
  std::shared_ptr<AgreedBatches> training_, validation_;
  /// Inside fit() or an evaluation.
  bool running_ = false;
  /// What save_on_exception() goes back to: the state between two steps, with the contents of
  /// buffers, which forward writes to.
  struct WholeState {
    std::int64_t step = 0;
    /// All ranks count alike.
    std::int64_t number = 0;
    /// The last checkpoint that was begun before.
    std::string saved;
    CheckpointState state;
    std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  };
  /// The last one, and the one before it if no step lies between: a rank may be one ahead.
  std::unique_ptr<WholeState> whole_, whole_before_;
  std::int64_t kept_ = 0;
};

}  // namespace tessera
