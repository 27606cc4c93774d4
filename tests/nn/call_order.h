#pragma once
// The calls that a rank has made, one after the other, to be compared with those of the others.

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test {

inline std::string order_of(const CommTrace& trace) {
  std::vector<CommEvent> events = trace.events();
  std::ranges::stable_sort(
      events, [](const CommEvent& a, const CommEvent& b) { return a.begin < b.begin; });
  std::string text;
  for (const CommEvent& e : events) text += concat(e.operation, " '", e.name, "'\n");
  return text;
}

}  // namespace tessera::test
