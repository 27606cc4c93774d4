#pragma once
// Interfaces that a backend of Tessera's own may implement beside c10d::Backend: the reductions it
// does by itself, the dtypes it moves, how it tells calls apart. The group asks for them by
// dynamic_cast once, when it is made.

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/comm/group/types.h"

namespace tessera::shm {
class Arena;
}  // namespace tessera::shm

namespace tessera::detail {

/// True for the dtypes that every communication library moves as they are; tensors of other dtypes
/// travel as bytes unless the backend says that it moves them.
inline bool every_library_moves(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::Char:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return true;
    default:
      return false;
  }
}

/// True for what Gloo reduces exactly: it computes in the dtype itself, and its min and max drop
/// NaN.
inline bool gloo_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  using Kind = ReduceOp::Kind;
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
      return op == Kind::sum || op == Kind::product;
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return op == Kind::sum || op == Kind::product || op == Kind::min || op == Kind::max;
    default:
      return false;
  }
}

/// A backend that says which reductions it does by itself. Its reduce() leaves the tensors of the
/// ranks other than the root unchanged.
class ReducingBackend {
 public:
  virtual ~ReducingBackend() = default;
  /// True if the backend does all-reduce, reduce and reduce-scatter of this dtype and operation
  /// exactly as types.h promises (NaN of any rank propagates, min / max of bool are and / or, half
  /// and bfloat16 are accumulated in float32). Otherwise the group composes the result itself.
  virtual bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const = 0;
  /// True if the backend takes tensors of this dtype as they are; otherwise the group passes their
  /// bytes as uint8.
  virtual bool moves(c10::ScalarType dtype) const = 0;
};

/// A backend that tells calls apart: ranks that announce different numbers for one call do not
/// touch each other's memory.
class SigningBackend {
 public:
  virtual ~SigningBackend() = default;
  /// Announces the next collective by a number that stands for its operation and arguments
  /// (CallCard::hash()). 0: nothing is known of it.
  virtual void sign(std::uint64_t call) = 0;
};

/// A backend whose ranks meet in memory, and can have more of it in common.
class SharingBackend {
 public:
  virtual ~SharingBackend() = default;
  /// See SharedMemory::make(). The ranks meet at `store`, which belongs to their group alone.
  /// Throws MismatchError, NotAvailable, TimeoutError, PeerLostError.
  virtual std::shared_ptr<shm::Arena> share(std::size_t bytes,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds limit) = 0;
};

/// A mismatch that the other ranks may not detect by themselves, or after which the backend cannot
/// continue: the group ends.
class FinalMismatch : public MismatchError {
 public:
  using MismatchError::MismatchError;
};

/// A FinalMismatch found by a backend that does not know what the other ranks called: each rank
/// publishes its call in the group's store.
class DifferentCalls : public FinalMismatch {
 public:
  using FinalMismatch::FinalMismatch;
};

/// A work whose wait() returns when its group is aborted, and whose time limit ends the call. It is
/// waited for without interruption by the thread that made the call, since its library may allow no
/// other thread.
class InterruptibleWork {
 public:
  virtual ~InterruptibleWork() = default;
};

}  // namespace tessera::detail
