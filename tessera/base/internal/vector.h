#pragma once
// Vectors made of numbers and of other ranges: numbers_below(3) -> {0, 1, 2}, and
// mapped(axes, &Axis::name) -> the names of the axes.

#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

namespace tessera {

/// The numbers from 0 to `end - 1`, in order.
template <class Number>
std::vector<Number> numbers_below(Number end) {
  std::vector<Number> numbers(static_cast<std::size_t>(end));
  std::iota(numbers.begin(), numbers.end(), Number{0});
  return numbers;
}

/// What `of`, a function or a member, gives for each item of `range`, in the same order.
template <class Range, class Of>
auto mapped(const Range& range, const Of& of) {
  std::vector<std::decay_t<decltype(std::invoke(of, *range.begin()))>> results;
  results.reserve(range.size());
  for (const auto& item : range) results.push_back(std::invoke(of, item));
  return results;
}

}  // namespace tessera
