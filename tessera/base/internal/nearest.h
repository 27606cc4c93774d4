#pragma once
// The nearest of some names, for messages: nearest("max_step", {"max_steps", "seed"}) ->
// "max_steps".

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// How many letters differ, are missing or are too many (V. Levenshtein's distance).
inline std::size_t letters_apart(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

/// The first of those that are fewest letters apart; empty where there are no names.
inline std::string nearest(const std::string& word, const std::vector<std::string>& names) {
  const auto found =
      std::ranges::min_element(names, [&](const std::string& a, const std::string& b) {
        return letters_apart(word, a) < letters_apart(word, b);
      });
  return found == names.end() ? std::string() : *found;
}

}  // namespace tessera
