#pragma once
// The kernels of sharded tensors, registered for every operator: what is known of an operator, what
// may take its place, and the kernel below autograd, which finds or makes the plan of a call,
// redistributes what must move, runs the local call, and wraps the results.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

struct MeshContext;

struct RegisteredRule {
  Rule rule;
  RuleOptions options;
};

/// What is known of an operator, determined once, so that a call reads no schema.
struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op, int id);

  enum class Kind : unsigned char { tensor, tensor_list, optional_tensor_list, floating, other };
  struct Return {
    bool tensor = false, list = false;
    int argument = -1;  // the argument that is returned, for operators that write
    bool view = false;  // shares memory with an input
  };

  const c10::OperatorHandle op;
  const int id;             // dense, for the caches
  const std::string name;   // "aten::add.Tensor"
  std::vector<Kind> kinds;  // of each argument
  std::vector<bool> written;
  std::vector<Return> returns;
  bool writes = false;         // any argument
  bool writes_many = false;    // lists, or several arguments
  bool out_variant = false;    // writes arguments named out, not self
  bool in_place_view = false;  // t_, squeeze_: changes the shape of its argument
  bool resizes = false;        // resize_, set_: may change shape or storage of its argument
  bool view = false;
  bool random = false;
  bool pointwise = false;
  /// The form that returns new tensors, for in-place and out variants; its arguments are the first
  /// ones of this operator.
  std::optional<c10::OperatorHandle> functional;

  // its own rule, that of the functional form, or that of the pointwise family; nullptr: none
  std::shared_ptr<const RegisteredRule> rule() const;
};

/// Calls `call` with each tensor among the arguments, the number of its argument, and its place in
/// a list (-1: in none).
template <class Call>
void each_tensor(const OpInfo& info, const c10::IValue* arguments, const Call& call) {
  for (std::size_t i = 0; i < info.kinds.size(); ++i) {
    const c10::IValue& v = arguments[i];
    const auto argument = static_cast<int>(i);
    if (v.isTensor() && v.toTensor().defined()) call(v.toTensor(), argument, -1);
    if (info.kinds[i] == OpInfo::Kind::other || !v.isList()) continue;
    int element = -1;
    for (const c10::IValue& t : v.toListRef()) {
      ++element;
      if (t.isTensor() && t.toTensor().defined()) call(t.toTensor(), argument, element);
    }
  }
}

/// Sets the rule of pointwise operators that have none of their own.
void set_pointwise_rule(Rule rule);

/// Takes the place of an operator above autograd, for arguments that it knows: it replaces the
/// arguments on the stack, which have been cast and promoted, by the results, and returns true.
/// False: the operator runs as any other. Not called in inference mode.
using AboveFunction = bool (*)(torch::jit::Stack* stack);

/// Registers such a function of an operator by its full name ("aten::embedding"). Process-wide,
/// like rules; call it before the first sharded tensor is made.
void register_above(const std::string& name, AboveFunction function);

/// Registers the kernels on first use, and those of operators defined since. Called wherever a
/// sharded tensor is made. Throws NotAvailable if another library uses the dispatch key.
void ensure_registered();

/// Runs in place of an operator's rule, below autograd and on the sharded tensors themselves: for
/// exchanges that follow from values on which all ranks have agreed, and which a rule never sees.
/// It replaces the arguments on the stack by the results and returns true; false: the rule is
/// asked. What decides is the same on all ranks.
using BeforeRule = bool (*)(const OpInfo& info, torch::jit::Stack* stack);

/// Registers such a function of an operator by its full name ("aten::index_add"). Process-wide,
/// like rules; call it before the first sharded tensor is made.
void register_before_rule(const std::string& name, BeforeRule function);

/// Registers a function above autograd, and below it for inference mode, in which nothing runs
/// above.
template <AboveFunction function>
void register_above_and_below(const std::string& name) {
  register_above(name, function);
  register_before_rule(name,
                       [](const OpInfo&, torch::jit::Stack* stack) { return function(stack); });
}

/// Replaces the arguments on the stack, so many, by the result; returns true.
inline bool answer(torch::jit::Stack* stack, std::size_t arguments, c10::IValue result) {
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, std::move(result));
  return true;
}

void run_sharded(const OpInfo& info, torch::jit::Stack* stack);

/// A redistribution that an operator makes by itself.
struct ImplicitMove {
  /// Name of the argument.
  std::string name;
  ShardSpec from, to;
  std::int64_t element_size;
};
/// Applies Policies::redistribution to the moves between ranks: throws ImplicitRedistributionError,
/// or warns, on the mesh's first rank and once for each place in the program that calls the
/// operator, with the operator, its arguments, their placements, and the bytes that this rank
/// receives.
void check_implicit_moves(const std::string& op, const std::vector<ImplicitMove>& moves,
                          const MeshContext& context);

}  // namespace tessera::detail
