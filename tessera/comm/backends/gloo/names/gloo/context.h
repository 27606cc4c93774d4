#pragma once
#include <gloo/algorithm.h>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};
}  // namespace gloo
