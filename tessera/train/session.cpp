#include "tessera/train/session.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/detail/all_modules.h"
#include "tessera/train/detail/random_bytes.h"

namespace tessera {

namespace {

// Places in the numbers that the ranks add up each step.
enum StepSum { kWeight, kLoss, kOverflow, kSave, kRequested, kUsr1, kTerminated, kStepSums };

Stop stop_of(const double* votes) {
  if (votes[kTerminated] > 0) return Stop::terminated;
  if (votes[kUsr1] > 0) return Stop::usr1;
  return votes[kRequested] > 0 ? Stop::requested : Stop::none;
}

void add_vote(Stop stop, double* votes) {
  votes[kRequested] = stop == Stop::requested;
  votes[kUsr1] = stop == Stop::usr1;
  votes[kTerminated] = stop == Stop::terminated;
}

void add_up(Strategy& strategy, double* numbers, int count) {
  if (strategy.size() == 1) return;
  // Memory of its own: a call that an error ends may still write to it.
  const at::Tensor host = at::empty({count}, at::kDouble);
  auto* const values = host.data_ptr<double>();
  std::copy(numbers, numbers + count, values);
  if (strategy.root_device().is_cpu()) {
    strategy.reduce(host, ReduceOp::sum);
  } else {
    const at::Tensor there = host.to(strategy.root_device());
    strategy.reduce(there, ReduceOp::sum);
    host.copy_(there);
  }
  std::copy(values, values + count, numbers);
}

// The caller's autocast is off while it lives.
class NoAutocast {
 public:
  explicit NoAutocast(c10::DeviceType device)
      : device_(device), before_(at::autocast::is_autocast_enabled(device)) {
    at::autocast::set_autocast_enabled(device_, false);
  }
  ~NoAutocast() { at::autocast::set_autocast_enabled(device_, before_); }
  NoAutocast(const NoAutocast&) = delete;
  NoAutocast& operator=(const NoAutocast&) = delete;

 private:
  const c10::DeviceType device_;
  const bool before_;
};

constexpr const char* kMixed =
    "a step has micro-batches by backward() and by add_gradients(): use one of them";

at::Tensor local_gradient(const at::Tensor& gradient) {
  return is_sharded(gradient) ? to_local(gradient) : gradient;
}

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
      bool modules_over = false;
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = text.find('\n', at);
        if (end == at)
          modules_over = true;
        else
          (modules_over ? known : names).insert(text.substr(at, end - at));
        at = end + 1;
      }
    }
  }
  std::string left;
  for (const SavedTensor& t : saved.tensors()) {
    const bool ours = names.contains(t.name.substr(0, t.name.find('.')));
    if (ours && !known.contains(t.name))
      left += concat(left.empty() ? "'" : ", '", printable(t.name), "'");
  }
  if (!left.empty())
    throw InvalidArgument(
        concat("the checkpoint is that of another model: it has ", left, ", which is not here"));
}

void refuse_other_optimizers(const CheckpointReader& saved, std::size_t here) {
  const std::vector<std::string> names = saved.value_names();
  std::size_t there = 0;
  while (std::find(names.begin(), names.end(), concat("optimizer.", there, ".kind")) != names.end())
    ++there;
  if (there != here)
    throw InvalidArgument(
        concat("the checkpoint has ", there, " optimizers, and there are ", here, " here"));
}

}  // namespace

NonFiniteGradient::~NonFiniteGradient() = default;

