#pragma once
// Rules in index notation. For most operators it suffices to say which dims of their inputs and
// outputs are the same: a product is "m k, k n -> m n".
//
//   // average over neighbours in the last dim; the dims before it may be sharded
//   tessera::register_rule("mylib::blur",
//                          tessera::index_rule("... w! -> ... w!", {.linear = true}));
//   // a bias that is broadcast, and added once if the product is a partial sum
//   tessera::register_rule("mylib::affine", tessera::index_rule("n?, m k, k n -> m n",
//                                                               {.linear = true, .added = {0}}));

#include <set>
#include <string>

#include "tessera/tensor/dispatch/rule.h"

namespace tessera {

struct IndexRuleOptions {
  /// The operator is linear in each of its tensor inputs, the others fixed: if one input is Partial
  /// (a sum or an average) the result is Partial, and nothing is reduced. Leave it false for other
  /// operators: a Partial input is then reduced first.
  bool linear = false;
  /// How results over the shards of a dim that is summed over are reduced.
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  /// Inputs, by their position in the notation, that are added to what is reduced (a bias): one
  /// rank adds them if the result is Partial. `linear` does not apply to them.
  std::set<int> added = {};
};

/// A rule from index notation: "inputs -> outputs", tensors separated by commas, the dims of a
/// tensor named by words separated by spaces. One input for each tensor argument of the schema, in
/// its order (left out if the call leaves it out; each tensor of a list uses that of the list), one
/// output for each tensor returned.
///
/// - A name in an input and in an output may be sharded, and stays so.
/// - A name that an output lacks is reduced: if it is sharded that output is Partial.
/// - `w!` must not be sharded: the dim is gathered if it is, subject to
///   Policies::redistribution.
/// - `n?` may have size 1 or, at the front, be left out: it is broadcast to the size that the name
///   has elsewhere.
/// - `...` stands for any number of dims, the same in every tensor that has it.
///
/// Which placement is chosen if several are possible: docs/operators.md. Throws RuleError if the
/// notation cannot be read. The rule throws InvalidArgument for a call whose tensors do not fit the
/// notation.
Rule index_rule(const std::string& notation, IndexRuleOptions options = {});

}  // namespace tessera
