#pragma once
// Right calls of operators of all families, from which the fuzzer makes wrong ones.

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace tessera::test {

struct Base {
  /// What the values of the results are.
  enum class Values : char {
    equal,
    /// Other numbers each time.
    drawn,
    /// Of the first result alone: where values are equal, any index may be found.
    first,
    /// Where inputs are: of others each kernel makes NaN or infinity in other places.
    finite,
  };

  /// Operator and overload: "aten::add.Tensor".
  std::string name;
  /// The first ones of the schema; the others have its defaults.
  std::vector<c10::IValue> arguments;
  Values values = Values::equal;
  /// Arguments that stay as they are: kernels of plain libtorch read as far as they say, whatever
  /// the tensors have, or draw.
  std::vector<std::size_t> fixed = {};
};

struct Family {
  std::string name;
  std::vector<Base> bases;
};

std::vector<Family> argument_families();

}  // namespace tessera::test