Session::Session(std::shared_ptr<Strategy> strategy, const NamedModules& modules,
                 const SessionOptions& options, const CheckpointReader* from)
    : strategy_(std::move(strategy)),
      modules_(modules),
      options_(options),
      weight_(Group(), StepWeight::Reduced::summed) {
  if (!strategy_) throw InvalidArgument("a session without a strategy");
  if (!(options_.clip_value > 0))
    throw InvalidArgument(
        concat("SessionOptions::clip_value is ", options_.clip_value, ", but must be above 0"));
  if (!(options_.clip.max_norm > 0))
    throw InvalidArgument(concat("SessionOptions::clip.max_norm is ", options_.clip.max_norm,
                                 ", but must be above 0"));
  all_ = std::make_shared<detail::AllModules>(modules_);
  for (const NamedModule& m : modules_) {
    if (m.name == "optimizer" || m.name == "train" || m.name == "loop" || m.name == "callback")
      throw InvalidArgument(concat("a module named '", m.name, "': the checkpoint uses that name"));
  }
  if (options_.precision == Precision::float16_mixed)
    scaler_ = std::make_unique<LossScaler>(options_.scaler);
  listen(options_.signals);
  convert();
  if (from && !strategy_->abilities().restores_after_setup) {
    refuse_other_modules(*from, modules_, *all_, *strategy_);
    CheckpointState state;
    state.add("", *all_, strategy_->hand_shards());
    from->load(state, {.allow_extra = true});
    restored_ = true;
  }
  strategy_->setup(modules_);
  strategy_->session_ = this;
}

Session::~Session() {
  try {
    if (strategy_->session_ == this) {
      strategy_->session_ = nullptr;
      strategy_->teardown();
    }
  } catch (...) {  // the error that ends the session is told already
  }
}

void Session::convert() const {
  const bool single = options_.precision == Precision::float32;
  if (!single && options_.precision != Precision::float64) return;
  const at::ScalarType wanted = single ? at::kFloat : at::kDouble;
  if (strategy_->abilities().moves_modules) {
    all_->to(wanted);
    return;
  }
  for (const auto& item : all_->named_parameters()) {
    if (at::isFloatingType(item.value().scalar_type()) && item.value().scalar_type() != wanted)
      throw InvalidArgument(concat("precision ", to_string(options_.precision), ", but '",
                                   item.key(), "' is ", item.value().scalar_type(),
                                   ", and the strategy leaves modules as the user made them"));
  }
}

void Session::convert(MicroBatch& batch) const {
  const bool single = options_.precision == Precision::float32;
  if (!single && options_.precision != Precision::float64) return;
  if (!strategy_->abilities().moves_modules) return;
  for (at::Tensor& t : batch.tensors)
    if (t.is_floating_point()) t = t.to(single ? at::kFloat : at::kDouble);
}

std::size_t Session::add(std::shared_ptr<torch::optim::Optimizer> optimizer) {
  if (!optimizer) throw InvalidArgument("a session was given no optimizer");
  std::vector<at::Tensor> own;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& group : optimizer->param_groups()) {
    for (const at::Tensor& p : group.params())
      if (seen.insert(p.unsafeGetTensorImpl()).second) own.push_back(p);
  }
  optimizers_.push_back(std::move(optimizer));
  optimized_.push_back(std::move(own));
  parameters_.clear();
  return optimizers_.size() - 1;
}

const std::vector<std::shared_ptr<torch::optim::Optimizer>>& Session::optimizers() const {
  return optimizers_;
}

void Session::train(bool on) {
  for (const NamedModule& m : modules_) m.module->train(on);
}

AutocastScope Session::autocast() const {
  return AutocastScope(options_.precision, strategy_->root_device());
}

at::Tensor Session::micro_batch(const std::function<at::Tensor()>& forward, double weight,
                                bool last) {
  strategy_->before_forward(last);
  at::Tensor loss;
  {
    const AutocastScope scope = autocast();
    loss = forward();
  }
  backward(loss, weight, last);
  return loss.detach();
}

