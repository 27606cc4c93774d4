#pragma once
// RunSettings: a training whose trainer, mesh and strategy come from a configuration file. The keys
// are those of add_to(), once for reading, messages, help and the resolved file; a program adds its
// own.
//
//   RunSettings run;
//   Settings settings;                                    // tessera/config/settings.h
//   run.add_to(settings);
//   settings.add("model.width", width, "Features of a hidden layer.");
//   settings.read_arguments(argc, argv);                  // --config run.yaml --set mesh=data=4
//   Trainer(run.make(manager, settings.resolved())).fit(task, batches);

#include <string>
#include <utility>
#include <vector>

#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

namespace tessera {

struct RunSettings {
  /// What is set here before add_to() is the default of its key.
  TrainerOptions trainer = {};
  /// A name of the registry.
  std::string strategy = "ddp";
  /// The number of ranks that the run counts on; 0: as many as the job has.
  int ranks = 0;
  /// The strategies "mesh" and "pipeline" have these: axes with sizes, by axis the dim of a batch's
  /// tensors that it shards, and a tensor-parallel plan of patterns with "column", "column(8)",
  /// "row", "row(8)", "vocabulary" or "replicated", over one of the axes.
  std::vector<std::pair<std::string, int>> mesh = {}, batch = {};
  std::vector<std::pair<std::string, std::string>> plan = {};
  std::string plan_axis = "tensor", stage_axis = "stage";
  /// Of "mesh", where fields lie differently: by the name of a field, or of a group of them, the
  /// dims that axes shard, "domain=2". `batch` names the axes of the rows alone then.
  std::vector<std::pair<std::string, std::string>> fields = {};
  /// What a rank reads of the samples of `fields`: its own shards; complete ones, of which it keeps
  /// its shards; or nothing unless it reads for all that share them (BatchFields::one_reads).
  enum class Reads : unsigned char { shards, complete, one } reads = Reads::complete;
  /// A callback of these is added where trainer.checkpoint names a place.
  CheckpointCallbackOptions saves = {};
  /// Empty: nothing stops the run early.
  std::string stop_on = {};
  EarlyStoppingOptions stopping = {};
  /// It gets metrics.csv, metrics.jsonl and the folder tensorboard; empty: nothing is logged.
  std::string log_folder = {};
  bool log_csv = true, log_json = false, log_tensorboard = false;

  /// Adds the keys; `settings` has add() and add_choice() of Settings. This must stay where it is
  /// as long as `settings`.
  template <class S>
  void add_to(S& settings);

  /// Makes the strategy. Throws InvalidArgument for a name that the registry does not have, a mesh
  /// that is missing or not taken, axes that the mesh does not have, and unknown words of a plan.
  std::shared_ptr<Strategy> make_strategy(
      const DistributedManager& manager,
      const StrategyRegistry& registry = StrategyRegistry::builtin()) const;
  /// `trainer` with strategy, callbacks and loggers. `resolved`: written beside the checkpoints.
  TrainerOptions make(const DistributedManager& manager, const std::string& resolved = {},
                      const StrategyRegistry& registry = StrategyRegistry::builtin()) const;

