#pragma once
// Rules: how an operator works on sharded tensors. A rule looks at the specs and arguments of one
// call and returns a plan: the spec that each input must have, the local call, and the specs of the
// outputs. Plans are cached; a rule runs once for each new combination.
//
//   // mylib::scale(Tensor x, float by) -> Tensor: any placement, one at a time; linear, so that a
//   // partial sum stays one.
//   tessera::register_rule("mylib::scale", [](const tessera::OpCall& call) {
//     tessera::Plan plan;
//     plan.outputs = {{call.tensor(0).spec}};
//     return plan;
//   });

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/tensor/spec/spec.h"

namespace c10 {
class OperatorHandle;
struct FunctionSchema;
}  // namespace c10

namespace tessera {

namespace detail {
struct OpInfo;
struct Layout;
}  // namespace detail

/// One tensor input of a call, described as the global tensor.
struct TensorInfo {
  /// Its position in the schema.
  int argument;
  /// Its position in a list, -1 if the argument is not a list.
  int element;
  /// True if the operator writes to it.
  bool written;
  ShardSpec spec;
  std::vector<std::int64_t> strides;
  std::int64_t offset;
  at::ScalarType dtype;
  /// True for a sharded parameter or a view of it: it should be gathered where it is used, rather
  /// than moving the data that it is combined with.
  bool parameter = false;
  /// True for a sharded parameter that is not to be gathered.
  bool stays = false;
};

/// One tensor output, as plain libtorch would make it from the global inputs.
struct OutputInfo {
  bool defined = true;
  std::vector<std::int64_t> shape, strides;
  std::int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
};

/// A call of an operator, read-only. Arguments are named as in the schema.
class OpCall : Pinned {
 public:
  OpCall(const detail::OpInfo& info, at::ArrayRef<c10::IValue> arguments);

  /// "aten::add.Tensor".
  std::string name() const;
  const c10::FunctionSchema& schema() const;
  const DeviceMesh& mesh() const;
  /// True if the operator writes to its first argument.
  bool in_place() const;

  /// The tensor inputs in order, lists flattened. Undefined tensors and numbers wrapped as tensors
  /// are left out.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  /// The i-th of tensors(). Throws InvalidArgument if there are not as many.
  const TensorInfo& tensor(std::size_t i) const;
  /// The tensor input of this argument, or nullptr if it is undefined, a wrapped number, or not an
  /// argument.
  const TensorInfo* find(std::string_view argument) const;
  int index_of(const TensorInfo& tensor) const {
    return static_cast<int>(&tensor - tensors_.data());
  }

  /// Position in the schema, -1 if there is none.
  int argument(std::string_view name) const;
  /// True if there is such an argument and it is not None.
  bool has(std::string_view name) const;
  /// The value of an argument. Throws InvalidArgument if there is none.
  const c10::IValue& value(std::string_view name) const;
  std::int64_t integer(std::string_view name) const;
  bool boolean(std::string_view name) const;
  std::vector<std::int64_t> integers(std::string_view name) const;
  /// A floating-point argument. Such values are part of the key under which the plan is cached only
  /// if the rule asks for one here.
  double number(std::string_view name) const;
  const std::vector<c10::IValue>& arguments() const { return arguments_; }

  /// Shapes and strides of the tensors returned, lists flattened, from the operator's meta kernel
  /// on the global inputs; for in-place and out variants those of what is written. Throws what the
  /// operator throws for bad arguments. nullptr if it has no meta kernel: then the rule must know
  /// them. Called before the rule, which therefore sees no arguments that the operator refuses.
  const std::vector<OutputInfo>* outputs() const;

  /// True if the rule has called number().
  bool asked_for_numbers() const { return asked_for_numbers_; }

 private:
  const detail::OpInfo& info_;
  std::vector<c10::IValue> arguments_;
  std::vector<TensorInfo> tensors_;
  mutable std::optional<std::vector<OutputInfo>> outputs_;
  mutable bool inferred_ = false, asked_for_numbers_ = false;
};

/// Runs on locals in place of the operator: takes its arguments with every tensor replaced by the
/// local tensor, and returns its results.
using LocalFunction =
    std::function<torch::jit::Stack(const c10::OperatorHandle& op, torch::jit::Stack arguments)>;

struct Plan {
  struct Output {
    /// Empty: the output is undefined, or not a tensor.
    ShardSpec spec;
    /// Global strides; default: those of OpCall::outputs(), else row-major.
    std::optional<std::vector<std::int64_t>> strides = {};
  };
  /// The spec that each of call.tensors() must have; missing or empty: as it is.
  std::vector<std::optional<ShardSpec>> inputs = {};
  /// One for each tensor returned that is not an argument; lists flattened.
  std::vector<Output> outputs = {};
  /// Arguments that the local call gets in place of the given ones, by position in the schema.
  std::vector<std::pair<int, c10::IValue>> arguments = {};
  /// The local call; default: the operator itself.
  LocalFunction local{};
  /// The view operator's first tensor is gathered first: writes to the result are written back to
  /// the base. `local` must return a view.
  bool view_copied = false;
  /// Every input is planned Replicate on every axis: the results are those of the operator on the
  /// global values, the same on all ranks, of any shape.
  bool gathered = false;
  /// Results are Partial because the operator is linear in an input that is: each rank computes
  /// with its summand. Where another input is infinite the sum is computed first, because infinity
  /// times a summand of zero is NaN. solve() sets it.
  bool linear = false;
};

using Rule = std::function<Plan(const OpCall&)>;

struct RuleOptions {
  /// Ask the rule also if all inputs are replicated (random numbers); default: the operator then
  /// runs on the locals as it is.
  bool for_replicated = false;
  /// Replaces the rule that is registered under the same name; there must be one.
  bool replaces = false;
  /// The operator's kernel calls others that libtorch's autocast knows, and autocast does not know
  /// the operator. Under autocast the kernel then runs on the sharded tensors themselves, in place
  /// of this rule, so that what it calls is cast as on one process and follows rules of its own.
  bool composed = false;
};

/// Registers a rule. `op`: "mylib::scale" for all overloads, "aten::add.Tensor" for one. An
/// in-place operator without a rule of its own uses that of its functional form. Process-wide, like
/// the operators themselves; call it before the first use of the operator. Throws RuleError if the
/// name has a rule already, unless `options.replaces`: otherwise the order in which libraries are
/// loaded would choose between the two. A rule for an overload takes precedence over the one for
/// all overloads, whichever came first.
void register_rule(const std::string& op, Rule rule, RuleOptions options = {});

/// The names under which rules are registered, sorted.
std::vector<std::string> registered_rules();

}  // namespace tessera
