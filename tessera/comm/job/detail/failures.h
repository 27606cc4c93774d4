#pragma once
// Failures: counts the errors that one rank of a mesh met alone. All members count alike, so that
// the groups that they make afterwards have the same names.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/group/detail/group_watch.h"

namespace tessera::detail {

/// The `number`-th failure (0, 1, ...) of the ranks of one mesh.
struct Failure {
  std::vector<int> ranks;  // global, sorted
  std::uint64_t number = 0;

  /// The text that fault channels carry in place of a group's name; no group has such a name.
  std::string name() const;
  /// The failure that a text of name() stands for; nullopt for any other text.
  static std::optional<Failure> of_name(const std::string& name);
};

/// True if all `members` belong to `ranks`, which is sorted.
bool is_within(const std::vector<int>& members, const std::vector<int>& ranks);

/// Used under its owner's lock. The news of a failure say which ranks failed, and why.
class Failures {
 public:
  /// Records that this rank failed. Returns nullopt if it has heard of a failure that is not
  /// settled yet: the two count as one, of which all ranks know, and this rank has an error of its
  /// own. Ranks that fail alike several times settle one failure after the other.
  std::optional<Failure> begin(const std::vector<int>& ranks);
  /// Records that another rank failed. Returns false if this rank knows of it: it failed at the
  /// same time, or another rank has reported it.
  bool hear(const Failure& failure, Poison news);
  /// To be called when the time has passed in which this rank might have met the same error:
  /// due_failure() returns the failure from now on. Returns nullopt if it need not be reported any
  /// more.
  std::optional<Poison> make_due(const Failure& failure);
  /// Records that a call of this rank throws the failure. Returns false if one has already.
  bool mark_thrown(const Failure& failure);
  /// The failure of a mesh that holds all `members` which this rank has heard of, which is due, and
  /// which no call has thrown yet.
  std::optional<std::pair<Failure, Poison>> due_failure(const std::vector<int>& members) const;
  /// Number of failures of meshes that hold all `members` which calls of this rank have thrown.
  std::uint64_t count(const std::vector<int>& members) const;

 private:
  struct Counted {
    std::uint64_t number = 0;  // settled: by an error of its own, or a call that threw
    std::uint64_t heard = 0;   // at least that
    Poison news;               // of the last one heard
    bool due = false;
  };
  std::map<std::vector<int>, Counted> counted_;
};

}  // namespace tessera::detail
