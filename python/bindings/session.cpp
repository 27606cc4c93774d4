// The training session around modules and optimizers of Python's: Session of C++ itself, with a
// strategy that leaves modules as they are, and optimizers whose steps a function of Python's does.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "modules.h"
#include "precision.h"
#include "tessera/base/text.h"
#include "tessera/gradient/sync.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/session.h"

namespace tessera::python {

namespace {

NamedModules named(const Names& names, const std::vector<ModuleTreePtr>& trees) {
  NamedModules all;
  for (std::size_t i = 0; i < names.size(); ++i) all.push_back({names[i], trees.at(i)->module});
  return all;
}

/// Modules stay as the user made them. The gradients of parameters that nothing reduces are reduced
/// here, unless the program says that it does so.
class PythonStrategy final : public ManagedStrategy {
 public:
  PythonStrategy(Group ranks, c10::Device device, std::optional<Abilities::Gradients> by_program,
                 int sharing, std::vector<OwnedShard> by_hand)
      : ManagedStrategy(here(), std::move(ranks)),
        device_(device),
        by_program_(by_program),
        plain_sharing_(sharing),
        sharing_(sharing),
        by_hand_(std::move(by_hand)) {
    if (sharing < 1 || size() % sharing != 0)
      throw InvalidArgument("Session: ", sharing, " ranks share a loss, of ", size(),
                            " ranks: give a divisor");
  }

  std::string name() const override { return "of the session"; }
  c10::Device root_device() const override { return device_; }
  Abilities abilities() const override {
    Abilities can;
    can.moves_modules = false;
    can.gradients = by_program_.value_or(Abilities::Gradients::averaged);
    can.reduces_modules_alone = !by_program_;
    return can;
  }
  std::vector<OwnedShard> by_hand() const override { return by_hand_; }
  int loss_sharing() const override { return sharing_; }

  void setup(const NamedModules& modules) override {
    Strategy::setup(modules);
    wrap();
  }

  /// Where a step begins, too: layers are unfrozen between two steps, and another session of the
  /// same modules takes its reducers with it. Collective where something has come to be reduced.
  void wrap() {
    if (by_program_ || size() == 1) return;
    const auto all = std::make_shared<torch::nn::Module>();
    for (const NamedModule& m : modules()) all->register_module(m.name, m.module);
    const auto alone = [](const at::Tensor& p) {
      return p.requires_grad() && !is_sharded(p) && gradient_syncs({p}).empty();
    };
    if (wrapped_ && std::ranges::none_of(all->parameters(), alone)) return;
    // The ranks have the same values by then: what is written is there already, and a forward that
    // came before goes on.
    std::optional<at::AutoDispatchBelowADInplaceOrView> unseen;
    if (std::exchange(wrapped_, true)) unseen.emplace();
    reduced_.reset();
    DistributedDataParallelOptions options;
    // Between steps: those of a step that is not complete are no state.
    options.broadcast_buffers = false;
    bool any = false;
    for (const auto& item : all->named_parameters(/*recurse=*/true)) {
      const at::Tensor& p = item.value();
      if (is_sharded(p) || !gradient_syncs({p}).empty())
        options.ignore.push_back(item.key());
      else
        any = any || p.requires_grad();
    }
    for (const auto& item : all->named_buffers(/*recurse=*/true))
      if (!any || is_sharded(item.value())) options.ignore.push_back(item.key());
    reduced_.emplace(all, world(), options);
  }
  void teardown() override {
    reduced_.reset();
    Strategy::teardown();
  }
  void before_forward(bool synchronised) override {
    if (reduced_ && synchronised) reduced_->before_forward();
  }
  void share_buffers() override {
    if (reduced_) reduced_->broadcast_buffers();
  }

  /// How many ranks have this loss: those of its mesh, or those that the user says. `parameters`:
  /// what those ranks alone reduce, of several losses, each of these groups would train apart.
  void shared_by(const at::Tensor& loss, bool first, const Tensors& parameters) {
    const std::vector<int> ranks =
        is_sharded(loss) ? spec(loss).mesh().all().ranks() : std::vector<int>();
    const int now = ranks.empty() ? plain_sharing_ : static_cast<int>(ranks.size());
    if (first) require_within(ranks, parameters);
    if (!first && now != sharing_)
      throw InvalidArgument("Session: losses of one step are shared by ", sharing_, " and by ", now,
                            " ranks: take those of one mesh, or plain ones");
    sharing_ = now;
    if (!first || ranks.empty() || now == size()) return;
    const auto among = [&](int rank) { return std::ranges::find(ranks, rank) != ranks.end(); };
    for (const at::Tensor& p : parameters) {
      const auto sum = p.requires_grad() ? gradient_sum(p) : std::nullopt;
      if (sum && sum->reducers > 0 && !sum->ranks.empty() && std::ranges::all_of(sum->ranks, among))
        throw GradientError("Session: a parameter (shape ", p.sizes(), ") is reduced over ranks ",
                            list(sum->ranks), " alone, which share one loss, and the session has ",
                            size(),
                            " ranks: wrap the module in DistributedDataParallel over the "
                            "group along the other axes of the mesh");
    }
  }

