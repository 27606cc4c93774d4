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
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/optimizer_parameters.h"
#include "tessera/nn/sharded_optimizer.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace {

using detail::named_parameters_of;
using Named = detail::NamedParameter;
using StatePointer = std::unique_ptr<torch::optim::OptimizerParamState>;

// What an optimizer keeps for a parameter, by name.
struct Fields {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::optional<std::int64_t> step;
};

// One kind of optimizer: its tensors by name, its step, its options by name.
struct OptimizerKind {
  std::string name;
  std::vector<std::string> tensors;
  bool has_step;
  std::function<Fields(const torch::optim::OptimizerParamState&)> fields;
  // From tensors by name and the step.
  std::function<StatePointer(const std::map<std::string, at::Tensor>&, std::int64_t)> make;
  std::function<std::map<std::string, double>(const torch::optim::OptimizerOptions&)> options;
  std::function<void(torch::optim::OptimizerOptions&, const std::map<std::string, double>&)>
      set_options;
};

at::Tensor tensor_or_none(const std::map<std::string, at::Tensor>& all, const char* name) {
  const auto found = all.find(name);
  return found == all.end() ? at::Tensor() : found->second;
}

template <class State, class Options>
OptimizerKind adam_like(const char* name) {
  return {name,
          {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
          true,
          [](const torch::optim::OptimizerParamState& s) {
            const auto& state = static_cast<const State&>(s);
            return Fields{{{"exp_avg", state.exp_avg()},
                           {"exp_avg_sq", state.exp_avg_sq()},
                           {"max_exp_avg_sq", state.max_exp_avg_sq()}},
                          state.step()};
          },
          [](const std::map<std::string, at::Tensor>& all, std::int64_t step) -> StatePointer {
            auto state = std::make_unique<State>();
            state->step(step);
            state->exp_avg(tensor_or_none(all, "exp_avg"));
            state->exp_avg_sq(tensor_or_none(all, "exp_avg_sq"));
            state->max_exp_avg_sq(tensor_or_none(all, "max_exp_avg_sq"));
            return state;
          },
          [](const torch::optim::OptimizerOptions& o) {
            const auto& options = static_cast<const Options&>(o);
            return std::map<std::string, double>{{"lr", options.lr()},
                                                 {"beta1", std::get<0>(options.betas())},
                                                 {"beta2", std::get<1>(options.betas())},
                                                 {"eps", options.eps()},
                                                 {"weight_decay", options.weight_decay()},
                                                 {"amsgrad", options.amsgrad() ? 1.0 : 0.0}};
          },
          [](torch::optim::OptimizerOptions& o, const std::map<std::string, double>& v) {
            auto& options = static_cast<Options&>(o);
            options.lr(v.at("lr"));
            options.betas(std::make_tuple(v.at("beta1"), v.at("beta2")));
            options.eps(v.at("eps"));
            options.weight_decay(v.at("weight_decay"));
            options.amsgrad(v.at("amsgrad") != 0);
          }};
}

OptimizerKind sgd_kind() {
  using torch::optim::SGDOptions, torch::optim::SGDParamState;
  return {"SGD",
          {"momentum_buffer"},
          false,
          [](const torch::optim::OptimizerParamState& s) {
            return Fields{
                {{"momentum_buffer", static_cast<const SGDParamState&>(s).momentum_buffer()}},
                std::nullopt};
          },
          [](const std::map<std::string, at::Tensor>& all, std::int64_t) -> StatePointer {
            auto state = std::make_unique<SGDParamState>();
            state->momentum_buffer(tensor_or_none(all, "momentum_buffer"));
            return state;
          },
          [](const torch::optim::OptimizerOptions& o) {
            const auto& options = static_cast<const SGDOptions&>(o);
            return std::map<std::string, double>{{"lr", options.lr()},
                                                 {"momentum", options.momentum()},
                                                 {"dampening", options.dampening()},
                                                 {"weight_decay", options.weight_decay()},
                                                 {"nesterov", options.nesterov() ? 1.0 : 0.0}};
          },
          [](torch::optim::OptimizerOptions& o, const std::map<std::string, double>& v) {
            auto& options = static_cast<SGDOptions&>(o);
            options.lr(v.at("lr"));
            options.momentum(v.at("momentum"));
            options.dampening(v.at("dampening"));
            options.weight_decay(v.at("weight_decay"));
            options.nesterov(v.at("nesterov") != 0);
          }};
}

OptimizerKind rmsprop_kind() {
  using torch::optim::RMSpropOptions, torch::optim::RMSpropParamState;
  return {"RMSprop",
          {"square_avg", "momentum_buffer", "grad_avg"},
          true,
          [](const torch::optim::OptimizerParamState& s) {
            const auto& state = static_cast<const RMSpropParamState&>(s);
            return Fields{{{"square_avg", state.square_avg()},
                           {"momentum_buffer", state.momentum_buffer()},
                           {"grad_avg", state.grad_avg()}},
                          state.step()};
          },
          [](const std::map<std::string, at::Tensor>& all, std::int64_t step) -> StatePointer {
            auto state = std::make_unique<RMSpropParamState>();
            state->step(step);
            state->square_avg(tensor_or_none(all, "square_avg"));
            state->momentum_buffer(tensor_or_none(all, "momentum_buffer"));
            state->grad_avg(tensor_or_none(all, "grad_avg"));
            return state;
          },
          [](const torch::optim::OptimizerOptions& o) {
            const auto& options = static_cast<const RMSpropOptions&>(o);
            return std::map<std::string, double>{{"lr", options.lr()},
                                                 {"alpha", options.alpha()},
                                                 {"eps", options.eps()},
                                                 {"weight_decay", options.weight_decay()},
                                                 {"momentum", options.momentum()},
                                                 {"centered", options.centered() ? 1.0 : 0.0}};
          },
          [](torch::optim::OptimizerOptions& o, const std::map<std::string, double>& v) {
            auto& options = static_cast<RMSpropOptions&>(o);
            options.lr(v.at("lr"));
            options.alpha(v.at("alpha"));
            options.eps(v.at("eps"));
            options.weight_decay(v.at("weight_decay"));
            options.momentum(v.at("momentum"));
            options.centered(v.at("centered") != 0);
          }};
}

OptimizerKind adagrad_kind() {
  using torch::optim::AdagradOptions, torch::optim::AdagradParamState;
  return {"Adagrad",
          {"sum"},
          true,
          [](const torch::optim::OptimizerParamState& s) {
            const auto& state = static_cast<const AdagradParamState&>(s);
            return Fields{{{"sum", state.sum()}}, state.step()};
          },
          [](const std::map<std::string, at::Tensor>& all, std::int64_t step) -> StatePointer {
            auto state = std::make_unique<AdagradParamState>();
            state->step(step);
            state->sum(tensor_or_none(all, "sum"));
            return state;
          },
          [](const torch::optim::OptimizerOptions& o) {
            const auto& options = static_cast<const AdagradOptions&>(o);
            return std::map<std::string, double>{
                {"lr", options.lr()},
                {"lr_decay", options.lr_decay()},
                {"weight_decay", options.weight_decay()},
                {"initial_accumulator_value", options.initial_accumulator_value()},
                {"eps", options.eps()}};
          },
          [](torch::optim::OptimizerOptions& o, const std::map<std::string, double>& v) {
            auto& options = static_cast<AdagradOptions&>(o);
            options.lr(v.at("lr"));
            options.lr_decay(v.at("lr_decay"));
            options.weight_decay(v.at("weight_decay"));
            options.initial_accumulator_value(v.at("initial_accumulator_value"));
            options.eps(v.at("eps"));
          }};
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
  throw NotAvailable(
      "the state of this optimizer is not known: Adam, AdamW, SGD, RMSprop, Adagrad and LBFGS are; "
      "add its tensors to the CheckpointState yourself");
}

void add_tensor(CheckpointState& state, const std::string& name, const at::Tensor& t,
                const std::string& parameter, const HandShards& shards) {
  const auto shard = shards.find(parameter);
  if (shard == shards.end())
    state.add(name, t);
  else
    state.add(name, t, shard->second);
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
      throw NotAvailable(concat("the state of LBFGS over '", one.name,
                                "', which is sharded: it is kept for replicated parameters alone"));
}

std::map<std::string, double> lbfgs_options(const LBFGSOptions& options) {
  return {{"lr", options.lr()},
          {"max_iter", static_cast<double>(options.max_iter())},
          {"max_eval", static_cast<double>(options.max_eval().value_or(-1))},
          {"tolerance_grad", options.tolerance_grad()},
          {"tolerance_change", options.tolerance_change()},
          {"history_size", static_cast<double>(options.history_size())}};
}

void add_lbfgs(CheckpointState& state, const std::string& prefix,
               torch::optim::Optimizer& optimizer, const std::vector<Named>& parameters,
               const HandShards& shards) {
  refuse_shards(parameters, shards);
  state.set(prefix + "kind", "LBFGS");
  state.set_integer(prefix + "groups", 1);
  const auto& group = static_cast<const LBFGSOptions&>(optimizer.param_groups()[0].options());
  for (const auto& [name, value] : lbfgs_options(group))
    state.set_real(prefix + "group0." + name, value);
  state.set(prefix + "group0.line_search", group.line_search_fn().value_or(""));
  const auto found = optimizer.state().find(parameters.at(0).parameter.unsafeGetTensorImpl());
  state.set_integer(prefix + "begun", found != optimizer.state().end());
  if (found == optimizer.state().end()) return;
  const auto& kept = static_cast<const LBFGSParamState&>(*found->second);
  state.set_integer(prefix + "func_evals", kept.func_evals());
  state.set_integer(prefix + "n_iter", kept.n_iter());
  state.set_real(prefix + "t", kept.t());
  state.set_real(prefix + "prev_loss", kept.prev_loss());
  const auto add = [&](const std::string& name, const at::Tensor& t) {
    if (t.defined()) state.add(prefix + name, t);
  };
  add("d", kept.d());
  add("H_diag", kept.H_diag());
  add("prev_flat_grad", kept.prev_flat_grad());
  state.set_integer(prefix + "history", static_cast<std::int64_t>(kept.ro().size()));
  for (std::size_t i = 0; i < kept.ro().size(); ++i) {
    add(concat("old_dirs.", i), kept.old_dirs()[i]);
    add(concat("old_stps.", i), kept.old_stps()[i]);
    add(concat("ro.", i), kept.ro()[i]);
  }
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
      throw InvalidArgument(concat("'", t.name, "' of the checkpoint has shape ", list(t.shape),
                                   ", but the optimizer has ", elements, " elements"));
    fresh[field] = at::zeros(
        t.shape, parameters.at(0).parameter.options().dtype(t.dtype).requires_grad(false));
    state.add(t.name, fresh[field]);
  }
  LoadOptions lenient = options;
  lenient.allow_extra = true;
  saved.load(state, lenient);
  auto values = lbfgs_options(LBFGSOptions());
  for (auto& [name, value] : values) value = state.get_real(prefix + "group0." + name);
  const std::string search = state.get(prefix + "group0.line_search");
  std::shared_ptr<LBFGSParamState> kept;
  if (state.get_integer(prefix + "begun") != 0) {
    kept = std::make_shared<LBFGSParamState>();
    kept->func_evals(state.get_integer(prefix + "func_evals"));
    kept->n_iter(state.get_integer(prefix + "n_iter"));
    kept->t(state.get_real(prefix + "t"));
    kept->prev_loss(state.get_real(prefix + "prev_loss"));
    const auto take = [&](const std::string& name) {
      const auto found = fresh.find(name);
      return found == fresh.end() ? at::Tensor() : found->second;
    };
    kept->d(take("d"));
    kept->H_diag(take("H_diag"));
    kept->prev_flat_grad(take("prev_flat_grad"));
    const std::int64_t history = state.get_integer(prefix + "history");
    for (std::int64_t i = 0; i < history; ++i) {
      kept->old_dirs().push_back(take(concat("old_dirs.", i)));
      kept->old_stps().push_back(take(concat("old_stps.", i)));
      kept->ro().push_back(take(concat("ro.", i)));
    }
  }
  void* const key = parameters.at(0).parameter.unsafeGetTensorImpl();
  return [&optimizer, values, search, kept, key] {
    auto& group = static_cast<LBFGSOptions&>(optimizer.param_groups()[0].options());
    group.lr(values.at("lr"));
    group.max_iter(static_cast<std::int64_t>(values.at("max_iter")));
    if (values.at("max_eval") >= 0)
      group.max_eval(static_cast<std::int64_t>(values.at("max_eval")));
    group.tolerance_grad(values.at("tolerance_grad"));
    group.tolerance_change(values.at("tolerance_change"));
    group.history_size(static_cast<std::int64_t>(values.at("history_size")));
    if (!search.empty()) group.line_search_fn(search);
    optimizer.state().clear();
    if (kept) optimizer.state()[key] = std::make_unique<LBFGSParamState>(*kept);
  };
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
      if (t.defined()) add_tensor(state, prefix + one.name + "." + field, t, one.name, shards);
    if (fields.step) state.set_integer(prefix + one.name + ".step", *fields.step);
  }
  state.set_integer(prefix + "groups", static_cast<std::int64_t>(optimizer.param_groups().size()));
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const auto& [name, value] : kind.options(optimizer.param_groups()[g].options()))
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
  const auto known = saved.value_names();
  if (std::find(known.begin(), known.end(), prefix + "kind") == known.end())
    throw InvalidArgument(concat("the checkpoint has no optimizer '", prefix, "'"));
  if (const std::string there = saved.value(prefix + "kind"); there != name)
    throw InvalidArgument(concat("the optimizer '", prefix, "' of the checkpoint is ", there,
                                 ", this one is ", name));
  if (!options.allow_missing) detail::check_parameter_names(saved, prefix, optimizer, module);
  const std::vector<Named> parameters = named_parameters_of(optimizer, module);
  if (as_lbfgs(optimizer)) return read_lbfgs(saved, prefix, optimizer, parameters, shards, options);
  const OptimizerKind kind = kind_of(optimizer);
  CheckpointState state;
  std::vector<std::map<std::string, at::Tensor>> fresh(parameters.size());
  auto* const sharded = dynamic_cast<ShardedStates*>(&optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (const std::string& field : kind.tensors) {
      const std::string name = prefix + parameters[i].name + "." + field;
      if (!saved.find(name)) continue;
      const at::Tensor& p = parameters[i].parameter;
      const at::Tensor t = at::zeros_like(sharded ? sharded->like(p) : p);
      fresh[i][field] = t;
      add_tensor(state, name, t, parameters[i].name, shards);
    }
  }
  LoadOptions lenient = options;
  // The model's tensors are in the same checkpoint.
  lenient.allow_extra = true;
  saved.load(state, lenient);
  const auto groups = static_cast<std::int64_t>(optimizer.param_groups().size());
  const bool same_groups = state.get_integer(prefix + "groups") == groups;
  if (!same_groups && !options.allow_missing)
    throw InvalidArgument(concat("the optimizer '", prefix, "' of the checkpoint has ",
                                 state.get_integer(prefix + "groups"),
                                 " parameter groups, this one has ", groups,
                                 " (LoadOptions::allow_missing leaves their options as they are)"));
  std::vector<std::map<std::string, double>> group_options;
  if (same_groups)
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
      auto values = kind.options(optimizer.param_groups()[g].options());
      for (auto& [name, value] : values)
        value = state.get_real(concat(prefix, "group", g, '.', name));
      group_options.push_back(std::move(values));
    }
  std::vector<StatePointer> states;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::string step = prefix + parameters[i].name + ".step";
    const bool there = !fresh[i].empty() || (kind.has_step && state.has(step));
    states.push_back(
        there ? kind.make(fresh[i], kind.has_step && state.has(step) ? state.get_integer(step) : 0)
              : nullptr);
  }
  // Copied and moved by std::function, though called once.
  const auto ready = std::make_shared<std::vector<StatePointer>>(std::move(states));
  return [&optimizer, kind, parameters, group_options, ready] {
    for (std::size_t g = 0; g < group_options.size(); ++g)
      kind.set_options(optimizer.param_groups()[g].options(), group_options[g]);
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
