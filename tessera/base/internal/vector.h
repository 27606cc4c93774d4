#pragma once
// Vectors of numbers: numbers_below(3) -> {0, 1, 2}.

#include <numeric>
#include <vector>

namespace tessera {

/// The numbers from 0 to `end - 1`, in order.
template <class Number>
std::vector<Number> numbers_below(Number end) {
  std::vector<Number> numbers(static_cast<std::size_t>(end));
  std::iota(numbers.begin(), numbers.end(), Number{0});
  return numbers;
}

}  // namespace tessera
