#pragma once
// A range of this rank's memory that the other ranks of its group see too: collectives on it need
// no intermediate copy. It is part of the group's shared memory, of size Options::arena_bytes.

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "tessera/shm/types.h"

namespace tessera::shm {

class Arena {
 public:
  /// For shm::Group alone. `keep` owns the memory.
  Arena(std::shared_ptr<const void> keep, std::byte* begin, std::size_t bytes);

  /// Allocates at least this many bytes, aligned to 64; from any thread. Returns null if no free
  /// block is large enough.
  std::byte* try_allocate(std::size_t bytes);
  /// As try_allocate(). Throws ArenaFull instead of returning null.
  std::byte* allocate(std::size_t bytes);
  /// Frees what allocate() returned, or null. Throws InvalidArgument for any other address.
  void deallocate(std::byte* data);

  bool contains(const void* data) const;
  std::size_t size() const { return bytes_; }
  std::size_t used() const;
  /// Size of the largest block that could be allocated now.
  std::size_t largest_free() const;

 private:
  const std::shared_ptr<const void> keep_;
  std::byte* const begin_;
  const std::size_t bytes_;
  mutable std::mutex mutex_;
  /// Offset to size. This table is in private memory: no other rank can damage it.
  std::map<std::size_t, std::size_t> free_, taken_;
};

/// Thrown if the arena has no free block that is large enough.
class ArenaFull : public Error {
 public:
  using Error::Error;
  ~ArenaFull() override;
};

}  // namespace tessera::shm
