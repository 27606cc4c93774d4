#pragma once
// Memory that processes share: an anonymous file (memfd) whose size is sealed, so that no process
// can truncate it under another rank, and whose pages are claimed before they are touched, so that
// a lack of memory is an error and not a SIGBUS. It has no name: it is freed with the last process
// that maps it, however that one ends, and the size and the permissions of /dev/shm do not matter.

#include <cstddef>

#include "tessera/base/internal/descriptor.h"
#include "tessera/base/pinned.h"

namespace tessera::shm::detail {

/// Makes a new anonymous file of this size, sealed against growing and shrinking, mode 0600, closed
/// on exec. Throws SetupError: not_permitted if memfd is refused, no_memory if the size is.
Descriptor make_memory(std::size_t bytes);

/// The file mapped into this process. Throws SetupError: disagreement if it is not sealed or has
/// another size, no_memory if there is no room for it.
class Mapping : Pinned {
 public:
  Mapping(const Descriptor& file, std::size_t bytes);
  ~Mapping();
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

/// Allocates the pages of this range of the file, on the NUMA node of the calling thread. Throws
/// SetupError (no_memory), also if this host or the caller's control group has too little left.
void claim(const Descriptor& file, std::size_t offset, std::size_t bytes);

}  // namespace tessera::shm::detail
