#pragma once
// How the ranks of one host meet: one of them makes the memory, and passes its descriptor to the
// others over a local socket. That they can meet there proves that they share a host; names of
// hosts and environment variables are not consulted.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/shm/types.h"

namespace tessera::shm {

/// A place where ranks leave each other short messages before they share memory: any key-value
/// store that all of them reach. Each key is used once.
struct Directory {
  std::function<void(const std::string& key, const std::string& bytes)> put;
  /// Waits until the key exists. Throws once the limit has passed.
  std::function<std::string(const std::string& key, std::chrono::milliseconds limit)> get;
  /// Deletes a key that no rank will read any more; may be empty.
  std::function<void(const std::string& key)> erase = {};
};

struct Options {
  /// Name of the group, for messages.
  std::string name = "shm";
  /// Time limit of calls that give none, and of making the group.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Size of each rank's arena, from which it allocates memory that collectives use in place.
  std::size_t arena_bytes = 0;
  /// Largest piece of a pipelined collective in bytes; 0: chosen by the number of ranks.
  std::size_t slot_bytes = 0;
  /// Largest piece of a message in bytes; 0: chosen by the number of ranks.
  std::size_t frame_bytes = 0;
  /// Copy large messages out of the sender's memory where the kernel allows it.
  bool single_copy = true;
  /// How data for other ranks are written; if it is not given, measured when the group is made.
  /// Ranks may differ.
  std::optional<Stores> stores;
  /// Limit of the messages in bytes that a rank keeps because they came before their receives.
  std::size_t kept_bytes = std::size_t{1} << 30;
};

}  // namespace tessera::shm
