#pragma once
// GlooStore in ProcessGroupGloo.hpp derives from this class. Nothing in Tessera makes or calls one,
// so the order of its functions does not matter.
#include <gloo/algorithm.h>

namespace gloo::rendezvous {
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace gloo::rendezvous
