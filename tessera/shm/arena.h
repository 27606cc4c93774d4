#pragma once
// Memory of this rank that the other ranks of its group see too: collectives on it need no copy on
// the way. A piece of the group's shared memory, of the size that Options::arena_bytes gave.

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

  /// At least this many bytes, aligned to 64; from any thread. Null where no free piece is as
  /// large.
  std::byte* try_allocate(std::size_t bytes);
  /// The same. Throws ArenaFull.
  std::byte* allocate(std::size_t bytes);
  /// What allocate() gave, or null. Throws InvalidArgument for anything else.
  void deallocate(std::byte* data);

  bool contains(const void* data) const;
  std::size_t size() const { return bytes_; }
  std::size_t used() const;
  /// The largest piece that could be had now.
  std::size_t largest_free() const;

 private:
  const std::shared_ptr<const void> keep_;
  std::byte* const begin_;
  const std::size_t bytes_;
  mutable std::mutex mutex_;
  /// Offset to size. The bookkeeping lies in private memory: no other rank can damage it.
  std::map<std::size_t, std::size_t> free_, taken_;
};

/// The arena has no free piece that is large enough.
class ArenaFull : public Error {
 public:
  using Error::Error;
  ~ArenaFull() override;
};

}  // namespace tessera::shm
