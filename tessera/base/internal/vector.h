#pragma once
// Vectors made of numbers and of other ranges: numbers_below(3) -> {0, 1, 2},
// mapped(axes, &Axis::name) -> the names of the axes, and filtered(ranks, is_odd) -> the odd ranks.

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

/// What stands first in the pairs of a map or of another range.
template <class Pairs>
auto keys_of(const Pairs& pairs) {
  return mapped(pairs, [](const auto& pair) { return pair.first; });
}

/// The items of `range` for which `is`, a function or a member, gives true, in the same order.
template <class Range, class Is>
auto filtered(const Range& range, const Is& is) {
  std::vector<std::decay_t<decltype(*range.begin())>> chosen;
  for (const auto& item : range)
    if (std::invoke(is, item)) chosen.push_back(item);
  return chosen;
}

/// The numbers from 0 to `end - 1` for which `is` gives true, in order.
template <class Number, class Is>
std::vector<Number> numbers_below(Number end, const Is& is) {
  return filtered(numbers_below(end), is);
}

}  // namespace tessera
