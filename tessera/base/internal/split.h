#pragma once
// Text in pieces: split("a,b,,c", ',') -> {"a", "b", "", "c"}; of no text one piece that is empty.

#include <algorithm>
#include <string>
#include <vector>

namespace tessera {

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> pieces;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(separator, begin), text.size());
    pieces.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return pieces;
}

}  // namespace tessera
