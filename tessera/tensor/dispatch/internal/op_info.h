#pragma once
// OpInfo: what is known of an operator, determined once, so that a call reads no schema.

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

struct RegisteredRule {
  Rule rule;
  RuleOptions options;
};

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

/// Sets the rule of pointwise operators that have none of their own.
void set_pointwise_rule(Rule rule);

}  // namespace tessera::detail