void Session::backward(const at::Tensor& loss, double weight, bool last) {
  if (made_ == Made::added) throw InvalidArgument(kMixed);
  if (made_ == Made::nothing && parameters_.empty()) clear_gradients();
  at::Tensor weighed = weight_.weigh_in(loss, strategy_->loss_weight(weight), unit_);
  made_ = Made::backward;
  try {
    if (scaler_) weighed = weighed * scaler_->scale();
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
  struct Scope {
    Scope(Precision precision, c10::Device device) : autocast(precision, device) {}
    ~Scope() { at::autocast::clear_cache(); }
    AutocastScope autocast;
  };
  const Precision p = options_.precision;
  if (p != Precision::bfloat16_mixed && p != Precision::float16_mixed) return nullptr;
  return std::make_shared<Scope>(p, strategy_->root_device());
}

TotalLoss Session::add_gradients(const std::function<TotalLoss(double)>& run, bool last) {
  if (!run) throw InvalidArgument("add_gradients: there is no function");
  if (made_ == Made::backward) throw InvalidArgument(kMixed);
  if (made_ == Made::nothing && parameters_.empty()) clear_gradients();
  made_ = Made::added;
  const bool reduces = last || strategy_->abilities().owns_accumulation;
  try {
    const auto scope = reduces ? nullptr : strategy_->no_sync();
    const NoAutocast plain(strategy_->root_device().type());
    const TotalLoss total = run(unit_ / (scaler_ ? scaler_->scale() : 1.0));
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

std::vector<at::Tensor> Session::parameters_of(const std::vector<std::size_t>& which) const {
  std::vector<at::Tensor> all;
  std::set<const c10::TensorImpl*> seen;
  const auto take = [&](std::size_t i) {
    if (i >= optimized_.size())
      throw InvalidArgument(concat("optimizer ", i, " of ", optimized_.size()));
    for (const at::Tensor& p : optimized_[i])
      if (seen.insert(p.unsafeGetTensorImpl()).second) all.push_back(p);
  };
  for (const std::size_t i : which) take(i);
  return all;
}

// Of the modules, and what only an optimizer knows.
void Session::find_parameters() {
  std::vector<std::size_t> every(optimized_.size());
  for (std::size_t i = 0; i < every.size(); ++i) every[i] = i;
  all_optimized_ = parameters_of(every);
  multiples_.clear();
  std::set<const c10::TensorImpl*> seen;
  const auto take = [&](const at::Tensor& p) {
    if (seen.insert(p.unsafeGetTensorImpl()).second) parameters_.push_back(p);
  };
  for (const at::Tensor& p : all_->parameters()) take(p);
  for (const at::Tensor& p : all_optimized_) take(p);
}

void Session::find_multiples() {
  std::unordered_map<const c10::TensorImpl*, double> all;
  for (const at::Tensor& p : all_optimized_)
    all[p.unsafeGetTensorImpl()] = p.requires_grad() ? multiple_of(p) : 1;
  multiples_ = std::move(all);
}

bool Session::overflowed() const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters_) {
    if (!p.grad().defined()) continue;
    const at::Tensor gradient = local_gradient(p.grad());
    if (gradient.numel() > 0 && !at::isfinite(gradient).all().item<bool>()) return true;
  }
  return false;
}

// By what the sum of the ranks' gradients of a parameter was multiplied.
double Session::multiple_of(const at::Tensor& parameter) const {
  const auto sum = gradient_sum(parameter);
  if (!sum || sum->scale == 0)
    throw GradientError(
        "a session was given a parameter of which it is not known how its gradients come "
        "together: GradientSync::scale() of what reduces them says nothing, or zero");
  if (sum->reducers > 0) {
    const int losses = strategy_->size() / strategy_->loss_sharing();
    const bool others =
        sum->is_mean() && (sum->count % losses != 0 || sum->count > strategy_->size());
    if (sum->count > 0 && (sum->count < losses || others))
      throw GradientError(concat("a session of ", losses,
                                 " ranks with different losses was given "
                                 "a parameter (shape ",
                                 parameter.sizes(), ") whose gradients come together over ",
                                 sum->count,
                                 " ranks: reduce them over those that have different losses"));
    // Each loss is in a mean as often as ranks share it.
    return sum->is_mean() ? 1.0 / losses : sum->scale;
  }
  return strategy_->abilities().gradients == Abilities::Gradients::averaged
             ? static_cast<double>(strategy_->loss_sharing()) / strategy_->size()
             : 1.0;
}

void Session::scale_gradients(const std::vector<at::Tensor>& parameters, double weight,
                              bool added) const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters) {
    if (!p.grad().defined()) continue;
    at::Tensor gradient = local_gradient(p.grad());
    const double multiple = added ? 1.0 : multiples_.at(p.unsafeGetTensorImpl());
    const double factor = unit_ / (multiple * weight);
    if (factor != 1) gradient.mul_(factor);
    if (std::isfinite(options_.clip_value))
      gradient.clamp_(-options_.clip_value, options_.clip_value);
  }
}

