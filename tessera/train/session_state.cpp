// What a session saves, and how it goes on from it.

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "tessera/base/internal/name.h"
#include "tessera/base/internal/split.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/tensor/policy.h"
#include "tessera/train/detail/all_modules.h"
#include "tessera/train/generators.h"
#include "tessera/train/session.h"

namespace tessera {

namespace {

// What a checkpoint has under the modules' names is theirs, to the last tensor: a network that has
// become smaller since does not go on with what is left of it. Where ranks have different modules,
// it is that of one of them.
void refuse_other_modules(const CheckpointReader& saved, const NamedModules& modules,
                          const torch::nn::Module& all, Strategy& strategy) {
  std::set<std::string> known, names;
  for (const auto& item : all.named_parameters()) known.insert(item.key());
  for (const auto& item : all.named_buffers()) known.insert(item.key());
  for (const NamedModule& m : modules) names.insert(m.name);
  if (strategy.abilities().modules_differ) {
    std::string mine;
    for (const std::string& name : names) mine += name + '\n';
    mine += '\n';
    for (const std::string& name : known) mine += name + '\n';
    for (const std::string& text : strategy.all_gather(mine)) {
      auto* into = &names;
      for (const std::string& name : split(text, '\n'))
        if (name.empty())
          into = &known;
        else
          into->insert(name);
    }
  }
  std::string left;
  for (const SavedTensor& t : saved.tensors()) {
    const bool ours = names.contains(t.name.substr(0, t.name.find('.')));
    if (ours && !known.contains(t.name))
      left += concat(left.empty() ? "'" : ", '", printable(t.name), "'");
  }
  if (!left.empty())
    throw InvalidArgument("the checkpoint is that of another model: it has ", left,
                          ", which is not here; here are ",
                          list(std::vector(known.begin(), known.end())),
                          ". Build the model that was saved, or give another folder");
}

void refuse_other_optimizers(const CheckpointReader& saved, std::size_t here) {
  const std::vector<std::string> names = saved.value_names();
  std::size_t there = 0;
  while (std::ranges::find(names, concat("optimizer.", there, ".kind")) != names.end()) ++there;
  if (there != here)
    throw InvalidArgument("the checkpoint has ", there, " optimizers, and there are ", here,
                          " here");
}

}  // namespace

void Session::restore_modules(const CheckpointReader& saved) {
  refuse_other_modules(saved, modules_, *all_, *strategy_);
  CheckpointState state;
  state.add("", *all_, strategy_->hand_shards());
  saved.load(state, {.allow_extra = true});
  restored_ = true;
}

CheckpointState Session::state() {
  CheckpointState state;
  const HandShards shards = strategy_->hand_shards();
  state.add("", *all_, shards);
  for (std::size_t i = 0; i < optimizers_.size(); ++i)
    add_optimizer(state, concat("optimizer.", i, "."), *optimizers_[i], *all_, shards);
  add_counters(state);
  return state;
}

void Session::load(const CheckpointReader& saved, CheckpointState* extra) {
  const HandShards shards = strategy_->hand_shards();
  if (!strategy_->abilities().restores_after_setup && !restored_)
    throw InvalidArgument(
        "the strategy '", strategy_->name(),
        "' restores before setup() alone: give the checkpoint to the session's constructor");
  // What does not fit is found before anything is changed.
  if (!restored_) refuse_other_modules(saved, modules_, *all_, *strategy_);
  refuse_other_optimizers(saved, optimizers_.size());
  std::vector<std::function<void()>> commits;
  for (std::size_t i = 0; i < optimizers_.size(); ++i)
    commits.push_back(
        read_optimizer(saved, concat("optimizer.", i, "."), *optimizers_[i], *all_, shards));
  CheckpointState state;
  if (extra) state = *extra;
  if (!restored_) state.add("", *all_, shards);
  precision_->add_state(state, "train.");
  saved.load(state, {.allow_extra = true});
  restored_ = false;
  for (const auto& commit : commits) commit();
  restore_counters(state, saved.saved_ranks());
  if (extra) *extra = std::move(state);
}

void Session::add_counters(CheckpointState& state, const std::string& prefix) const {
  state.set_integer(prefix + "steps", steps_);
  state.set_real(prefix + "unit", unit_);
  precision_->add_state(state, prefix);
  const GeneratorState random = generator_state(*strategy_);
  state.set_of_rank(prefix + "random", random.local);
  if (!random.sharded) return;
  state.set_integer(prefix + "sharded_seed", static_cast<std::int64_t>(random.sharded->seed));
  state.set_integer(prefix + "sharded_stream", static_cast<std::int64_t>(random.sharded->stream));
}

void Session::restore_counters(const CheckpointState& state, int saved_ranks,
                               const std::string& prefix) {
  steps_ = state.get_integer(prefix + "steps");
  if (state.has(prefix + "unit")) unit_ = state.get_real(prefix + "unit");
  precision_->restore(state, prefix);
  // Where the first rank alone saved, the others keep theirs, which ranks that are threads share.
  if (state.has_of_rank(prefix + "random") && strategy_->rank() < saved_ranks)
    set_generator_state(*strategy_, {state.get_of_rank(prefix + "random"), std::nullopt});
  const DistributedManager* manager = strategy_->manager();
  if (manager && state.has(prefix + "sharded_seed"))
    set_random_state(*manager,
                     {static_cast<std::uint64_t>(state.get_integer(prefix + "sharded_seed")),
                      static_cast<std::uint64_t>(state.get_integer(prefix + "sharded_stream"))});
}

}  // namespace tessera
