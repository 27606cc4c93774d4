#pragma once
// What the tests of checkpoints share beside those of tensors.

#include <string>

#include "../tensor/support.h"
#include "storage_support.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"

namespace tessera::test {

using tessera::testing::thrown;

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera::test
