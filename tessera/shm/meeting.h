#pragma once
// How the ranks of one host find each other: one of them makes the memory, and hands its descriptor
// to the others over a local socket. That they can meet there is the proof that they share a host;
// names of hosts and environment variables are not asked.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tessera/shm/types.h"

namespace tessera::shm {

/// Where ranks leave each other short messages before they share memory: any key-value store that
/// all of them reach. Keys are used once.
struct Directory {
  std::function<void(const std::string& key, const std::string& bytes)> put;
  /// Waits until the key is there. Throws once the limit has passed.
  std::function<std::string(const std::string& key, std::chrono::milliseconds limit)> get;
};

struct Options {
  /// Of the group, for messages.
  std::string name = "shm";
  /// Of calls that give none, and of making the group.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Shared memory of each rank from which it allocates what collectives work on where it lies.
  std::size_t arena_bytes = 0;
  /// Largest piece of a pipelined collective; 0: chosen by the number of ranks.
  std::size_t slot_bytes = 0;
  /// Largest piece of a message; 0: chosen by the number of ranks.
  std::size_t frame_bytes = 0;
  /// Large messages are copied out of the sender's memory where the kernel allows it.
  bool single_copy = true;
};

}  // namespace tessera::shm
