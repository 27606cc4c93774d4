#include "tessera/checkpoint/optimizer_state.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/optimizer_parameters.h"
#include "tessera/nn/embedding_table.h"
#include "tessera/nn/sharded_optimizer.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

using detail::named_parameters_of;
using Named = detail::NamedParameter;
using StatePointer = std::unique_ptr<torch::optim::OptimizerParamState>;

using torch::optim::OptimizerOptions, torch::optim::OptimizerParamState;

// What an optimizer keeps for a parameter, by name, to be read and written.
struct Fields {
  std::vector<std::pair<const char*, at::Tensor*>> tensors;
  std::int64_t* step = nullptr;
};

// The options of a group of parameters, likewise.
using Options = std::vector<std::pair<const char*, std::variant<double*, bool*, std::int64_t*>>>;
using Values = std::map<std::string, double>;

struct OptimizerKind {
  std::string name;
  StatePointer (*fresh)();
  Fields (*fields)(OptimizerParamState&);
  Options (*options)(OptimizerOptions&);
  // What a field of a parameter is like; none: the parameter.
  at::Tensor (*like)(const at::Tensor& parameter) = nullptr;
};

template <class State>
StatePointer fresh_state() {
  return std::make_unique<State>();
}

Values values_of(const Options& options) {
  Values values;
  for (const auto& [name, option] : options)
    values[name] = std::visit([](const auto* from) { return static_cast<double>(*from); }, option);
  return values;
}

void set_values(const Options& options, const Values& values) {
  for (const auto& [name, option] : options)
    std::visit([value = values.at(name)](
                   auto* to) { *to = static_cast<std::remove_pointer_t<decltype(to)>>(value); },
               option);
}

// From functions of the optimizer's own state and options.
template <class State, class Settings, class Kept, class Given>
OptimizerKind made_of(const char* name, Kept, Given,
                      at::Tensor (*like)(const at::Tensor& parameter) = nullptr) {
  return {name, fresh_state<State>,
          [](OptimizerParamState& s) { return Kept()(static_cast<State&>(s)); },
          [](OptimizerOptions& o) { return Given()(static_cast<Settings&>(o)); }, like};
}

template <class State, class Settings>
OptimizerKind adam_like(const char* name) {
  return made_of<State, Settings>(
      name,
      [](State& s) {
        return Fields{{{"exp_avg", &s.exp_avg()},
                       {"exp_avg_sq", &s.exp_avg_sq()},
                       {"max_exp_avg_sq", &s.max_exp_avg_sq()}},
                      &s.step()};
      },
      [](Settings& o) {
        return Options{{"lr", &o.lr()},
                       {"beta1", &std::get<0>(o.betas())},
                       {"beta2", &std::get<1>(o.betas())},
                       {"eps", &o.eps()},
                       {"weight_decay", &o.weight_decay()},
                       {"amsgrad", &o.amsgrad()}};
      });
}

OptimizerKind sgd_kind() {
  return made_of<torch::optim::SGDParamState, torch::optim::SGDOptions>(
      "SGD", [](auto& s) { return Fields{{{"momentum_buffer", &s.momentum_buffer()}}}; },
      [](auto& o) {
        return Options{{"lr", &o.lr()},
                       {"momentum", &o.momentum()},
                       {"dampening", &o.dampening()},
                       {"weight_decay", &o.weight_decay()},
                       {"nesterov", &o.nesterov()}};
      });
}

OptimizerKind rmsprop_kind() {
  return made_of<torch::optim::RMSpropParamState, torch::optim::RMSpropOptions>(
      "RMSprop",
      [](auto& s) {
        return Fields{{{"square_avg", &s.square_avg()},
                       {"momentum_buffer", &s.momentum_buffer()},
                       {"grad_avg", &s.grad_avg()}},
                      &s.step()};
      },
      [](auto& o) {
        return Options{{"lr", &o.lr()},
                       {"alpha", &o.alpha()},
                       {"eps", &o.eps()},
                       {"weight_decay", &o.weight_decay()},
                       {"momentum", &o.momentum()},
                       {"centered", &o.centered()}};
      });
}

OptimizerKind adagrad_kind() {
  return made_of<torch::optim::AdagradParamState, torch::optim::AdagradOptions>(
      "Adagrad", [](auto& s) { return Fields{{{"sum", &s.sum()}}, &s.step()}; },
      [](auto& o) {
        return Options{{"lr", &o.lr()},
                       {"lr_decay", &o.lr_decay()},
                       {"weight_decay", &o.weight_decay()},
                       {"initial_accumulator_value", &o.initial_accumulator_value()},
                       {"eps", &o.eps()}};
      });
}

