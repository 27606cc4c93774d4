#pragma once
// The errors of sharded tensors.

#include "tessera/base/error.h"

namespace tessera {

/// Thrown for an operation that is not possible, or not covered, for the placements it is given.
class ShardingError : public Error {
 public:
  using Error::Error;
};

/// Thrown where an operator has no rule for sharded inputs. The message names the operator, the
/// placements, and the two ways out: redistribute the inputs, or register a rule.
class NoRuleError : public ShardingError {
 public:
  using ShardingError::ShardingError;
};

/// Thrown where a rule's plan does not fit the call, which means that the rule is wrong and not the
/// call, and where an operator is given a second rule. The message names the operator.
class RuleError : public Error {
 public:
  using Error::Error;
};

/// Thrown where an operator would move data between ranks by itself and
/// Policies::redistribution forbids it.
class ImplicitRedistributionError : public ShardingError {
 public:
  using ShardingError::ShardingError;
};

}  // namespace tessera
