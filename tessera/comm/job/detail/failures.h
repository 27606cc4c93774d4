#pragma once
// Failures: errors that one rank of a mesh met alone, as the ranks of the mesh count them. All
// members count alike, so that the groups that they make afterwards have the same names.

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::detail {

/// The `number`-th failure (0, 1, ...) of the ranks of one mesh.
struct Failure {
  std::vector<int> ranks;  // global, sorted
  std::uint64_t number = 0;

  /// What fault channels carry in place of a group's name; no group has such a name.
  std::string name() const;
  /// Nothing for any other text.
  static std::optional<Failure> of_name(const std::string& name);
};

/// `ranks` is sorted.
bool is_within(const std::vector<int>& members, const std::vector<int>& ranks);

class Failures {
 public:
  struct News {
    std::vector<int> ranks;  // that failed
    std::string reason;
  };

  /// This rank failed. Nothing where it has heard of a failure that is not settled yet: the two are
  /// one, which all know of, and this rank has an error of its own. Ranks that fail alike several
  /// times settle one after the other.
  std::optional<Failure> begin(const std::vector<int>& ranks);
  /// Another rank failed. False where this rank knows already: it failed at the same time, or
  /// another rank told it.
  bool hear(const Failure& failure, News news);
  /// Time has passed in which this rank might have met the same error: owed() gives it from now on.
  /// Nothing where it is no longer owed.
  std::optional<News> ripen(const Failure& failure);
  /// A call of this rank throws it. False where one has already.
  bool told(const Failure& failure);
  /// What this rank has heard, has not been told and is ripe, of meshes that hold all `members`.
  std::optional<std::pair<Failure, News>> owed(const std::vector<int>& members) const;
  /// Failures of meshes that hold all `members` of which this rank has been told.
  std::uint64_t count(const std::vector<int>& members) const;

 private:
  struct Counted {
    std::uint64_t number = 0;  // settled: by an error of its own, or a call that threw
    std::uint64_t heard = 0;   // at least that
    News news;                 // of the last one heard
    bool ripe = false;
  };
  mutable std::mutex mutex_;
  std::map<std::vector<int>, Counted> counted_;
};

}  // namespace tessera::detail
