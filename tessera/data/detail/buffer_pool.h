#pragma once
// BufferPool: memory of batches, used again. A fresh large block is paged in by the system piece by
// piece, which costs as much as copying a batch into it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>

namespace tessera::detail {

/// A tensor's memory comes back when its last handle is gone, from any thread, also after the pool
/// itself. At most `kept` blocks wait for use.
class BufferPool {
 public:
  explicit BufferPool(std::size_t kept = 16);
  /// An uninitialised CPU tensor, aligned to 64 bytes; of 2 MiB and more on huge pages where the
  /// system gives them.
  at::Tensor empty(std::span<const std::int64_t> shape, at::ScalarType dtype);

 private:
  struct Blocks;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace tessera::detail