 private:
  /// A session of some ranks neither waits for others nor takes gradients that they have part in.
  void require_within(const std::vector<int>& of_loss, const Tensors& parameters) const {
    const std::vector<int>& mine = world().ranks();
    if (size() == manager()->world_size()) return;
    const auto outside = [&](const std::vector<int>& ranks) {
      return std::ranges::any_of(
          ranks, [&](int rank) { return std::ranges::find(mine, rank) == mine.end(); });
    };
    const auto refuse = [&](const std::string& what, const std::vector<int>& ranks) {
      throw InvalidArgument("Session: ", what, " ranks ", list(ranks),
                            ", and the session is of ranks ", list(mine),
                            ": give both the same group, or the mesh of the sharded tensors "
                            "as the session's group");
    };
    if (outside(of_loss)) refuse("the loss is sharded over", of_loss);
    for (const at::Tensor& p : parameters) {
      const auto sum = p.requires_grad() ? gradient_sum(p) : std::nullopt;
      if (sum && outside(sum->ranks))
        refuse(concat("a parameter (shape ", p.sizes(), ") is reduced over"), sum->ranks);
    }
  }

  c10::Device device_;
  std::optional<Abilities::Gradients> by_program_;
  int plain_sharing_, sharing_;
  bool wrapped_ = false;
  std::vector<OwnedShard> by_hand_;
  std::optional<detail::DataParallelEngine> reduced_;
};

SessionOptions session_options(const std::string& precision,
                               const std::vector<std::tuple<std::string, double>>& numbers,
                               bool measure_norm, const std::string& non_finite, bool signals) {
  SessionOptions options;
  options.measure_norm = measure_norm;
  options.signals = signals;
  if (precision == "bfloat16") options.precision = Precision::bfloat16_mixed;
  if (precision == "float16") options.precision = Precision::float16_mixed;
  if (non_finite == "skip")
    options.non_finite = NonFinite::skip;
  else if (non_finite == "step")
    options.non_finite = NonFinite::step;
  else if (non_finite != "error")
    throw InvalidArgument("non_finite is 'error', 'skip' or 'step', not '", non_finite, "'");
  for (const auto& [name, number] : numbers) {
    if (name == "max_norm")
      options.clip.max_norm = number;
    else if (name == "norm_type")
      options.clip.norm_type = number;
    else if (name == "clip_value")
      options.clip_value = number;
    else if (name == "initial")
      options.scaler.initial = number;
    else if (name == "growth")
      options.scaler.growth = number;
    else if (name == "backoff")
      options.scaler.backoff = number;
    else if (name == "interval")
      options.scaler.interval = static_cast<int>(std::clamp(number, 0.0, 1e9));
    else if (name == "smallest")
      options.scaler.smallest = number;
    else
      throw InvalidArgument("a scaler has no '", name,
                            "': initial, growth, backoff, interval and smallest");
  }
  return options;
}

std::optional<Abilities::Gradients> by_program(const std::string& how) {
  if (how.empty()) return std::nullopt;
  if (how == "averaged") return Abilities::Gradients::averaged;
  if (how == "summed") return Abilities::Gradients::summed;
  throw InvalidArgument("gradients come together 'averaged' or 'summed', not '", how, "'");
}

/// Loss, weight, norm, stepped, stop ("" for none), save.
using Result = std::tuple<double, double, double, bool, std::string, bool>;

std::string text_of(Stop stop) { return stop == Stop::none ? "" : to_string(stop); }

struct PySession : torch::CustomClassHolder {
  PySession(const GroupPtr& ranks, const Names& names, const std::vector<ModuleTreePtr>& trees,
            const std::string& device, const std::string& gradients, std::int64_t sharing,
            const Tensors& by_hand, const std::vector<GroupPtr>& owners,
            const std::string& precision, std::int64_t function, std::int64_t hooks,
            const std::vector<std::tuple<std::string, double>>& numbers, bool measure_norm,
            const std::string& non_finite, bool signals) {
    std::vector<OwnedShard> shards;
    for (std::size_t i = 0; i < by_hand.size(); ++i)
      shards.push_back({by_hand[i], owners.at(i)->group});
    auto options = session_options(precision, numbers, measure_norm, non_finite, signals);
    strategy = std::make_shared<PythonStrategy>(
        ranks->group, c10::Device(device), by_program(gradients),
        static_cast<int>(std::clamp<std::int64_t>(sharing, 0, INT32_MAX)), std::move(shards));
    if (function != 0)
      options.precision = std::make_shared<PythonPrecision>(
          precision,
          reinterpret_cast<PythonFunction>(function),  // NOLINT(performance-no-int-to-ptr)
          hooks, strategy);
    session = std::make_unique<Session>(strategy, named(names, trees), options);
  }
  Session& open() {
    if (!session) throw InvalidArgument("the session is closed");
    return *session;
  }
  std::int64_t add(std::int64_t step) {
    const auto number = static_cast<std::int64_t>(optimizers.size());
    optimizers.push_back(std::make_shared<PythonOptimizer>(python_step(step), number));
    return static_cast<std::int64_t>(open().add(optimizers.back()));
  }
  void backward(const at::Tensor& loss, double weight, bool last) {
    Tensors parameters;
    for (const auto& optimizer : optimizers)
      for (const auto& group : optimizer->param_groups())
        parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    if (fresh) strategy->wrap();
    // What throws ends the step.
    strategy->shared_by(loss, std::exchange(fresh, true), parameters);
    open().backward(loss, weight, last);
    fresh = false;
  }
  static Result result(const StepResult& r) {
    return {r.loss, r.weight, r.norm, r.stepped, text_of(r.stop), r.save};
  }
  Result step(const Numbers& which) {
    fresh = true;
    return result(open().step({which.begin(), which.end()}));
  }
  Result step_again(std::int64_t micro_batches, std::int64_t number) {
    const auto evaluate = [&] {
      fresh = true;
      if (python_step(micro_batches)(number) != 0) throw Error("an evaluation has failed");
    };
    const StepResult done = open().step_again(evaluate, static_cast<std::size_t>(number));
    fresh = true;
    return result(done);
  }