 private:
  /// Adds the keys of checkpoints and of what stops a run early.
  template <class S>
  void add_saves_to(S& settings);
};

template <class S>
void RunSettings::add_to(S& settings) {
  TrainerOptions& t = trainer;
  settings.add("strategy", strategy,
               "`ddp`, `manual`, `mesh`, `pipeline`, `process_group`, `single`, or a name that the "
               "program adds.");
  settings.add("ranks", ranks, "Ranks that the run counts on; 0: any.");
  settings.add("mesh", mesh, "Axes with their sizes, outermost first: `{data: 2, tensor: 4}`.");
  settings.add("batch", batch, "By axis, the dim of a batch that it shards: `{data: 0}`.");
  settings.add("plan", plan, "Tensor-parallel layers by pattern: `{\"*.up\": column}`.");
  settings.add("plan_axis", plan_axis, "The axis that shards them.");
  settings.add("stage_axis", stage_axis, "The axis of a pipeline's stages.");
  settings.add("fields", fields, "By field, the dims that axes shard: `{image: \"domain=2\"}`.");
  settings.add_choice(
      "reads", reads,
      std::vector<std::pair<std::string, Reads>>{
          {"shards", Reads::shards}, {"complete", Reads::complete}, {"one", Reads::one}},
      "What a rank reads of these: its shards, complete samples, or one rank for all.");
  settings.add("trainer.max_epochs", t.max_epochs, "Below 0: no limit.");
  settings.add("trainer.max_steps", t.max_steps, "Below 0: no limit.");
  settings.add("trainer.accumulate", t.accumulate, "Micro-batches of a step.");
  settings.add("trainer.validate_every_epochs", t.validate_every_epochs, "0: not.");
  settings.add("trainer.validate_every_steps", t.validate_every_steps, "0: not.");
  settings.add("trainer.validation_batches", t.validation_batches, "Below 0: all.");
  const std::vector<std::pair<std::string, UnevenData>> uneven{
      {"error", UnevenData::error},
      {"drop", UnevenData::drop},
      {"pad", UnevenData::pad},
      {"weight_zero", UnevenData::weight_zero}};
  settings.add_choice("trainer.uneven", t.uneven, uneven,
                      "Ranks with different numbers of batches.");
  settings.add_choice("trainer.uneven_validation", t.uneven_validation, uneven,
                      "The same of validations.");
  settings.add("trainer.requeue", t.requeue, "Asks Slurm to queue the job again after SIGUSR1.");
  settings.add("trainer.clip_norm", t.session.clip.max_norm, "Of all gradients together.");
  settings.add("trainer.clip_value", t.session.clip_value, "Of each element of a gradient.");
  std::vector<std::pair<std::string, PrecisionChoice>> precisions;
  for (const Precision p : {Precision::as_is, Precision::float32, Precision::float64,
                            Precision::bfloat16_mixed, Precision::float16_mixed})
    precisions.emplace_back(to_string(p), p);
  if (t.session.precision.index() == 1)  // the program's own
    precisions.emplace_back(to_string(t.session.precision), t.session.precision);
  settings.add_choice("trainer.precision", t.session.precision, precisions,
                      "Of parameters, or of forward alone.");
  settings.add_choice(
      "trainer.non_finite", t.session.non_finite,
      std::vector<std::pair<std::string, NonFinite>>{
          {"error", NonFinite::error}, {"skip", NonFinite::skip}, {"step", NonFinite::step}},
      "What a step with infinite or NaN gradients does.");
  add_saves_to(settings);
  settings.add("log.folder", log_folder, "Empty: nothing is logged.");
  settings.add("log.every_steps", t.log_every_steps, "Steps between two entries.");
  settings.add("log.csv", log_csv, "`metrics.csv`.");
  settings.add("log.json", log_json, "`metrics.jsonl`.");
  settings.add("log.tensorboard", log_tensorboard, "A folder `tensorboard`.");
  settings.add("progress.show", t.progress.show, "A bar, or a line a minute.");
  settings.add("progress.unit", t.progress.unit, "What weights count: `tokens`.");
  settings.add("progress.log", t.progress.log, "Pace, memory and waiting go to the log.");
  settings.add("progress.peak_flop", t.progress.peak_flop, "FLOP/s of a rank's device at most.");
}

template <class S>
void RunSettings::add_saves_to(S& settings) {
  TrainerCheckpoints& checkpoint = trainer.checkpoint;
  settings.add("checkpoint.folder", checkpoint.folder, "Empty: nothing is saved.");
  settings.add("checkpoint.resume", checkpoint.resume, "Goes on from the latest one.");
  settings.add("checkpoint.from", checkpoint.from, "Goes on from this one.");
  settings.add("checkpoint.background", checkpoint.background, "Saves beside training.");
  settings.add("checkpoint.every_steps", saves.every_steps, "0: not.");
  settings.add("checkpoint.every_epochs", saves.every_epochs, "0: not.");
  settings.add("checkpoint.every", saves.every, "A time; 0: not.");
  settings.add("checkpoint.keep_last", saves.keep_last, "0: all.");
  settings.add("checkpoint.monitor", saves.monitor, "Keeps the best by this metric, `val/loss`.");
  settings.add("checkpoint.best", saves.best, "How many of them.");
  const std::vector<std::pair<std::string, Better>> better{{"smaller", Better::smaller},
                                                           {"larger", Better::larger}};
  settings.add_choice("checkpoint.better", saves.better, better, "What is better.");
  settings.add("checkpoint.at_end", saves.at_end, "Saves at the end of the run.");
  settings.add("checkpoint.on_exception", saves.on_exception, "Saves the last complete state.");
  settings.add("early_stopping.monitor", stop_on, "A metric, `val/loss`; empty: not.");
  settings.add("early_stopping.patience", stopping.patience, "Validations without improvement.");
  settings.add("early_stopping.least", stopping.least, "Less is no improvement.");
  settings.add_choice("early_stopping.better", stopping.better, better, "What is better.");
}

}  // namespace tessera
