#pragma once
// refused<E>(call): runs the call, expects exactly an E, and returns its message.

#include <gtest/gtest.h>

#include <string>

namespace tessera {

template <class E, class Call>
std::string refused(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "an error of another type: " << other.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

#define EXPECT_SAYS(text, part)                            \
  do {                                                     \
    const std::string said = (text);                       \
    EXPECT_NE(said.find(part), std::string::npos) << said; \
  } while (false)

}  // namespace tessera
