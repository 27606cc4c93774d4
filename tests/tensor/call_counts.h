#pragma once
// How many calls of each kind a rank has made.

#include <map>
#include <string>

#include "tessera/comm/group/trace.h"

namespace tessera::test {

inline std::map<std::string, int> calls(const CommTrace& trace) {
  std::map<std::string, int> all;
  for (const CommSummary& s : trace.summary()) all[s.operation] += static_cast<int>(s.count);
  return all;
}

}  // namespace tessera::test
