#pragma once
// One case of the property test: an operator on sharded tensors beside the same operator on plain ones.

#include "cases.h"

namespace tessera::test {

struct Outcome {
  enum class Kind : char {
    equal = 'e',
    refused = 'r',     ///< A typed error of the project, on every rank.
    both_throw = 'b',  ///< Plain libtorch throws, and so does the sharded call.
    failed = 'f',
  };
  Kind kind = Kind::equal;
  std::string text;
  bool second = false;  ///< Second derivatives were compared too.
};

/// A number of its own for each case: what is drawn depends on nothing else.
std::uint64_t case_number(std::uint64_t seed, const std::string& name, int ranks, int draw);

/// Collective over the manager's world. The same outcome on every rank. Throws CommError where the ranks no longer agree: the groups are unusable
/// then.
Outcome run_case(const OperatorCase& one, std::uint64_t number, DistributedManager& manager);

}  // namespace tessera::test
