// What a trainer saves, and how it goes on from it.

#include <ATen/ATen.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/internal/tagged_group.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

namespace tessera {

std::shared_ptr<CheckpointIO> TrainerCheckpoints::place() const {
  return io ? io : local_folder(folder, options.operations);
}

void Trainer::make_checkpointer(bool writes) {
  const TrainerCheckpoints& saves = options_.checkpoint;
  if (!saves.given()) return;
  const bool all = saves_on_all_ranks();
  if (strategy().manager() == nullptr && strategy().size() > 1 && all)
    throw NotAvailable("the strategy '", strategy().name(), "' has no manager, by which ",
                       strategy().size(),
                       " ranks could save: override Strategy::manager(), or declare that "
                       "the first rank saves alone");
  if (!all && !first_rank()) return;
  CheckpointOptions options = saves.options;
  options.remove_incomplete = options.remove_incomplete && writes;
  const bool within = !all && strategy().manager() != nullptr && strategy().size() > 1;
  checkpointer_ = std::make_unique<Checkpointer>(
      manager(), saves.place(), options, within ? std::vector<int>{ranks().front()} : ranks());
}

const DistributedManager& Trainer::manager() {
  if (strategy().manager()) return *strategy().manager();
  if (!alone_) alone_ = std::make_shared<SingleDevice>();
  return *alone_->manager();
}

std::vector<int> Trainer::ranks() const {
  return strategy().manager() ? strategy().global_ranks() : std::vector<int>{0};
}

// Where the first rank saves alone, it tells the others what it found, by the strategy's own calls.
std::string Trainer::latest() {
  static constexpr auto kinds = agree::kinds_of<CheckpointDamaged>();
  std::string found;
  const std::string failure = agree::failure_of(kinds, [&] {
    try {
      if (checkpointer_) found = checkpointer_->to_resume().value_or("");
    } catch (const CheckpointDamaged& e) {
      throw CheckpointDamaged(e.what(), " (TrainerCheckpoints::from)");
    }
  });
  std::string said = failure.empty() ? '\0' + found : failure;
  if (!saves_on_all_ranks()) said = strategy().broadcast(said, 0);
  if (said[0] != '\0') agree::raise(kinds, said, "");
  return said.substr(1);
}

CheckpointState Trainer::state(bool copies) {
  CheckpointState state = session_->state();
  const std::size_t of_session = state.tensors().size();
  state.set_integer("loop.epoch", epoch_ + (epoch_over_ ? 1 : 0));
  const bool in_epoch = in_epoch_ && !epoch_over_;
  state.set_integer("loop.in_epoch", in_epoch);
  state.set_integer("loop.validation_due", validation_due_);
  state.set_integer("loop.step_due", step_due_.has_value());
  if (step_due_) {
    state.set_real("loop.step_due.loss", step_due_->loss);
    state.set_real("loop.step_due.weight", step_due_->weight);
    state.set_real("loop.step_due.norm", step_due_->norm);
    state.set_integer("loop.step_due.stepped", step_due_->stepped);
    state.set_integer("loop.step_due.before", previous_step_);
  }
  // What is to go when this one is on the disk, and what goes later.
  std::size_t removed = 0;
  for (const auto* names : {&ready_to_remove_, &to_remove_})
    for (const std::string& name : *names) state.set(concat("loop.remove.", removed++), name);
  state.set_real("loop.rate_scale", rate_scale_);
  state.set_integer("loop.rates_scaled", rates_scaled_);
  state.set_of_rank("loop.window_metrics", window_metrics_.state());
  state.set_of_rank("loop.epoch_metrics", epoch_metrics_.state());
  if (training_) {
    state.set_integer("loop.batch", static_cast<std::int64_t>(training_->index()));
    const std::string position = training_->source().state();
    if (training_->source().shared_state())
      state.set("loop.source", position);
    else
      state.set_of_rank("loop.source", position);
  }
  for (const auto& [name, value] : metrics_) state.set_real("loop.metric." + name, value);
  task_->save(state);
  for (const auto& callback : options_.callbacks)
    callback->save(*this, state, "callback." + callback->name() + ".");
  if (!copies || state.tensors().size() == of_session) return state;
  CheckpointState own;
  for (std::size_t i = 0; i < state.tensors().size(); ++i) {
    const auto& t = state.tensors()[i];
    const at::Tensor value = i < of_session ? t.value : t.value.detach().clone();
    if (t.shard)
      own.add(t.name, value, *t.shard);
    else
      own.add(t.name, value);
  }
  for (const auto& [name, bytes] : state.values()) own.set(name, bytes);
  for (const auto& [name, bytes] : state.rank_values()) own.set_of_rank(name, bytes);
  return own;
}

std::unique_ptr<CheckpointReader> Trainer::resumed_from() {
  const std::string from = options_.checkpoint.from.empty() && options_.checkpoint.resume
                               ? latest()
                               : options_.checkpoint.from;
  resumed_ = from;
  if (from.empty()) return nullptr;
  return std::make_unique<CheckpointReader>(manager().group(ranks()), options_.checkpoint.place(),
                                            from);
}

void Trainer::load(const CheckpointReader& saved) {
  CheckpointState extra;
  task_->save(extra);
  const auto tensors = saved.tensors();
  for (const auto& callback : options_.callbacks) {
    const std::string prefix = "callback." + callback->name() + ".";
    const std::size_t before = extra.tensors().size();
    callback->save(*this, extra, prefix);
    if (extra.tensors().size() > before && std::ranges::none_of(tensors, [&](const SavedTensor& t) {
          return t.name.starts_with(prefix);
        }))
      throw InvalidArgument("the callback '", callback->name(),
                            "' is new in this run: it has tensors to load, and the "
                            "checkpoint has none of it; leave it out, or begin anew");
  }
  session_->load(saved, &extra);
  step_ = session_->steps();
  load_loop(saved);
  task_->loaded(extra);
  for (const auto& callback : options_.callbacks)
    callback->loaded(*this, extra, "callback." + callback->name() + ".");
  if (training_) load_position(saved);
}

void Trainer::load_loop(const CheckpointReader& saved) {
  const std::vector<std::string> names = saved.value_names();
  // Checkpoints of before do not say everything.
  const auto has = [&](const std::string& name) {
    return std::ranges::find(names, name) != names.end();
  };
  epoch_ = saved.integer("loop.epoch");
  in_epoch_ = saved.integer("loop.in_epoch") != 0;
  validation_due_ = saved.integer("loop.validation_due") != 0;
  if (has("loop.step_due") && saved.integer("loop.step_due") != 0) {
    step_due_.emplace();
    step_due_->loss = saved.real("loop.step_due.loss");
    step_due_->weight = saved.real("loop.step_due.weight");
    step_due_->norm = saved.real("loop.step_due.norm");
    step_due_->stepped = saved.integer("loop.step_due.stepped") != 0;
    previous_step_ = saved.integer("loop.step_due.before");
  }
  for (std::size_t n = 0; has(concat("loop.remove.", n)); ++n)
    ready_to_remove_.push_back(saved.value(concat("loop.remove.", n)));
  rate_scale_ = saved.real("loop.rate_scale");
  rates_scaled_ =
      has("loop.rates_scaled") ? saved.integer("loop.rates_scaled") != 0 : rate_scale_ != 1;
  // Ranks that are gone leave theirs to those that are there.
  const auto share = [&](const std::string& key, Metrics& into) {
    into.clear();
    for (const auto& [rank, bytes] : saved.values_of_ranks(key)) {
      if (rank % strategy().size() != strategy().rank()) continue;
      Metrics one;
      one.restore(bytes);
      into.add(one);
    }
  };
  share("loop.window_metrics", window_metrics_);
  share("loop.epoch_metrics", epoch_metrics_);
  const std::string metric = "loop.metric.";
  for (const std::string& key : names)
    if (key.starts_with(metric)) metrics_[key.substr(metric.size())] = saved.real(key);
}

void Trainer::load_position(const CheckpointReader& saved) {
  BatchSource& source = training_->source();
  std::string position;
  const auto names = saved.value_names();
  if (std::ranges::find(names, "loop.source") != names.end()) {
    position = saved.value("loop.source");
  } else {
    const auto all = saved.values_of_ranks("loop.source");
    if (static_cast<int>(all.size()) == strategy().size()) {
      position = all.at(strategy().rank());
    } else if (in_epoch_) {
      throw ConfigurationError(
          "the checkpoint was saved in the middle of an epoch by ", all.size(),
          " ranks with a position each, and there are ", strategy().size(),
          " now: go on with as many, from the end of an epoch, or read by a Loader");
    }
  }
  if (!position.empty()) source.restore(position);
  if (in_epoch_)
    training_->resume(static_cast<std::uint64_t>(epoch_),
                      static_cast<std::uint64_t>(saved.integer("loop.batch")));
}

void Trainer::request_save(const std::string& name) {
  const std::string wanted = name.empty() ? concat("step-", step_) : name;
  if (std::ranges::find(to_save_, wanted) == to_save_.end()) to_save_.push_back(wanted);
}

// Between steps and epochs: nothing is half done, so that what is saved here can go on.
void Trainer::safe_point() {
  const bool ends = stop_ >= Stop::usr1;
  const bool saves = options_.checkpoint.given();
  if (ends && saves) {
    request_save();
    std::erase(to_save_, saved_);  // of this step: there is one already, and time may be short
  }
  std::vector<std::string> names;
  names.swap(to_save_);
  if (!names.empty() && !saves)
    throw InvalidArgument(
        "a checkpoint was asked for, but TrainerOptions::checkpoint.folder is empty");
  if (names.empty()) return keep_whole_state();
  // A run that is killed, and goes on from here, has no lines of before in memory alone.
  if (first_rank())
    for (const auto& logger : options_.loggers) logger->flush();
  // What is to go has a successor on the disk when the save before this one is.
  if (checkpointer_) checkpointer_->wait();
  pass_on_warnings();
  remove_all(ready_to_remove_);
  ready_to_remove_.swap(to_remove_);
  show_saved();
  for (const std::string& name : names) {
    const CheckpointState all = state();
    if (first_rank() && checkpointer_ && progress_)
      saving_.push_back({name, checkpointer_->saves(), std::chrono::steady_clock::now()});
    if (checkpointer_ && options_.checkpoint.background && !ends)
      checkpointer_->start_save(name, all);
    else if (checkpointer_)
      checkpointer_->save(name, all);
    saved_ = name;
  }
  show_saved();
  keep_whole_state();
}

// ---- after an exception ----

// Who does not come within a short time does not come: it has lost others, or is gone.
constexpr std::chrono::minutes kPatience(1);

// What is in flight ends before the others are told: its groups end then, and a state that is saved
// afterwards takes it to be on the disk.
void Trainer::let_save_end() const noexcept {
  const Deadline deadline = deadline_after(kPatience);
  while (checkpointer_ && checkpointer_->saving() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Trainer::keep_whole_state() {
  if (!saves_on_exception_) return;
  const at::NoGradGuard no_grad;
  auto now = std::make_unique<WholeState>();
  now->step = step_;
  now->number = kept_ + 1;
  now->saved = saved_;
  // A callback may throw here: the one before stays, and this one is not half there.
  now->state = state(/*copies=*/true);
  for (const NamedModule& m : session_->modules())
    for (const at::Tensor& buffer : m.module->buffers())
      now->buffers.emplace_back(buffer.detach(), buffer.detach().clone());
  ++kept_;
  whole_before_ = std::move(whole_);
  if (whole_before_ && whole_before_->step != step_) whole_before_.reset();
  whole_ = std::move(now);
}

// Parameters and optimizers are those of the kept state until the next step begins: nothing has to
// be copied back but buffers.
void Trainer::save_whole_state(const std::exception& e) noexcept {
  if (!saves_on_exception_ || !session_) return;
  // Ranks that are gone, or that nobody has heard of for as long as groups wait, save nothing.
  if (dynamic_cast<const PeerLostError*>(&e) && !dynamic_cast<const PeerFailedError*>(&e)) return;
  if (dynamic_cast<const TimeoutError*>(&e)) return;
  if (!saves_on_all_ranks() && !first_rank()) return;
  // Each rank that hears of the exception passes it on, which ends once more the groups that others
  // have made since: at most as many times as there are ranks.
  for (int round = 0; round < strategy().size(); ++round) {
    try {
      return write_whole_state();
    } catch (const PeerFailedError&) {
    } catch (...) {  // the exception that ended the run is the one that counts
      return;
    }
  }
}

void Trainer::write_whole_state() {
  checkpointer_.reset();  // what it was writing has ended with the groups
  struct Kept {
    std::int64_t step, number;
  };
  Kept mine{0, 0};
  if (whole_ && session_->steps() == whole_->step) mine = {whole_->step, whole_->number};
  std::int64_t oldest = mine.number;
  if (saves_on_all_ranks() && strategy().size() > 1) {
    constexpr auto kWhat = "after an exception";
    const Group meeting = tagged_group(manager(), ranks(), {.timeout = kPatience}, kWhat);
    const auto all = agree::all<Kept>(meeting, kWhat, [&] { return mine; });
    std::int64_t newest = oldest;
    for (const Kept& other : all) {
      if (other.step != mine.step) return;
      oldest = std::min(oldest, other.number);
      newest = std::max(newest, other.number);
    }
    if (newest - oldest > 1) return;
  }
  if (mine.step == 0) return;
  // A rank that went on alone, to where the others were told, goes back by one.
  const WholeState& kept = oldest == whole_->number ? *whole_ : *whole_before_;
  const std::string name = concat("step-", mine.step);
  make_checkpointer(/*writes=*/true);
  const auto there = checkpointer_->names();
  if (!there.empty() && there.back() == name) return;
  // Of the whole state it is one of those that are kept, the best perhaps.
  if (!kept.saved.empty() && kept.saved != name &&
      std::ranges::find(there, kept.saved) == there.end())
    return warn(concat("'", kept.saved, "' did not get to the disk, so '", name,
                       "', which counts on it, is not saved after the exception"));
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, value] : kept.buffers) at::Tensor(buffer).copy_(value);
  checkpointer_->save(name, kept.state);
  saved_ = name;
}

void Trainer::pass_on_warnings() {
  if (!checkpointer_) return;
  const auto warnings = checkpointer_->warnings();
  for (; passed_on_ < warnings.size(); ++passed_on_) warn(warnings[passed_on_]);
}

void Trainer::remove_all(std::vector<std::string>& asked) {
  const auto names = std::exchange(asked, {});
  if (!checkpointer_ || names.empty()) return;
  const auto there = checkpointer_->names();
  for (const std::string& name : names)
    if (std::ranges::find(there, name) != there.end()) checkpointer_->remove(name);
}

}  // namespace tessera
