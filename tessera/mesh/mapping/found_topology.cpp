#include "tessera/mesh/mapping/found_topology.h"

#include "tessera/mesh/errors.h"

namespace tessera {

std::vector<int> FoundTopology::ranks(const RankMapping& mapping) const {
  const int slots = static_cast<int>(slot_of.size());
  if (static_cast<int>(mapping.slot_of.size()) != slots)
    throw MappingError("a mapping of ", mapping.slot_of.size(), " positions for a job of ", slots,
                       " ranks; map a mesh over all of them");
  std::vector<int> rank_on(slot_of.size(), -1), ranks;
  for (int r = 0; r < slots; ++r) {
    if (slot_of[r] < 0 || slot_of[r] >= slots || rank_on[slot_of[r]] >= 0)
      throw MappingError("rank ", r, " of ", slots, " is said to be on slot ", slot_of[r],
                         "; each slot from 0 has one rank");
    rank_on[slot_of[r]] = r;
  }
  for (const int slot : mapping.slot_of) {
    if (slot < 0 || slot >= slots)
      throw MappingError("a mapping has slot ", slot, ", but the slots are 0 to ", slots - 1);
    ranks.push_back(rank_on[slot]);
  }
  return ranks;
}

}  // namespace tessera