OptimizerKind rowwise_adagrad_kind() {
  return made_of<RowwiseAdagradParamState, RowwiseAdagradOptions>(
      "RowwiseAdagrad", [](auto& s) { return Fields{{{"sum", &s.sum()}}}; },
      [](auto& o) {
        return Options{{"lr", &o.lr()},
                       {"initial_accumulator_value", &o.initial_accumulator_value()},
                       {"eps", &o.eps()}};
      },
      [](const at::Tensor& table) { return detail::row_state(table); });
}

OptimizerKind sparse_adam_kind() {
  return made_of<SparseAdamParamState, SparseAdamOptions>(
      "SparseAdam",
      [](auto& s) {
        return Fields{{{"exp_avg", &s.exp_avg()}, {"exp_avg_sq", &s.exp_avg_sq()}}, &s.step()};
      },
      [](auto& o) {
        return Options{{"lr", &o.lr()},
                       {"beta1", &std::get<0>(o.betas())},
                       {"beta2", &std::get<1>(o.betas())},
                       {"eps", &o.eps()}};
      },
      detail::element_state);
}

OptimizerKind kind_of(const torch::optim::Optimizer& optimizer) {
  namespace optim = torch::optim;
  if (dynamic_cast<const optim::Adam*>(&optimizer))
    return adam_like<optim::AdamParamState, optim::AdamOptions>("Adam");
  if (dynamic_cast<const optim::AdamW*>(&optimizer))
    return adam_like<optim::AdamWParamState, optim::AdamWOptions>("AdamW");
  if (dynamic_cast<const optim::SGD*>(&optimizer)) return sgd_kind();
  if (dynamic_cast<const optim::RMSprop*>(&optimizer)) return rmsprop_kind();
  if (dynamic_cast<const optim::Adagrad*>(&optimizer)) return adagrad_kind();
  if (dynamic_cast<const RowwiseAdagrad*>(&optimizer)) return rowwise_adagrad_kind();
  if (dynamic_cast<const SparseAdam*>(&optimizer)) return sparse_adam_kind();
  throw NotAvailable(
      "the state of this optimizer is not known: Adam, AdamW, SGD, RMSprop, Adagrad, LBFGS, "
      "RowwiseAdagrad and SparseAdam are; add its tensors to the CheckpointState yourself");
}

// Reads what is in `state`, among other things: the model's tensors are in the same checkpoint.
void load_among(const CheckpointReader& saved, CheckpointState& state, LoadOptions options) {
  options.allow_extra = true;
  saved.load(state, options);
}

// ---- LBFGS, whose state is one for all parameters ----

using torch::optim::LBFGSOptions, torch::optim::LBFGSParamState;

const torch::optim::LBFGS* as_lbfgs(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::LBFGS*>(&optimizer);
}

// Over shards its vectors would be in the order of this mesh's ranks, or each rank's own.
void refuse_shards(const std::vector<Named>& parameters, const HandShards& shards) {
  for (const Named& one : parameters)
    if (is_sharded(one.parameter) || shards.contains(one.name))
      throw NotAvailable("the state of LBFGS over '", one.name,
                         "', which is sharded: it is kept for replicated parameters alone");
}

// But max_eval, which may be absent.
Options lbfgs_options(LBFGSOptions& o) {
  return {{"lr", &o.lr()},
          {"max_iter", &o.max_iter()},
          {"tolerance_grad", &o.tolerance_grad()},
          {"tolerance_change", &o.tolerance_change()},
          {"history_size", &o.history_size()}};
}

// The tensors that it keeps, by name.
std::vector<std::pair<std::string, at::Tensor*>> lbfgs_tensors(LBFGSParamState& kept) {
  std::vector<std::pair<std::string, at::Tensor*>> all = {
      {"d", &kept.d()}, {"H_diag", &kept.H_diag()}, {"prev_flat_grad", &kept.prev_flat_grad()}};
  for (std::size_t i = 0; i < kept.ro().size(); ++i) {
    all.emplace_back(concat("old_dirs.", i), &kept.old_dirs()[i]);
    all.emplace_back(concat("old_stps.", i), &kept.old_stps()[i]);
    all.emplace_back(concat("ro.", i), &kept.ro()[i]);
  }
  return all;
}

