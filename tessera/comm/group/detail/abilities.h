#pragma once
// Abilities: what a backend does by itself and what its calls need, as a value. A group asks for it
// once, when it is made. No other place asks which backend it has.

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "tessera/comm/group/types.h"

namespace c10d {
class Backend;
}

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

inline bool moves_every_dtype(c10::ScalarType) { return true; }

class UnevenBackend;

/// The defaults are those of a backend of c10d that says nothing: it is treated like Gloo.
struct Abilities {
  /// True if the backend does all-reduce, reduce and reduce-scatter of this dtype and operation
  /// exactly as types.h promises (NaN of any rank propagates, min / max of bool are and / or, half
  /// and bfloat16 are accumulated in float32). Otherwise the group composes the result itself.
  bool (*reduces)(c10::ScalarType dtype, ReduceOp::Kind op) = gloo_reduces;
  /// True if the backend takes tensors of this dtype as they are; otherwise the group passes their
  /// bytes as uint8.
  bool (*moves)(c10::ScalarType dtype) = every_library_moves;
  /// True if reduce() leaves the tensors of the ranks other than the root unchanged.
  bool keeps_inputs = false;
  /// Null where the backend has no uneven collectives.
  UnevenBackend* uneven = nullptr;
  /// Null, or where the group announces the next collective by a number that stands for its
  /// operation and arguments (CallCard::hash()): ranks that announce different numbers for one call
  /// do not touch each other's memory. 0: nothing is known of the call.
  std::uint64_t* signature = nullptr;
  /// True if the calls of `uneven`, too, are told apart by what is announced.
  bool signs_uneven = false;
  /// True if the wait for a collective, or for a message, returns when the group is aborted, and
  /// its time limit ends the call. The thread that made the call then waits without interruption,
  /// since the library may allow no other thread.
  bool ends_collectives = false, ends_messages = false;
  /// True if an all-gather of two ranks needs less memory as a call with counts.
  bool gathers_through_copies = false;
  /// Is added to the time limits that calls get: the group's own come first.
  std::chrono::milliseconds slack{0};
  /// True if abort() may take minutes, and shutdown() ends a sound group.
  bool aborts_slowly = false;
  /// True if after abort() threads may remain in calls that nothing but their own limit ends: the
  /// backend is then not destroyed, since its destructor would wait for them.
  bool may_hang = false;
  /// False if threads other than the one that made the group may not call it.
  bool any_thread = true;
  /// Empty, or for ranks that meet in memory: see SharedMemory::make(). The ranks meet at `store`,
  /// which belongs to their group alone. Throws MismatchError, NotAvailable, TimeoutError,
  /// PeerLostError.
  std::function<std::shared_ptr<shm::Arena>(std::size_t bytes,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds limit)>
      share;

  void sign(std::uint64_t call) const {
    if (signature) *signature = call;
  }
};

/// A backend that says what it is able to do.
class AbleBackend {
 public:
  virtual ~AbleBackend() = default;
  /// What it points to lives as long as the backend.
  virtual Abilities abilities() = 0;
};

/// The abilities of any backend; those of null are the defaults.
Abilities abilities_of(c10d::Backend* backend);

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

}  // namespace tessera::detail
