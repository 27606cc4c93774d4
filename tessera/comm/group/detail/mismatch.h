#pragma once
// The text of a MismatchError: the calls of two ranks, and what has become of the group.

#include <string>

namespace tessera::detail {

/// A global rank and its call: {3, "called all_reduce, sum, Float, 10 elements"}.
struct RankCall {
  int rank = 0;
  std::string what;
};

/// before_data: no data has moved and the group goes on; under_way: the group has ended.
enum class MismatchAt : unsigned char { before_data, under_way };

/// "the ranks called different things: rank 0 called ...; rank 1 called .... ", and what to do.
/// `more` (other ranks, ranges) is shown after the calls.
std::string mismatch_text(const RankCall& one, const RankCall& other, MismatchAt at,
                          const std::string& more = {});
/// As above, where the other rank's call is not known.
std::string mismatch_text(const RankCall& one, MismatchAt at, const std::string& more = {});

}  // namespace tessera::detail
