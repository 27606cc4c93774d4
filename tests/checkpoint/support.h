#pragma once
// What the tests of checkpoints share beside those of tensors.

#include <functional>
#include <string>

#include "../tensor/support.h"
#include "storage_support.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"

namespace tessera::test {

/// The message of an Expected that `call` throws; a failure for anything else.
template <class Expected>
std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const Expected& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another type was thrown: " << e.what();
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera::test