// The step is over, or forgotten where an exception has ended it: what was weighed, too. Also
// before the first one: parameters may hold what a session left that an exception ended.
void Session::clear_gradients() {
  if (parameters_.empty()) find_parameters();
  for (const at::Tensor& p : parameters_) p.mutable_grad().reset();
  weight_.reset();
  owed_ = false;
  made_ = Made::nothing;
}

StepResult Session::step(const std::vector<std::size_t>& which,
                         const std::function<void(const StepResult&)>& before) {
  if (optimizers_.empty()) throw InvalidArgument("a step of a session without optimizers");
  if (parameters_.empty()) find_parameters();
  const std::vector<at::Tensor> named = parameters_of(which);
  const auto refuse = [](const torch::optim::Optimizer& optimizer) {
    if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer))
      throw NotAvailable(
          "LBFGS calls the loss again: step it by Session::step_again(), in a task whose "
          "automatic() is false");
  };
  if (which.empty())
    for (const auto& optimizer : optimizers_) refuse(*optimizer);
  for (const std::size_t i : which) refuse(*optimizers_[i]);
  StepResult result;
  try {
    result = finish_gradients(which.empty() ? all_optimized_ : named);
    ++steps_;
    if (result.stepped) {
      if (before) before(result);
      if (which.empty()) {
        for (const auto& optimizer : optimizers_) optimizer->step();
      } else {
        for (const std::size_t i : which) optimizers_[i]->step();
      }
    }
  } catch (...) {
    clear_gradients();
    throw;
  }
  clear_gradients();
  return last_ = result;
}

StepResult Session::step_again(const std::function<void()>& evaluate, std::size_t optimizer) {
  if (!evaluate) throw InvalidArgument("step_again: there is no function");
  if (optimizer >= optimizers_.size())
    throw InvalidArgument(concat("optimizer ", optimizer, " of ", optimizers_.size()));
  if (scaler_)
    throw NotAvailable(
        "step_again() with float16: a search along the loss cannot leave out an overflow; choose "
        "bfloat16 or float32");
  if (!strategy_->by_hand().empty())
    throw NotAvailable(
        "step_again() with parameters that are sharded by hand: the optimizer would take its "
        "products over each rank's shard alone");
  if (parameters_.empty()) find_parameters();
  struct LeftOut {};
  StepResult first;
  bool evaluated = false;
  const std::vector<at::Tensor>& own = optimized_[optimizer];
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
    optimizers_[optimizer]->step(closure);
    clear_gradients();
  } catch (const LeftOut&) {
    undo();
    first.stepped = false;
  } catch (...) {
    undo();
    throw;
  }
  ++steps_;
  return last_ = first;
}