  std::shared_ptr<PythonStrategy> strategy;
  std::vector<std::shared_ptr<PythonOptimizer>> optimizers;
  std::unique_ptr<Session> session;
  /// No loss of this step yet.
  bool fresh = true;
  std::vector<std::shared_ptr<void>> scopes;
};
using SessionPtr = c10::intrusive_ptr<PySession>;

}  // namespace

void register_session(Library& library) {
  library.class_<PySession>("Session")
      .def(torch::init<const GroupPtr&, const Names&, const std::vector<ModuleTreePtr>&,
                       const std::string&, const std::string&, std::int64_t, const Tensors&,
                       const std::vector<GroupPtr>&, const std::string&, std::int64_t, std::int64_t,
                       const std::vector<std::tuple<std::string, double>>&, bool,
                       const std::string&, bool>())
      .def("add", [](const SessionPtr& self, std::int64_t step) { return self->add(step); })
      .def("take",
           [](const SessionPtr& self, std::int64_t number, const Tensors& parameters) {
             self->optimizers.at(static_cast<std::size_t>(number))->take(parameters);
           })
      .def("before_forward",
           [](const SessionPtr& self, bool last) {
             self->open();
             if (self->fresh) self->strategy->wrap();
             self->strategy->before_forward(last);
           })
      .def("enter",
           [](const SessionPtr& self) { self->scopes.push_back(self->open().forward_scope()); })
      .def("leave", [](const SessionPtr& self) { self->scopes.pop_back(); })
      .def("backward", [](const SessionPtr& self, const at::Tensor& loss, double weight,
                          bool last) { self->backward(loss, weight, last); })
      .def("step", [](const SessionPtr& self, const Numbers& which) { return self->step(which); })
      .def("step_again",
           [](const SessionPtr& self, std::int64_t micro_batches, std::int64_t number) {
             return self->step_again(micro_batches, number);
           })
      .def("evaluate",
           [](const SessionPtr& self, std::int64_t number) {
             return self->optimizers.at(static_cast<std::size_t>(number))->evaluate();
           })
      .def(
          "clip",
          [](const SessionPtr& self, const Tensors& parameters, double max_norm, double norm_type) {
            return self->open().strategy().clip(parameters, {max_norm, norm_type});
          })
      .def("request_save", [](const SessionPtr& self) { self->open().request_save(); })
      .def("request_stop",
           [](const SessionPtr& self) { self->open().request_stop(Stop::requested); })
      .def("wanted", [](const SessionPtr& self) { return text_of(self->open().wanted()); })
      .def("vote", [](const SessionPtr& self) { return text_of(self->open().vote()); })
      .def("steps", [](const SessionPtr& self) { return self->open().steps(); })
      .def("loss_scale", [](const SessionPtr& self) { return self->open().loss_scale(); })
      .def("add_counters",
           [](const SessionPtr& self, const StatePtr& state, const std::string& prefix) {
             self->open().add_counters(state->state, prefix);
           })
      .def("restore_counters",
           [](const SessionPtr& self, const StatePtr& state, std::int64_t saved_ranks,
              const std::string& prefix) {
             self->open().restore_counters(state->state, static_cast<int>(saved_ranks), prefix);
           })
      .def("close", [](const SessionPtr& self) { self->session.reset(); });
}

}  // namespace tessera::python
