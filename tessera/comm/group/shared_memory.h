#pragma once
// SharedMemory: memory of each rank of a group that the other ranks reach as well. Collectives on
// tensors that lie in it need no copy into the group's own memory and none out of it.
//
//   if (SharedMemory::available(group)) {
//     const SharedMemory memory = SharedMemory::make(group, 64 << 20);  // 64 MiB on each rank
//     at::Tensor flat = memory.empty({1 << 20}, at::kFloat);
//     group.all_reduce(flat);  // each rank adds up its share where it lies, and writes it to all
//   }
//
// Gradient buckets lie in such memory by themselves (GradientReducer). Results have the same bits
// as those of tensors elsewhere.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "tessera/comm/group/group.h"

namespace tessera {

namespace shm {
class Arena;
}  // namespace shm

class SharedMemory {
 public:
  /// True if the group's ranks meet in memory (its CPU backend is "shm"); the same on all ranks.
  static bool available(const Group& group);
  /// Memory of `bytes` on each rank, claimed at once. Collective: the same number on all ranks.
  /// Takes some milliseconds.
  ///
  /// Throws InvalidArgument (`bytes` below 1), NotAvailable on every rank (not available(), or too
  /// little memory: the message says how much was asked for, and what refused it), MismatchError on
  /// every rank (other numbers), TimeoutError, PeerLostError.
  static SharedMemory make(const Group& group, std::int64_t bytes, const CallOptions& options = {});

  /// No memory.
  SharedMemory() = default;
  explicit operator bool() const { return arena_ != nullptr; }

  /// A tensor of this rank alone in the memory, of undefined values, row-major, aligned to 64
  /// bytes. What it takes is given back with the last tensor that shares its storage; the memory
  /// itself with the last of its tensors and handles. Throws NotAvailable if no free range is large
  /// enough, or there is no memory; InvalidArgument for a device other than the CPU and negative
  /// sizes.
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;

  /// Number of bytes of this rank: what was asked for, rounded up to pages. 0 without memory.
  std::int64_t bytes() const;
  /// Number of bytes that tensors take, each rounded up to 64.
  std::int64_t used() const;

 private:
  std::shared_ptr<shm::Arena> arena_;
};

}  // namespace tessera