StepResult Session::finish_gradients(const std::vector<at::Tensor>& own) {
  if (owed_) strategy_->reduce_gradients();
  owed_ = false;
  const bool added = std::exchange(made_, Made::nothing) == Made::added;
  if (!added && multiples_.empty()) find_multiples();

  const StepWeight::Sums mine = weight_.take();
  double sums[kStepSums] = {mine.weight, mine.loss, scaler_ && overflowed() ? 1.0 : 0.0};
  sums[kSave] = save_ ? 1.0 : 0.0;
  save_ = false;
  add_vote(wanted(), sums);
  add_up(*strategy_, sums, kStepSums);

  StepResult result;
  result.stop = stop_of(sums);
  result.save = sums[kSave] > 0;
  agreed_save_ = agreed_save_ || result.save;
  if (!(sums[kWeight] > 0))
    throw InvalidArgument(concat(
        "the weights of a step must be finite, not negative, and not all zero; their sum over "
        "ranks and micro-batches is ",
        sums[kWeight], ", this rank gave ", mine.weight));
  result.loss = sums[kLoss] / sums[kWeight];
  result.weight = sums[kWeight] / strategy_->loss_sharing();
  result.stepped = sums[kOverflow] == 0;
  if (result.stepped) {
    scale_gradients(own, result.weight * (scaler_ ? scaler_->scale() : 1.0), added);
    if (std::isfinite(options_.clip.max_norm) || options_.measure_norm)
      result.norm = strategy_->clip(own, options_.clip);
  }
  // Of what the ranks have added up alone: they may have other parameters.
  unit_ = result.weight;
  if (scaler_) scaler_->update(!result.stepped);
  const bool measured = std::isfinite(options_.clip.max_norm) || options_.measure_norm;
  if (result.stepped && measured && !std::isfinite(result.norm)) {
    if (options_.non_finite == NonFinite::error)
      throw NonFiniteGradient(concat("the gradients after step ", steps_,
                                     " are not finite (the loss is ", result.loss,
                                     "): look for what diverges, or leave such steps out by "
                                     "SessionOptions::non_finite = NonFinite::skip"));
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

void Session::request_stop(Stop stop) { requested_ = std::max(requested_, stop); }

Stop Session::wanted() const {
  return signals_ ? std::max(requested_, signals_->received()) : requested_;
}

Stop Session::vote() {
  double votes[kStepSums] = {};
  add_vote(wanted(), votes);
  add_up(*strategy_, votes, kStepSums);
  return stop_of(votes);
}

double Session::loss_scale() const { return scaler_ ? scaler_->scale() : 1; }

CheckpointState Session::state() {
  CheckpointState state;
  const HandShards shards = strategy_->hand_shards();
  state.add("", *all_, shards);
  for (std::size_t i = 0; i < optimizers_.size(); ++i)
    add_optimizer(state, concat("optimizer.", i, "."), *optimizers_[i], *all_, shards);
  state.set_integer("train.steps", steps_);
  state.set_real("train.unit", unit_);
  if (scaler_) state.set("train.scaler", scaler_->state());
  state.set_of_rank("train.random", detail::random_bytes(strategy_->root_device()));
  if (const DistributedManager* manager = strategy_->manager()) {
    const RandomState random = random_state(*manager);
    state.set_integer("train.sharded_seed", static_cast<std::int64_t>(random.seed));
    state.set_integer("train.sharded_stream", static_cast<std::int64_t>(random.stream));
  }
  return state;
}

void Session::load(const CheckpointReader& saved, CheckpointState* extra) {
  const HandShards shards = strategy_->hand_shards();
  if (!strategy_->abilities().restores_after_setup && !restored_)
    throw InvalidArgument(concat(
        "the strategy '", strategy_->name(),
        "' restores before setup() alone: give the checkpoint to the session's constructor"));
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
  saved.load(state, {.allow_extra = true});
  restored_ = false;
  for (const auto& commit : commits) commit();
  steps_ = state.get_integer("train.steps");
  if (state.has("train.unit")) unit_ = state.get_real("train.unit");
  if (scaler_ && state.has("train.scaler")) scaler_->restore(state.get("train.scaler"));
  // Where the first rank alone saved, the others keep theirs.
  if (state.has_of_rank("train.random") && strategy_->rank() < saved.saved_ranks())
    detail::set_random_bytes(state.get_of_rank("train.random"), strategy_->root_device());
  const DistributedManager* manager = strategy_->manager();
  if (manager && state.has("train.sharded_seed")) {
    set_random_state(*manager,
                     {static_cast<std::uint64_t>(state.get_integer("train.sharded_seed")),
                      static_cast<std::uint64_t>(state.get_integer("train.sharded_stream"))});
  }
  if (extra) *extra = std::move(state);
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