void add_lbfgs(CheckpointState& state, const std::string& prefix,
               torch::optim::Optimizer& optimizer, const std::vector<Named>& parameters,
               const HandShards& shards) {
  refuse_shards(parameters, shards);
  state.set(prefix + "kind", "LBFGS");
  state.set_integer(prefix + "groups", 1);
  auto& group = static_cast<LBFGSOptions&>(optimizer.param_groups()[0].options());
  for (const auto& [name, value] : values_of(lbfgs_options(group)))
    state.set_real(concat(prefix, "group0.", name), value);
  state.set_real(prefix + "group0.max_eval", static_cast<double>(group.max_eval().value_or(-1)));
  state.set(prefix + "group0.line_search", group.line_search_fn().value_or(""));
  const auto found = optimizer.state().find(parameters.at(0).parameter.unsafeGetTensorImpl());
  state.set_integer(prefix + "begun", found != optimizer.state().end());
  if (found == optimizer.state().end()) return;
  auto& kept = static_cast<LBFGSParamState&>(*found->second);
  state.set_integer(prefix + "func_evals", kept.func_evals());
  state.set_integer(prefix + "n_iter", kept.n_iter());
  state.set_real(prefix + "t", kept.t());
  state.set_real(prefix + "prev_loss", kept.prev_loss());
  state.set_integer(prefix + "history", static_cast<std::int64_t>(kept.ro().size()));
  for (const auto& [name, t] : lbfgs_tensors(kept))
    if (t->defined()) state.add(prefix + name, *t);
}

std::function<void()> read_lbfgs(const CheckpointReader& saved, const std::string& prefix,
                                 torch::optim::Optimizer& optimizer,
                                 const std::vector<Named>& parameters, const HandShards& shards,
                                 const LoadOptions& options) {
  refuse_shards(parameters, shards);
  std::int64_t elements = 0;
  for (const at::Tensor& p : optimizer.param_groups()[0].params()) elements += p.numel();
  CheckpointState state;
  std::map<std::string, at::Tensor> fresh;
  for (const SavedTensor& t : saved.tensors()) {
    if (!t.name.starts_with(prefix)) continue;
    const std::string field = t.name.substr(prefix.size());
    if (!t.shape.empty() && t.shape != std::vector<std::int64_t>{elements})
      throw InvalidArgument("'", t.name, "' of the checkpoint has shape ", list(t.shape),
                            ", but the optimizer has ", elements, " elements");
    fresh[field] = at::zeros(
        t.shape, parameters.at(0).parameter.options().dtype(t.dtype).requires_grad(false));
    state.add(t.name, fresh[field]);
  }
  load_among(saved, state, options);
  LBFGSOptions any;
  Values values = values_of(lbfgs_options(any));
  for (auto& [name, value] : values) value = state.get_real(concat(prefix, "group0.", name));
  const double max_eval = state.get_real(prefix + "group0.max_eval");
  const std::string search = state.get(prefix + "group0.line_search");
  std::shared_ptr<LBFGSParamState> kept;
  if (state.get_integer(prefix + "begun") != 0) {
    kept = std::make_shared<LBFGSParamState>();
    kept->func_evals(state.get_integer(prefix + "func_evals"));
    kept->n_iter(state.get_integer(prefix + "n_iter"));
    kept->t(state.get_real(prefix + "t"));
    kept->prev_loss(state.get_real(prefix + "prev_loss"));
    const auto history = std::max<std::int64_t>(state.get_integer(prefix + "history"), 0);
    for (auto* all : {&kept->old_dirs(), &kept->old_stps(), &kept->ro()})
      all->resize(static_cast<std::size_t>(history));
    for (const auto& [name, t] : lbfgs_tensors(*kept))
      if (const auto found = fresh.find(name); found != fresh.end()) *t = found->second;
  }
  void* const key = parameters.at(0).parameter.unsafeGetTensorImpl();
  return [&optimizer, values, max_eval, search, kept, key] {
    auto& group = static_cast<LBFGSOptions&>(optimizer.param_groups()[0].options());
    set_values(lbfgs_options(group), values);
    if (max_eval >= 0) group.max_eval(static_cast<std::int64_t>(max_eval));
    if (!search.empty()) group.line_search_fn(search);
    optimizer.state().clear();
    if (kept) optimizer.state()[key] = std::make_unique<LBFGSParamState>(*kept);
  };
}

// The options of each group of parameters; none where the groups are others, and may be.
std::vector<Values> read_group_options(const CheckpointState& state, const std::string& prefix,
                                       torch::optim::Optimizer& optimizer,
                                       const OptimizerKind& kind, bool may_differ) {
  auto& groups = optimizer.param_groups();
  const auto count = static_cast<std::int64_t>(groups.size()),
             there = state.get_integer(prefix + "groups");
  std::vector<Values> all;
  for (std::size_t g = 0; there == count && g < groups.size(); ++g) {
    all.push_back(values_of(kind.options(groups[g].options())));
    for (auto& [name, value] : all.back())
      value = state.get_real(concat(prefix, "group", g, '.', name));
  }
  if (there != count && !may_differ)
    throw InvalidArgument("the optimizer '", prefix, "' of the checkpoint has ", there,
                          " parameter groups, this one has ", count,
                          " (LoadOptions::allow_missing leaves their options as they are)");
  return all;
}

