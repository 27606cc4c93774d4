#pragma once
// RefusalScope: finds every operator of a program that refuses its placements, not the first one
// alone.
//
//   tessera::RefusalScope scope(manager);
//   net->forward(x);
//   for (const auto& r : scope.refusals()) std::cout << r.op << ": " << r.why << "\n";

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/job/manager.h"

namespace tessera {

struct Refusal {
  /// "aten::some_operator".
  std::string op;
  /// What it would have thrown.
  std::string why;
};

namespace detail {
struct RankState;
class RefusalNotes;
}  // namespace detail

/// While it lives, an operator of this manager's sharded tensors that has no rule for what it is
/// given is noted, and runs on gathered values. What writes to its arguments, and what draws random
/// numbers, throws as ever. All ranks must open and close scopes alike. For looking at programs,
/// not for running them: nothing that is refused is remembered, and each call gathers again.
class RefusalScope {
 public:
  explicit RefusalScope(const DistributedManager& manager);
  ~RefusalScope();
  RefusalScope(const RefusalScope&) = delete;
  RefusalScope& operator=(const RefusalScope&) = delete;

  /// So far, in order; backward's too.
  std::vector<Refusal> refusals() const;

 private:
  std::shared_ptr<detail::RankState> state_;
  std::shared_ptr<detail::RefusalNotes> notes_, before_;
};

}  // namespace tessera
