#pragma once
// What the ranks of a group must have in common for one call, as numbers: cheap enough to be made
// for every call, at every CheckLevel.
//
// The text of a MismatchError: the calls of two ranks, and what has become of the group.

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/internal/call_origin.h"

namespace tessera::detail {

/// What a collective call is for. Two ranks whose calls are for different things are not in the
/// same call, however alike their arguments.
struct CallSource {
  /// CallOptions::name.
  std::string name;
  /// Null: the call is not an operator's.
  std::shared_ptr<const CallOrigin> origin;

  /// 0 for a call without name and origin.
  std::uint64_t hash() const;
  /// ", for aten::mm of [4, 8], [8, 3]"; empty without origin.
  std::string text() const;
};

/// Describes a collective call. Two ranks whose cards differ cannot complete the call together.
struct CallCard {
  /// A string literal; empty if the call is not described.
  const char* operation = "";
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::DeviceType device = c10::DeviceType::CPU;
  /// -1: the operation has no root.
  int root = -1;
  /// A ReduceOp::Kind; -1: the operation does not reduce.
  int op = -1;
  /// Elements of this rank's tensor, or, with `sizes`, of one row; -1: may differ between ranks.
  std::int64_t elements = -1;
  /// Rows of each rank; empty: the same number on all.
  std::vector<std::int64_t> sizes;
  CallSource source;

  std::uint64_t hash() const;
  /// "all_reduce 'gradients', sum, Float, 10 elements".
  std::string text() const;
};

/// Describes one message between two ranks; both ends fill it in alike.
struct MessageCard {
  /// Number of the message between these two ranks in this direction, or of the call.
  std::uint64_t number = 0;
  /// Group rank of the other end.
  int peer = 0;
  bool sends = false;
  /// The message belongs to a collective call, and `number` is that call's sequence number.
  bool of_call = false;
  /// CallCard::hash() of that call.
  std::uint64_t call = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::int64_t elements = 0;

  std::uint64_t hash() const;
  /// The tag of a message that is delivered only to an end with the same description: above those
  /// of users, of the cards and of compared messages (checks.cpp). 8 bits of the message's number,
  /// 21 of its hash.
  int tag() const;
  /// "Float, 10 elements".
  std::string text() const;
};

/// A global rank and its call: {3, "called all_reduce, sum, Float, 10 elements"}.
struct RankCall {
  int rank = 0;
  std::string what;
};

/// before_data: no data has moved and the group goes on; under_way: the group has ended.
enum class MismatchAt : unsigned char { before_data, under_way };

/// "the ranks called different things: rank 0 called ...; rank 1 called .... ", and what to do.
/// `calls`: of two ranks, or of one where the other's is not known. `more` (other ranks, ranges) is
/// shown after them.
std::string mismatch_text(const std::vector<RankCall>& calls, MismatchAt at,
                          const std::string& more = {});

}  // namespace tessera::detail
