#pragma once
// What a backend says about the reductions it does by itself, and about its works. A backend of
// ours derives from this beside c10d::Backend; the group asks by dynamic_cast once, when it is
// made.

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "tessera/comm/group/types.h"

namespace tessera::detail {

/// Types that every library moves as they are; the others travel as bytes where a backend does not
/// say that it knows them.
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

/// Its reduce() leaves the tensors of the ranks that are not the root as they are.
class ReducingBackend {
 public:
  virtual ~ReducingBackend() = default;
  /// True if all-reduce, reduce and reduce-scatter of this dtype and operation are done by the
  /// backend exactly as types.h promises (NaN of any rank propagates, bool is and / or for min /
  /// max, half and bfloat16 are accumulated in float32). Where it is false the group composes the
  /// result itself.
  virtual bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const = 0;
  /// True if data of this dtype can be given to the backend as it is; else the group passes its
  /// bytes as uint8.
  virtual bool moves(c10::ScalarType dtype) const = 0;
};

/// A backend that keeps apart calls that do not belong together: ranks that announce different
/// numbers for one call do not touch each other's memory.
class SigningBackend {
 public:
  virtual ~SigningBackend() = default;
  /// Announces the next collective. 0: nothing is known of it.
  virtual void sign(std::uint64_t call) = 0;
};

/// A mismatch that the other ranks may not see by themselves, or after which the backend cannot go
/// on: the group ends.
class FinalMismatch : public MismatchError {
 public:
  using MismatchError::MismatchError;
};

/// The same, found out by a backend that knows no more of the other ranks' calls: each rank says at
/// the group's store what it called.
class DifferentCalls : public FinalMismatch {
 public:
  using FinalMismatch::FinalMismatch;
};

/// A work whose wait() ends when its group is aborted, and whose limit ends the call: it is waited
/// for in one piece, by the thread that made the call, since its library may allow no other.
class AttentiveWork {
 public:
  virtual ~AttentiveWork() = default;
};

}  // namespace tessera::detail
