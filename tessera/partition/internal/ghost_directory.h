#pragma once
// The steps of a ghost plan on one rank, between which ids travel: plan_ghosts() carries them in
// memory, ops/ghosts by an all-to-all.
//
//   GhostDirectory d(rank, names, owned, needed);
//   owners = send(d.claims()), asked = send(d.questions())      ids to their homes
//   said = send(d.answers(owners, asked, &problems))            the owners, back to who asked
//   wanted = send(d.requests(said))                             ids to their owners
//   GhostRows rows = d.rows(wanted);

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/partition/ghosts.h"
#include "tessera/partition/internal/id_table.h"

namespace tessera::detail {

/// Numbers to or from each rank of the group, one rank's after the other's.
struct IdsByRank {
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> values;
};

class GhostDirectory {
 public:
  /// `names`: what each rank of the group is called in messages. All three must outlive this
  /// object. Throws InvalidArgument with the ids for a negative one, one that is owned twice, and a
  /// needed one that is owned here.
  GhostDirectory(int rank, std::span<const int> names, std::span<const std::int64_t> owned,
                 std::span<const std::int64_t> needed);

  /// The owned ids, and the needed ones, to their homes.
  IdsByRank claims() const;
  IdsByRank questions();
  /// At the home: the owner of each id that was asked for, -1 where there is none. What is wrong is
  /// appended to `problems`, with ids and ranks: ids of two owners, and of none.
  IdsByRank answers(const IdsByRank& claimed, const IdsByRank& asked, std::string& problems) const;
  /// The needed ids, to their owners.
  IdsByRank requests(const IdsByRank& answered);
  GhostRows rows(const IdsByRank& requested);

 private:
  std::span<const int> names_;
  std::span<const std::int64_t> owned_, needed_;
  IdTable row_of_;
  /// The ghost that each question is about, in the order in which they are sent.
  std::vector<std::int64_t> asked_;
  GhostRows rows_;
};

/// What is wrong with a partition, as one message: the problems of all homes.
std::string ghost_problems(std::span<const std::string> of_homes);

}  // namespace tessera::detail