void require_kind(const CheckpointReader& saved, const std::string& prefix,
                  const std::string& name) {
  const auto known = saved.value_names();
  if (std::ranges::find(known, prefix + "kind") == known.end())
    throw InvalidArgument("the checkpoint has no optimizer '", prefix, "'");
  if (const std::string there = saved.value(prefix + "kind"); there != name)
    throw InvalidArgument("the optimizer '", prefix, "' of the checkpoint is ", there,
                          ", this one is ", name);
}

}  // namespace

void add_optimizer(CheckpointState& state, const std::string& prefix,
                   torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                   const HandShards& shards) {
  const std::vector<Named> parameters = named_parameters_of(optimizer, module);
  detail::add_parameter_names(state, prefix, parameters);
  if (as_lbfgs(optimizer)) return add_lbfgs(state, prefix, optimizer, parameters, shards);
  const OptimizerKind kind = kind_of(optimizer);
  state.set(prefix + "kind", kind.name);
  const auto& kept = optimizer.state();
  for (const Named& one : parameters) {
    const auto found = kept.find(one.parameter.unsafeGetTensorImpl());
    if (found == kept.end()) continue;
    const Fields fields = kind.fields(*found->second);
    for (const auto& [field, t] : fields.tensors)
      if (t->defined()) state.add(prefix + one.name + "." + field, *t, shards, one.name);
    if (fields.step) state.set_integer(prefix + one.name + ".step", *fields.step);
  }
  state.set_integer(prefix + "groups", static_cast<std::int64_t>(optimizer.param_groups().size()));
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const auto& [name, value] : values_of(kind.options(optimizer.param_groups()[g].options())))
      state.set_real(concat(prefix, "group", g, '.', name), value);
}

void load_optimizer(const CheckpointReader& saved, const std::string& prefix,
                    torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                    const HandShards& shards, const LoadOptions& options) {
  read_optimizer(saved, prefix, optimizer, module, shards, options)();
}

std::function<void()> read_optimizer(const CheckpointReader& saved, const std::string& prefix,
                                     torch::optim::Optimizer& optimizer,
                                     const torch::nn::Module& module, const HandShards& shards,
                                     const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  const std::string name = as_lbfgs(optimizer) ? "LBFGS" : kind_of(optimizer).name;
  require_kind(saved, prefix, name);
  if (!options.allow_missing) detail::check_parameter_names(saved, prefix, optimizer, module);
  const std::vector<Named> parameters = named_parameters_of(optimizer, module);
  if (as_lbfgs(optimizer)) return read_lbfgs(saved, prefix, optimizer, parameters, shards, options);
  const OptimizerKind kind = kind_of(optimizer);
  CheckpointState state;
  std::vector<StatePointer> states;
  std::vector<std::int64_t*> steps;
  std::vector<bool> found(parameters.size(), false);
  auto* const sharded = dynamic_cast<ShardedStates*>(&optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    states.push_back(kind.fresh());
    const Fields fields = kind.fields(*states.back());
    steps.push_back(fields.step);
    for (const auto& [field, t] : fields.tensors) {
      const std::string name = prefix + parameters[i].name + "." + field;
      if (!saved.find(name)) continue;
      const at::Tensor& p = parameters[i].parameter;
      *t = kind.like ? kind.like(p) : at::zeros_like(sharded ? sharded->like(p) : p);
      found[i] = true;
      state.add(name, *t, shards, parameters[i].name);
    }
  }
  load_among(saved, state, options);
  const std::vector<Values> group_options =
      read_group_options(state, prefix, optimizer, kind, options.allow_missing);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::string step = prefix + parameters[i].name + ".step";
    if (steps[i] && state.has(step))
      *steps[i] = state.get_integer(step);
    else if (!found[i])
      states[i].reset();
  }
  // Copied and moved by std::function, though called once.
  const auto ready = std::make_shared<std::vector<StatePointer>>(std::move(states));
  return [&optimizer, kind, parameters, group_options, ready] {
    for (std::size_t g = 0; g < group_options.size(); ++g)
      set_values(kind.options(optimizer.param_groups()[g].options()), group_options[g]);
    auto& kept = optimizer.state();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      void* key = parameters[i].parameter.unsafeGetTensorImpl();
      if ((*ready)[i])
        kept[key] = std::move((*ready)[i]);
      else
        kept.erase(key);
    }
  };
}

}  // namespace tessera
