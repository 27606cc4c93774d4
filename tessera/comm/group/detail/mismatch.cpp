#include "tessera/comm/group/detail/mismatch.h"

#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

std::string mismatch_around(const std::string& calls, MismatchAt at, const std::string& more) {
  return concat("the ranks called different things: ", calls, more,
                at == MismatchAt::before_data
                    ? ". No data was moved; make every rank call the same, in the same order"
                    : ". A call under way cannot be taken back, so the group has ended. Make the "
                      "ranks agree (CheckLevel::collective tells before data moves, and the group "
                      "goes on)");
}

std::string call_shown(const RankCall& call) { return concat("rank ", call.rank, ' ', call.what); }

}  // namespace

std::string mismatch_text(const RankCall& one, const RankCall& other, MismatchAt at,
                          const std::string& more) {
  return mismatch_around(concat(call_shown(one), "; ", call_shown(other)), at, more);
}

std::string mismatch_text(const RankCall& one, MismatchAt at, const std::string& more) {
  return mismatch_around(call_shown(one), at, more);
}

}  // namespace tessera::detail
