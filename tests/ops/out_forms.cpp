#include "out_forms.h"

#include <ATen/record_function.h>

#include <map>

namespace tessera::test {

namespace {

// True if `form` has the arguments of `functional`, and then one to write to for each result.
bool is_out_form(const c10::FunctionSchema& form, const c10::FunctionSchema& functional) {
  const auto& all = form.arguments();
  const auto& given = functional.arguments();
  const std::size_t results = functional.returns().size();
  if (results == 0 || all.size() != given.size() + results) return false;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (all[i].name() != given[i].name() || *all[i].type() != *given[i].type() ||
        all[i].alias_info())
      return false;
  }
  for (std::size_t i = given.size(); i < all.size(); ++i) {
    if (!all[i].is_out() || all[i].type()->kind() != c10::TypeKind::TensorType) return false;
  }
  return true;
}

// The `out=` form of an operator, by name; looked up once for each name.
std::optional<c10::OperatorHandle> form_of(const c10::OperatorName& name) {
  static thread_local std::map<std::string, std::optional<c10::OperatorHandle>> known;
  const std::string key = name.name + "." + name.overload_name;
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  std::optional<c10::OperatorHandle> form;
  // On one process its `out=` form gives the loss of one element where a mean or a sum is asked
  // for: the tensor that it is given is smaller than what its loop writes, and is reduced instead.
  if (name.name == "aten::binary_cross_entropy") return form;
  auto& dispatcher = c10::Dispatcher::singleton();
  if (const auto op = dispatcher.findSchema(name)) {
    for (const c10::OperatorName& other : dispatcher.getAllOpNames()) {
      if (other.name != name.name || other.overload_name == name.overload_name) continue;
      const auto candidate = dispatcher.findSchema(other);
      if (candidate && is_out_form(candidate->schema(), op->schema())) form = candidate;
    }
  }
  return known.emplace(key, form).first->second;
}

// What the functions of this thread call.
struct Recording {
  /// Of operators with an `out=` form alone.
  bool with_out = true;
  int depth = 0;
  std::optional<OutCall> last = {};
};
Recording*& recording() {
  static thread_local Recording* one = nullptr;
  return one;
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
  Recording* r = recording();
  if (!r || r->depth++ > 0) return nullptr;
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  const auto form = !op ? std::nullopt : r->with_out ? form_of(*name) : op;
  if (!form) return nullptr;
  const auto inputs = function.inputs();
  const std::size_t given = op->schema().arguments().size();
  if (inputs.size() != given) return nullptr;
  r->last.emplace(OutCall{*op, *form, torch::jit::Stack(inputs.begin(), inputs.end())});
  return nullptr;
}
void end(const at::RecordFunction&, at::ObserverContext*) {
  if (Recording* r = recording()) --r->depth;
}

}  // namespace

static std::optional<OutCall> last_call(bool with_out, const std::function<void()>& f) {
  Recording mine{.with_out = with_out};
  recording() = &mine;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&start, &end)
                                                     .needsInputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  struct Ended {
    at::CallbackHandle handle;
    ~Ended() {
      at::removeCallback(handle);
      recording() = nullptr;
    }
  } const ended{handle};
  f();
  return mine.last;
}

std::optional<OutCall> last_with_out(const std::function<void()>& f) { return last_call(true, f); }

void repeat_with_other_numbers(const std::function<void()>& f) {
  const auto call = last_call(false, f);
  if (!call) return;
  torch::jit::Stack stack = call->arguments;
  bool changed = false;
  for (c10::IValue& v : stack) {
    if (!v.isDouble()) continue;
    v = v.toDouble() * 0.75 + 0.125;
    changed = true;
  }
  if (!changed) return;
  try {
    call->op.callBoxed(stack);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {  // not every number is allowed
  }
}

Tensors OutCall::results() const {
  torch::jit::Stack stack = arguments;
  op.callBoxed(stack);
  Tensors all;
  for (const c10::IValue& v : stack) all.push_back(v.toTensor());
  return all;
}

void OutCall::into(const Tensors& targets) const {
  torch::jit::Stack stack = arguments;
  for (const at::Tensor& t : targets) stack.emplace_back(t);
  form.callBoxed(stack);
}

}  // namespace tessera::test
