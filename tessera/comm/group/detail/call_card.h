#pragma once
// What the ranks of a group must have in common for one call, in numbers: cheap enough to be made
// for every call, at every CheckLevel.

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

/// A collective. Two ranks whose cards differ cannot complete the call together.
struct CallCard {
  /// A string literal; empty: not described.
  const char* operation = "";
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::DeviceType device = c10::DeviceType::CPU;
  /// -1: none.
  int root = -1;
  /// A ReduceOp::Kind; -1: none.
  int op = -1;
  /// Of this rank's tensor, or with `sizes` of one row; -1: may differ between ranks.
  std::int64_t elements = -1;
  /// Rows of each rank; empty: all alike.
  std::vector<std::int64_t> sizes;

  std::uint64_t hash() const;
  /// "all_reduce, sum, Float, 10 elements".
  std::string text() const;
};

/// One message between two ranks; both ends fill it in alike.
struct MessageCard {
  /// Number of the message between these two ranks in this direction, or of the call.
  std::uint64_t number = 0;
  /// The other end, in the group.
  int peer = 0;
  bool sends = false;
  /// A part of a collective call: `number` is its sequence number.
  bool of_call = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::int64_t elements = 0;

  std::uint64_t hash() const;
  /// "Float, 10 elements".
  std::string text() const;
};

}  // namespace tessera::detail
