#pragma once
// What a MismatchError says: the calls of two ranks, and what has become of the group.

#include <string>

namespace tessera::detail {

/// A global rank and its call: {3, "called all_reduce, sum, Float, 10 elements"}.
struct RankCall {
  int rank = 0;
  std::string what;
};

/// Before data moved: the group goes on. Under way: it has ended.
enum class MismatchAt : unsigned char { before_data, under_way };

/// "the ranks called different things: rank 0 called ...; rank 1 called .... ", and what to do.
/// `more` comes after the calls: other ranks, ranges.
std::string mismatch_text(const RankCall& one, const RankCall& other, MismatchAt at,
                          const std::string& more = {});
/// The same where the other rank's call is not known.
std::string mismatch_text(const RankCall& one, MismatchAt at, const std::string& more = {});

}  // namespace tessera::detail
