#include "tessera/nn/detail/tape.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/host_lock.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {

namespace {

// The recording of this thread's innermost scope.
thread_local Tape* recording = nullptr;

// Deferred tensors carry the key themselves: what is done with them is recorded after the scope,
// too.
struct Keys : c10::TensorImpl {
  static void set(c10::TensorImpl& impl, c10::DispatchKeySet keys) {
    impl.*(&Keys::key_set_) = keys;
  }
};

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& why) {
  throw NotAvailable("deferred construction: ", op.schema().name(), " ", why);
}

// `value` with the tensors that `keep` gives for its own and their places in a list (-1: in none).
template <class Keep>
c10::IValue with_tensors(const c10::IValue& value, const Keep& keep) {
  if (value.isTensor()) return keep(value.toTensor(), -1);
  if (value.isTensorList()) {
    std::vector<at::Tensor> list = value.toTensorVector();
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = keep(list[i], static_cast<int>(i));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    int i = 0;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional(keep(*t, i)) : t), ++i;
    return list;
  }
  return value;
}

// Calls `take` with each defined tensor of a value and its place.
template <class Take>
void each_tensor(const c10::IValue& value, const Take& take) {
  with_tensors(value, [&](const at::Tensor& t, int element) {
    if (t.defined()) take(t, element);
    return t;
  });
}

}  // namespace

const Recorded* recorded(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.is_meta()) return nullptr;
  return dynamic_cast<const Recorded*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

void fill_in(const at::Tensor& deferred, const at::Tensor& made) {
  // set_data() takes no tensor of another kind of device; nothing has looked at this one's yet.
  deferred.unsafeGetTensorImpl()->shallow_copy_from(made.getIntrusivePtr());
}

void mark(const at::Tensor& meta, std::shared_ptr<Tape> tape, std::size_t value) {
  c10::TensorImpl& impl = *meta.unsafeGetTensorImpl();
  impl.set_backend_meta(c10::make_intrusive<Recorded>(std::move(tape), value));
  Keys::set(impl, impl.key_set().add(Tape::kKey));
}

void unmark(const at::Tensor& meta) {
  c10::TensorImpl& impl = *meta.unsafeGetTensorImpl();
  impl.set_backend_meta(nullptr);
  Keys::set(impl, impl.key_set().remove(Tape::kKey));
}

Recording::Recording(std::shared_ptr<Tape> tape)
    : tape_(std::move(tape)), before_(std::exchange(recording, tape_.get())) {}
Recording::~Recording() { recording = before_; }

void require_no_scope(const std::string& who) {
  if (recording)
    throw InvalidArgument(who,
                          ": inside a DeferredScope nothing has values: end the scope "
                          "first, or make the module in deferred() alone");
}

void Tape::ensure_registered() {
  static const auto library = [] {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey))
      throw NotAvailable(
          "another library in this process has registered a fallback for the dispatch key "
          "DeferredInit, which deferred construction needs: load only one of them");
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kKey, __FILE__,
                                                 static_cast<std::uint32_t>(__LINE__));
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&Tape::fallback>());
    return made;
  }();
}

void Tape::fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // The library's own calls (placing, filling in) take deferred tensors as they are.
  if (op.schema().getNamespace() == "tessera") {
    const c10::impl::ExcludeDispatchKeyGuard rest(kKey);
    return op.callBoxed(stack);
  }
  std::shared_ptr<Tape> tape = recording ? recording->shared_from_this() : nullptr;
  for (std::size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const at::Tensor& t, int) {
      if (const Recorded* is = recorded(t)) tape = is->tape;
    });
  if (tape) return raising([&] { tape->call(op, stack); });
  const c10::impl::ExcludeDispatchKeyGuard rest(kKey);
  op.callBoxed(stack);
}

// What makes a tensor out of no other one, on the default device.
bool Tape::makes_deferred(const Step& step) const {
  if (!step.device) return false;
  const auto& returns = step.op.schema().returns();
  if (returns.size() != 1 || returns[0].type()->kind() != c10::TypeKind::TensorType) return false;
  for (const c10::IValue& argument : step.arguments) {
    bool tensors = false;
    each_tensor(argument, [&](const at::Tensor&, int) { tensors = true; });
    if (tensors) return false;
  }
  const c10::IValue& device = step.arguments[*step.device];
  return device.isNone() || (host_too_ && device.toDevice().is_cpu());
}

void Tape::take_arguments(Step& step, const torch::jit::Stack& stack, std::size_t first) {
  const auto& arguments = step.op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& given = stack[first + i];
    if (arguments[i].name() == "device") step.device = i;
    each_tensor(given, [&](const at::Tensor& t, int element) {
      const Recorded* is = recorded(t);
      if (!is) return;
      if (is->tape.get() != this)
        refuse(step.op, "takes tensors of two scopes: make what belongs together in one");
      step.uses.push_back({i, element, is->value});
    });
    step.arguments.push_back(with_tensors(
        given, [](const at::Tensor& t, int) { return recorded(t) ? at::Tensor() : t; }));
  }
}

