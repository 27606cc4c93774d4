#pragma once
// Types of calls between ranks that share memory: element types, reductions, time limits and
// errors. No libtorch.

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::shm {

/// The type of one element. complex64 is two float32, complex128 two float64.
enum class Element : unsigned char {
  boolean,
  int8,
  uint8,
  int16,
  uint16,
  int32,
  uint32,
  int64,
  uint64,
  half,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
};
std::size_t size_of(Element element);
const char* to_string(Element element);

/// How values of several ranks are reduced to one, always in rank order, so that results are
/// bitwise equal on all ranks and from run to run. half and bfloat16 are reduced in float32 and
/// rounded once, at the end. NaN of any rank propagates through all of them. Integers wrap around.
/// For booleans sum and max are "or", product and min are "and".
struct Reduction {
  enum class Kind : unsigned char {
    sum,
    product,
    min,
    max,
    average,
    premultiplied,
    bit_and,
    bit_or,
    bit_xor
  };
  Kind kind = Kind::sum;
  /// This rank's weight, for `premultiplied` alone: the result is the sum of factor * value.
  double factor = 1.0;
};
const char* to_string(Reduction::Kind kind);

/// True if values of this type can be reduced by this operation: min and max have no meaning for
/// complex numbers, average and premultiplied none for integers and booleans, and bit operations
/// have one only for those two.
bool reduces(Element element, Reduction::Kind kind);

/// How data are written that another rank reads next.
enum class Stores : unsigned char {
  /// Stores go through the cache.
  cached,
  /// Stores go through the cache; who alone reads them leaves their lines to itself, by a store to
  /// each, so that the next write to them need not take them from two caches.
  handed_over,
  /// Stores bypass the cache.
  past_cache,
};
const char* to_string(Stores stores);

/// The reason why ranks cannot share memory.
enum class Cause : unsigned char {
  /// Another kernel, or a network namespace of its own: the ranks' sockets do not meet.
  other_host,
  other_user,
  /// The memory could not be allocated: the message says how much was requested, and what refused
  /// it.
  no_memory,
  /// The kernel, a seccomp filter or a limit of the process forbids a call that is needed.
  not_permitted,
  too_many_ranks,
  /// The ranks were given different options, or come from different builds.
  disagreement,
  /// A rank did not come within the time limit, or died on the way.
  absent,
};
const char* to_string(Cause cause);

/// Thrown, on every rank that came, if the group could not be made.
class SetupError : public Error {
 public:
  SetupError(Cause cause, const std::string& what) : Error(what), cause_(cause) {}
  Cause cause() const { return cause_; }

 private:
  Cause cause_;
};

/// A wait ran into its limit. `missing` holds the ranks of the group that it waited for.
class TimeoutError : public Error {
 public:
  TimeoutError(const std::string& what, std::vector<int> missing, bool heard = false)
      : Error(what), missing_(std::move(missing)), heard_(heard) {}
  const std::vector<int>& missing() const { return missing_; }
  /// True if another rank's wait ran into its limit and ended the group for all.
  bool heard() const { return heard_; }

 private:
  std::vector<int> missing_;
  bool heard_;
};

/// A rank died, left, or aborted; `ranks` holds the ranks of the group known to be gone.
class PeerLostError : public Error {
 public:
  PeerLostError(const std::string& what, std::vector<int> ranks)
      : Error(what), ranks_(std::move(ranks)) {}
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// Ranks called different things, or the same thing with different sizes.
class MismatchError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera::shm
