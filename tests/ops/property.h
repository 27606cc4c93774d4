#pragma once
// One case of the property test: an operator on sharded tensors beside the same operator on plain
// ones.

#include "cases.h"

namespace tessera::test {

struct Outcome {
  enum class Kind : char {
    equal = 'e',
    /// A typed error of the project, on every rank.
    refused = 'r',
    /// Plain libtorch throws, and so does the sharded call.
    both_throw = 'b',
    failed = 'f',
  };
  Kind kind = Kind::equal;
  std::string text;
  /// Second derivatives were compared too.
  bool second = false;
  /// A refusal that is no fault: of the `out=` form of an operator that libtorch makes of others,
  /// or of a sharded value that is written to a plain tensor in inference mode.
  bool allowed = false;
  /// No fault if another rank alone sees the numbers that plain libtorch throws for.
  bool alone = false;
};

/// A number of its own for each case: what is drawn depends on nothing else.
std::uint64_t case_number(std::uint64_t seed, const std::string& name, int ranks, int draw);

/// What a case may be about besides shapes and placements.
enum class Hard : char {
  nothing,
  /// Seven cases of ten: ties, NaN, infinities, large values, whole numbers, booleans, expanded
  /// or conjugated inputs, one tensor given twice, inference mode, a call that was made before with
  /// other values and numbers, inputs that overlap or are of several dtypes, float16 that
  /// overflows, results written to tensors that are given (`out=`), or gradients on one rank alone.
  things,
};

/// Collective over the manager's world. The same outcome on every rank. `hoards`: some ranks keep
/// aliases of what operators make. Throws CommError where the ranks no longer agree: the groups are
/// unusable then.
Outcome run_case(const OperatorCase& one, std::uint64_t number, DistributedManager& manager,
                 Hard hard = Hard::nothing, bool hoards = false);

}  // namespace tessera::test
