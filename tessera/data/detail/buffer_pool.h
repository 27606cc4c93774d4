#pragma once
// BufferPool: memory of batches, reused. The system pages in a fresh large block bit by bit, which
// costs as much as copying a batch into it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>

namespace tessera::detail {

/// A tensor's memory returns to the pool when its last handle is gone, from any thread, also after
/// the pool itself is destroyed. At most `kept` free blocks are held.
class BufferPool {
 public:
  explicit BufferPool(std::size_t kept = 16);
  /// An uninitialised CPU tensor, aligned to 64 bytes; from 2 MiB on, on huge pages if the system
  /// provides them.
  at::Tensor empty(std::span<const std::int64_t> shape, at::ScalarType dtype);

 private:
  struct Blocks;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace tessera::detail
