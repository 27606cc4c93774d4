#pragma once
// What every call of a group shares: the reduce operation, options of one call, levels of checking,
// errors.

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

/// How values of several ranks are reduced to one. NaN of any rank propagates through sum, avg,
/// product, min and max.
struct ReduceOp {
  enum class Kind : unsigned char { sum, avg, product, min, max, premultiplied };
  Kind kind = Kind::sum;
  /// This rank's weight, for `premultiplied` only.
  double factor = 1.0;

  static const ReduceOp sum, avg, product, min, max;
  /// The sum over ranks of factor_r * x_r; every rank gives its own factor (a weighted mean is
  /// premultiplied(n_r / N)).
  static ReduceOp premultiplied(double factor) { return {Kind::premultiplied, factor}; }
  bool operator==(const ReduceOp& other) const {
    return kind == other.kind && factor == other.factor;
  }
};
inline const ReduceOp ReduceOp::sum{ReduceOp::Kind::sum, 1.0};
inline const ReduceOp ReduceOp::avg{ReduceOp::Kind::avg, 1.0};
inline const ReduceOp ReduceOp::product{ReduceOp::Kind::product, 1.0};
inline const ReduceOp ReduceOp::min{ReduceOp::Kind::min, 1.0};
inline const ReduceOp ReduceOp::max{ReduceOp::Kind::max, 1.0};

std::string to_string(ReduceOp::Kind kind);

/// How much a group verifies before it moves data. `local`: arguments of this rank alone.
/// `collective`: all ranks of the group agree on the call: operation, name, shape, dtype, root and
/// reduce operation (one more small exchange per call).
enum class CheckLevel : unsigned char { off, local, collective };

/// Options of a single call.
struct CallOptions {
  /// Time limit of this call; 0: the group's own.
  std::chrono::milliseconds timeout{0};
  /// Shown in errors and traces, and compared across ranks by CheckLevel::collective.
  std::string_view name = {};
};

/// A failure between ranks; `what()` names the group, the operation and the sequence number.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A wait ran into its limit. `missing` holds the global ranks that are known not to have arrived
/// (empty if it cannot be known).
class TimeoutError : public CommError {
 public:
  TimeoutError(const std::string& what, std::vector<int> missing)
      : CommError(what), missing_(std::move(missing)) {}
  const std::vector<int>& missing() const { return missing_; }

 private:
  std::vector<int> missing_;
};

/// A rank of the group died, threw or aborted; `ranks` holds the global ranks known to be gone
/// (empty if it cannot be known).
class PeerLostError : public CommError {
 public:
  PeerLostError(const std::string& what, std::vector<int> ranks)
      : CommError(what), ranks_(std::move(ranks)) {}
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// A rank of the group met an error that it alone saw (an index out of range in its shard), and is
/// alive; `ranks()` names it. Every rank of the mesh on which that happened gets one such error.
/// Ranks that catch it can go on: groups that are asked of the mesh or of the manager afterwards
/// are made anew, while Group values from before keep throwing this error. Ranks catch errors
/// together if the block that they catch ends in a collective call and the handler holds one:
///
///   try {
///     step();
///     world().barrier();  // no rank leaves the block before all have come through it
///   } catch (const std::exception& e) {
///     world().barrier();  // all ranks have caught it
///   }
class PeerFailedError : public PeerLostError {
 public:
  using PeerLostError::PeerLostError;
};

/// Ranks called different things; thrown on every rank, before data moves if it is noticed in time.
class MismatchError : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace tessera