std::size_t Tape::add_value(const at::Tensor& tensor, const std::vector<at::Tensor>& inputs) {
  std::optional<std::size_t> memory;
  for (const at::Tensor& input : inputs) {
    const Recorded* is = recorded(input);
    if (tensor.is_same(input)) return is->value;
    if (tensor.has_storage() && tensor.storage().is_alias_of(input.storage()))
      memory = values_[is->value].memory;
  }
  values_.push_back({memory ? *memory : memories_++, tensor.sizes().vec(), tensor.scalar_type()});
  mark(tensor, shared_from_this(), values_.size() - 1);
  return values_.size() - 1;
}

void Tape::take_results(Step& step, const torch::jit::Stack& stack, std::size_t first,
                        const std::vector<at::Tensor>& inputs) {
  for (std::size_t i = first; i < stack.size(); ++i) {
    each_tensor(stack[i], [&](const at::Tensor& t, int) {
      if (!t.is_meta()) refuse(step.op, concat("makes a tensor on ", t.device()));
      step.results.push_back(add_value(t, inputs));
      step.touched.push_back(values_[step.results.back()].memory);
    });
  }
  const auto& arguments = step.op.schema().arguments();
  for (const Use& use : step.uses) {
    const auto* alias = arguments[use.argument].alias_info();
    if (alias && alias->isWrite()) step.touched.push_back(values_[use.value].memory);
  }
}

void Tape::call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t first = stack->size() - op.schema().arguments().size();
  Step step{op, {}, {}, {}, {}, {}, {}};
  take_arguments(step, *stack, first);
  const bool concerns = !step.uses.empty() || (recording == this && makes_deferred(step));
  const c10::impl::ExcludeDispatchKeyGuard rest(kKey);
  if (!concerns) return op.callBoxed(stack);
  if (is_random(op)) {
    for (const c10::IValue& argument : step.arguments)
      if (argument.isGenerator())
        refuse(op,
               "has a generator of its own: leave it out, so that its numbers do not depend on "
               "placements");
    if (step.uses.empty() && op.schema().name() != "aten::rand" &&
        op.schema().name() != "aten::randn")
      refuse(op,
             "makes random numbers that cannot be drawn shard by shard: fill a tensor in place");
  }
  std::vector<at::Tensor> inputs;
  for (std::size_t i = first; i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const at::Tensor& t, int) {
      if (recorded(t)) inputs.push_back(t);
    });
  if (step.device) {
    c10::IValue& device = (*stack)[first + *step.device];
    if (step.uses.empty() || !device.isNone()) device = c10::Device(c10::kMeta);
  }
  try {
    op.callBoxed(stack);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    // Its first line: the others are libtorch's own frames.
    const std::string said = e.what();
    refuse(op,
           concat("of ", described(step), " cannot be deferred: ", said.substr(0, said.find('\n')),
                  ". What takes values is to come after the module is placed (or after "
                  "materialize())"));
  }
  require_no_graph(step, *stack, first);
  const std::lock_guard lock(mutex_);
  take_results(step, *stack, first, inputs);
  if (step.touched.empty()) return;
  if (is_random(op)) step.draw = draws_++;
  steps_.push_back(std::move(step));
}

std::string Tape::described(const Step& step) const {
  const std::lock_guard lock(mutex_);
  if (step.uses.empty()) return "deferred tensors";
  const Value& value = values_[step.uses.front().value];
  return value.name.empty() ? concat("a deferred tensor of shape ", list(value.shape))
                            : concat("'", value.name, "', which is deferred,");
}

// A forward pass, which would be recorded to no end: initialisation makes no graph.
void Tape::require_no_graph(const Step& step, const torch::jit::Stack& stack,
                            std::size_t first) const {
  if (recording || step.op.schema().name() == "aten::clone") return;
  bool graph = false;
  for (std::size_t i = first; i < stack.size(); ++i)
    each_tensor(stack[i], [&](const at::Tensor& t, int) { graph |= !t.is_leaf(); });
  const auto& arguments = step.op.schema().arguments();
  if (graph && std::ranges::any_of(step.uses, [&](const Use& use) {
        return !arguments[use.argument].alias_info();
      }))
    refuse(step.op, concat("takes the values of ", described(step),
                           " and has none yet: compute after the module is placed (fully_shard(), "
                           "tensor_parallel(), distribute_module(), a Pipeline), or after "
                           "materialize()"));
}

// As an operator that makes a tensor out of no other.
std::size_t Tape::add_made(Value value, const std::string& what, DeferredSource source) {
  value.memory = memories_++;
  values_.push_back(std::move(value));
  Step step{c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty", "memory_format"),
            {},
            {},
            {},
            {values_.size() - 1},
            {values_.back().memory},
            {},
            std::move(source),
            what};
  steps_.push_back(std::move(step));
  return values_.size() - 1;
}

std::size_t Tape::give(std::size_t value, const std::string& what, DeferredSource source) {
  const std::lock_guard lock(mutex_);
  given_ = true;
  // A value of its own: what was recorded before takes the one of before.
  return add_made(values_[value], what, std::move(source));
}

void Tape::name(std::size_t value, const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (values_[value].name.empty()) values_[value].name = name;
}

