#pragma once
// Errors of sharded tensors.

#include "tessera/base/error.h"

namespace tessera {

/// An operation that is not possible, or not covered, for the placements it was given.
class ShardingError : public Error {
 public:
  using Error::Error;
  ~ShardingError() override;
};

/// An operator has no rule for sharded inputs. The message names it, the placements and the two
/// ways out.
class NoRuleError : public ShardingError {
 public:
  using ShardingError::ShardingError;
  ~NoRuleError() override;
};

/// A rule's plan does not fit the call: the rule is wrong, not the call. Or an operator is given a
/// second rule. The message names the operator.
class RuleError : public Error {
 public:
  using Error::Error;
  ~RuleError() override;
};

/// An operator would move data between ranks by itself, and the policy forbids it.
class ImplicitRedistributionError : public ShardingError {
 public:
  using ShardingError::ShardingError;
  ~ImplicitRedistributionError() override;
};

}  // namespace tessera
