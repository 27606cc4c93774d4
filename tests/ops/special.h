#pragma once
// What the property test draws besides shapes, placements and dtypes.

#include "cases.h"

namespace tessera::test {

inline bool differentiable(const at::Tensor& t) {
  return at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
}

// What most cases that draw special things are about besides shapes and placements.
enum class Special : char {
  none,
  ties,
  nan,
  infinite,
  large,
  integers,
  booleans,
  /// An input is one row, expanded.
  expanded,
  /// An input is conjugated, its memory is not.
  conjugated,
  /// Two inputs are one tensor.
  shared,
  inference,
  /// The same call was made before, with other values.
  again,
  /// Two inputs are views of one tensor that overlap.
  overlapping,
  /// One input is float32.
  mixed,
  /// The last operator that has an `out=` form writes to tensors that are given.
  out,
  /// float16, positive, so large that products and some sums overflow.
  overflow,
  /// The first rank's first input requires gradients, the others' does not. No backward.
  one_rank,
  last = one_rank,
};

/// As failures name it.
const char* name_of(Special special);

/// For seven cases of ten something that fits the operator and its inputs, else none.
Special draw_special(const OperatorCase& one, const Tensors& inputs, Draw& draw);

/// The dtype that it needs; nullopt: any.
std::optional<at::ScalarType> type_of(Special special);

/// The values of one floating-point input.
at::Tensor special_values(const at::Tensor& value, Special special, Draw& draw);

/// Changes inputs and function of a case that is about how inputs are given.
void make_special(Instance& instance, Special special, Draw& draw);

}  // namespace tessera::test
