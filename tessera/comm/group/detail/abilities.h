#pragma once
// Abilities: what a transport does by itself and what its calls need, as a value. A group asks for
// it once, when it is made. No other place asks which transport it has.

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>

#include "tessera/comm/group/types.h"

namespace tessera::shm {
class Arena;
}  // namespace tessera::shm

namespace tessera::detail {

inline bool is_one_of(c10::ScalarType dtype, std::initializer_list<c10::ScalarType> dtypes) {
  return std::ranges::find(dtypes, dtype) != dtypes.end();
}

/// True for the dtypes that every communication library moves as they are; tensors of other dtypes
/// travel as bytes unless the backend says that it moves them.
inline bool every_library_moves(c10::ScalarType dtype) {
  using enum c10::ScalarType;
  return is_one_of(dtype, {Float, Double, Half, Char, Byte, Int, Long});
}

/// True for what Gloo reduces exactly: it computes in the dtype itself, and its min and max drop
/// NaN.
inline bool gloo_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  using enum c10::ScalarType;
  using Kind = ReduceOp::Kind;
  if (op == Kind::min || op == Kind::max) return is_one_of(dtype, {Byte, Char, Int, Long});
  return (op == Kind::sum || op == Kind::product) &&
         is_one_of(dtype, {Float, Double, Byte, Char, Int, Long});
}

/// True for what reduce_in_order() does, of any dtype.
inline bool reduces_in_order(c10::ScalarType, ReduceOp::Kind op) {
  return op != ReduceOp::Kind::premultiplied;
}

inline bool moves_every_dtype(c10::ScalarType) { return true; }

/// Reductions of bits, which c10d has and groups have not.
enum class Bits : unsigned char { none, bit_and, bit_or, bit_xor };

/// The defaults are those of a transport over a backend of c10d that says nothing: like Gloo.
struct Abilities {
  using Reduces = bool (*)(c10::ScalarType dtype, ReduceOp::Kind op);
  /// True if the transport does all-reduce and reduce of this dtype and operation exactly as
  /// types.h promises (NaN of any rank propagates, min / max of bool are and / or, half and
  /// bfloat16 are accumulated in float32). Otherwise what it is given has gone through a Recipe
  /// (reduction.h).
  Reduces reduces = gloo_reduces;
  /// Of reduce-scatter; null: as `reduces`.
  Reduces reduce_scatters = nullptr;
  /// True if it reduces integers and bool by operations on bits.
  bool reduces_bits = false;
  /// True if the transport takes tensors of this dtype as they are; otherwise the group passes
  /// their bytes as uint8.
  bool (*moves)(c10::ScalarType dtype) = every_library_moves;
  /// True if it tells calls apart by TransportCall::sign.
  bool signs = false;
  /// True if the wait for a collective, or for a message, returns when the group is aborted, and
  /// its time limit ends the call. The thread that made the call then waits without interruption,
  /// since the library may allow no other thread.
  bool ends_collectives = false, ends_messages = false;
  /// True if the lists of c10d's gather and scatter may hold tensors of different sizes on the
  /// root, which the other ranks do not know.
  bool gathers_any_sizes = false;
  /// Is added to the time limits that calls get: the group's own come first.
  std::chrono::milliseconds slack{0};
  /// True if abort() may take minutes, and shutdown() ends a sound group.
  bool aborts_slowly = false;
  /// True if after abort() threads may remain in calls that nothing but their own limit ends: the
  /// transport is then not destroyed, since its destructor would wait for them.
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

}  // namespace tessera::detail
