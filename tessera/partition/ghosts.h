#pragma once
// Ghosts: rows of an array that a rank reads and another rank owns, where ownership is a table of
// global ids rather than intervals: nodes of a graph, cells of a mesh, particles.
//
//   rank 0 owns ids {7, 2, 9}, needs {4};  rank 1 owns {4}, needs {9, 7};  rank 2 has nothing
//   rank 0: rows 2 and 0 of its own go to rank 1; one row of rank 1 arrives
//   rank 0's local array: rows 7, 2, 9 | 4;  rank 1's: 4 | 9, 7;  rank 2's: no rows
//
// A rank's local array has its owned rows in the order in which it names them, and its ghosts
// behind them in the order in which it names those. No rank holds the ids of all: who owns an id
// is asked of the id's home, the rank that a hash of the id names, which has learnt it from the
// owner (a distributed directory, as Tpetra's and PETSc's star forests use). Memory and time grow
// with a rank's own ids, plus a few numbers per rank of the group.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// Which rows of its owned ones a rank sends to whom, and which of its ghosts come from whom.
/// Peers are in ascending order on both sides, and the rows of a message in the order of the
/// receiver's ghosts.
struct GhostRows {
  struct Peer {
    int rank = 0;
    std::int64_t rows = 0;
    bool operator==(const Peer&) const = default;
  };
  int rank = 0, ranks = 1;
  std::int64_t owned = 0, ghosts = 0;
  std::vector<Peer> sends, receives;
  /// The rows that are sent, by peer: indices into the owned rows. One row may go to several peers,
  /// and to one peer more than once.
  std::vector<std::int64_t> sent;
  /// The ghosts that arrive, by peer: indices into the ghosts, each exactly once.
  std::vector<std::int64_t> received;

  /// This rank's part as a table: "rank 1 of 3: 1 owned, 2 ghosts from 1 rank, 1 row sent to 1
  /// rank", then a line for each peer.
  std::string summary() const;
  bool operator==(const GhostRows&) const = default;
};

/// The rows of every rank at once, by the same steps as ranks that communicate: for tests and for
/// simulating large partitions. `owned[r]` and `needed[r]` are the ids of rank r; an id may be
/// needed more than once, and is then a ghost each time. Throws InvalidArgument with ids and ranks
/// for a negative id, an id that two ranks own or one rank names twice, a needed id that its rank
/// owns, and one that nobody owns.
std::vector<GhostRows> plan_ghosts(std::span<const std::vector<std::int64_t>> owned,
                                   std::span<const std::vector<std::int64_t>> needed);

/// The distinct ids of `ids` that are not in `owned`, in the order in which they come first: what a
/// rank needs whose edges name `ids`.
std::vector<std::int64_t> ghosts_of(std::span<const std::int64_t> owned,
                                    std::span<const std::int64_t> ids);

/// The row of each of `ids` in the local array: owned rows come first, then ghosts. An id that is a
/// ghost more than once has the row of the first. Throws InvalidArgument for an id that is neither.
std::vector<std::int64_t> local_rows(std::span<const std::int64_t> owned,
                                     std::span<const std::int64_t> ghosts,
                                     std::span<const std::int64_t> ids);

}  // namespace tessera
