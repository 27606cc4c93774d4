#pragma once
// Helpers shared by descriptions and errors of orders.

#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/sampling/sample_order.h"

namespace tessera::detail {

inline std::string describe_schedule(const BatchSchedule& schedule) {
  std::string text = "batches";
  for (const auto& entry : schedule.entries()) text += concat(" ", entry.from, ":", entry.size);
  return text;
}

template <class Numbers>
inline std::uint64_t fingerprint_of(const Numbers& numbers) {
  Hash hash;
  for (const auto& n : numbers) hash.bytes(&n, sizeof n);
  return hash.value();
}

[[noreturn]] inline void refuse_cursor(const std::string& why) {
  throw ConfigurationError("a position of another order, or a damaged one: ", why,
                           "; restore a state that this order saved");
}

}  // namespace tessera::detail
