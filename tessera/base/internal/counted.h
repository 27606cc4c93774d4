#pragma once
// Numbers of things in messages: counted(1, "host") -> "1 host", counted(2, "host") -> "2 hosts".

#include <string>

#include "tessera/base/text.h"

namespace tessera {

/// The number and the thing: `one` of it, or `many`, which is `one` and an s where it is empty.
template <class Number>
std::string counted(Number n, const std::string& one, const std::string& many = {}) {
  return concat(n, ' ', n == 1 ? one : many.empty() ? one + 's' : many);
}

}  // namespace tessera
