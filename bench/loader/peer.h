#pragma once
// A child process that answers a line with a line.

#include <sys/types.h>

#include <cstdio>
#include <string>
#include <vector>

namespace tessera::bench {

class Peer {
 public:
  explicit Peer(const std::vector<std::string>& command);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  /// Throws std::runtime_error when the child has ended.
  std::string ask(const std::string& line);

 private:
  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

}  // namespace tessera::bench
