#pragma once
// Operators for the property test: each draws inputs and arguments, then gives the function to compare.

#include <functional>
#include <string>
#include <vector>

#include "support.h"

namespace tessera::test {

struct Instance {
  std::vector<at::Tensor> inputs;  ///< Plain; floating-point ones get gradients.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function;
};

struct OperatorCase {
  std::string name;
  std::function<Instance(Draw&)> make;
};

const std::vector<OperatorCase>& operator_cases();

}  // namespace tessera::test