// All that writes to the memory of these values, and what that takes.
std::vector<const Tape::Step*> Tape::steps_of(const std::vector<std::size_t>& values,
                                              bool draws) const {
  std::set<std::size_t> memories;
  for (const std::size_t value : values) memories.insert(values_[value].memory);
  for (const Step& step : steps_) {
    if (draws && !given_ && step.draw) memories.insert(step.touched.begin(), step.touched.end());
  }
  std::vector<const Step*> all;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    if (std::ranges::none_of(step->touched,
                             [&](std::size_t memory) { return memories.contains(memory); }))
      continue;
    for (const Use& use : step->uses) memories.insert(values_[use.value].memory);
    all.push_back(&*step);
  }
  std::ranges::reverse(all);
  return all;
}

void Tape::run(const Step& step, Values& values, c10::Device device) const {
  if (step.source) {
    values[step.results[0]] = step.source(nullptr, device);
    return;
  }
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < step.arguments.size(); ++i) {
    stack.push_back(with_tensors(step.arguments[i], [&](const at::Tensor& t, int element) {
      for (const Use& use : step.uses)
        if (use.argument == i && use.element == element) return values.at(use.value);
      return t;
    }));
  }
  if (step.device && (step.uses.empty() || !stack[*step.device].isNone()))
    stack[*step.device] = device;
  step.op.callBoxed(&stack);
  std::size_t at = 0;
  for (const c10::IValue& result : stack)
    each_tensor(result, [&](const at::Tensor& t, int) { values[step.results[at++]] = t; });
}

// Of a shape that `spec` shards: never more than a shard where that is possible.
at::Tensor Tape::created(const Step& step, const ShardSpec& spec, c10::Device device) const {
  if (step.source) return step.source(&spec, device);
  const std::string& name = step.op.schema().name();
  const auto options = at::TensorOptions().dtype(values_[step.results[0]].dtype).device(device);
  if (name.starts_with("aten::empty")) return empty(spec, options);
  if (name == "aten::zeros") return zeros(spec, options);
  if (name == "aten::ones") return ones(spec, options);
  if (name == "aten::rand") return rand(spec, options);
  if (name == "aten::randn") return randn(spec, options);
  if (name == "aten::full") return full(spec, step.arguments[1].toScalar(), options);
  Values made;
  run(step, made, device);
  return distribute_tensor(made.begin()->second, spec);
}

at::Tensor Tape::placed(std::size_t value, const ShardSpec& spec, c10::Device device) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const DistributedManager& manager = spec.mesh().manager();
  if (!start_) {
    start_ = random_state(manager);
    set_random_state(manager, {start_->seed, start_->stream + draws_});
  }
  // What initialisation moves (a row that it writes to, a whole that it computes) is asked for, and
  // the random state is the program's again at the end, by an exception too.
  const Policies before = policies(manager);
  Policies moves = before;
  moves.redistribution = Policy::allow;
  set_policies(manager, moves);
  const auto restore = c10::make_scope_exit([&, random = random_state(manager)] {
    set_random_state(manager, random);
    set_policies(manager, before);
  });
  const Value& wanted = values_[value];
  Values values;
  for (const Step* step : steps_of({value})) {
    if (step->draw) set_random_state(manager, {start_->seed, start_->stream + *step->draw});
    if (!step->uses.empty()) {
      run(*step, values, device);
      continue;
    }
    const Value& made = values_[step->results[0]];
    // What the tensor itself lies in is sharded from the start, what it is computed from is not.
    const bool own = made.memory == wanted.memory && made.shape == wanted.shape;
    const ShardSpec all(spec.mesh(), made.shape,
                        std::vector<Placement>(static_cast<std::size_t>(spec.mesh_dims())));
    values[step->results[0]] = created(*step, own ? spec : all, device);
  }
  const at::Tensor got = values.at(value).detach();
  // A slice would keep what it is of.
  return tessera::spec(got) == spec ? got : redistribute(got, spec).clone();
}

bool Tape::begun() const {
  const std::lock_guard lock(mutex_);
  return start_.has_value();
}

void Tape::begin_anew() {
  const std::lock_guard lock(mutex_);
  start_.reset();
}

std::vector<at::Tensor> Tape::plain(const std::vector<std::size_t>& values, c10::Device device) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  Values all;
  // A parameter that another one took the place of was drawn too.
  for (const Step* step : steps_of(values, !std::exchange(drawn_, true))) run(*step, all, device);
  return mapped(values, [&](std::size_t value) { return all.at(value).detach(); });
}

std::uint64_t Tape::hash(std::size_t value) const {
  const std::lock_guard lock(mutex_);
  Hash hash;
  for (const Step* step : steps_of({value})) {
    hash.text(step->op.schema().name());
    for (const c10::IValue& argument : step->arguments) {
      if (argument.isInt()) hash.number(static_cast<std::uint64_t>(argument.toInt()));
      if (argument.isDouble()) hash.text(concat(argument.toDouble()));
    }
    if (step->draw) hash.number(*step->draw);
    if (step->source) hash.text(step->what);
  }
  return hash.value();
}

}  // namespace tessera::detail
