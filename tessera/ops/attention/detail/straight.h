#pragma once
// Attention inside packed documents, over ranks. Few ranks see another's keys, so those do not go
// round a ring: they come straight from the rank that has them, and their sums go straight back.

#include <deque>
#include <utility>
#include <vector>

#include "tessera/ops/attention/detail/ring.h"

namespace tessera::detail::ring_attention_rules {

/// Keys of a rank with which another one computes, from the first that it sees to the last; and
/// when, in pairs of a query and a key from its beginning.
struct Visit {
  int owner;
  Interval keys;
  std::int64_t begin, end;
};
/// All of them, in order: its own first. The same on every rank.
std::vector<Visit> visits(const Round& round, int rank);

/// What is computed with these keys, a document's queries some at a time.
std::vector<Block> blocks_of_documents(const Round& round, const Interval& keys);

/// Sends and receives what one rank must. A visit of one rank costs more than that of another, so
/// ranks do not wait for each other after each. All take messages in one order instead, that of the
/// times at which they are due if every pair costs the same; a rank waits for its earlier ones
/// alone, so that the first message that is not done can always be done.
class Courier {
 public:
  /// What this rank has of its own keys, and the sums that belong to them (or none).
  Courier(const Round& round, std::vector<at::Tensor> own, std::vector<at::Tensor> sums);
  /// Starts what is due by now; `part`: sums of the visit that this rank has made last.
  void until(std::int64_t now, const std::vector<at::Tensor>& part);
  /// The keys of the next visit.
  std::vector<at::Tensor> arrived();
  /// The rest; then all sums are complete.
  void finish(const std::vector<at::Tensor>& part);

 private:
  struct Due {
    std::int64_t time;
    // Of keys to the rank that reads them, or of their sums back.
    bool sums;
    int reader, owner;
    Interval keys;
  };
  std::vector<at::Tensor> of_mine(const std::vector<at::Tensor>& all, const Interval& keys) const;
  void add_returned();

  const Round& round_;
  const std::vector<at::Tensor> own_, sums_;
  std::vector<Due> due_;
  std::size_t next_ = 0;
  std::deque<Request> leaving_;
  std::deque<std::pair<Request, std::vector<at::Tensor>>> coming_;
  Request returning_;
  std::vector<at::Tensor> returned_;
  Interval of_returned_;
};

}  // namespace tessera::detail::ring_attention_rules
