#pragma once
// RefusalScope: finds every operator of a program that refuses its placements, not only the first
// one.
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
  /// Name of the operator: "aten::some_operator".
  std::string op;
  /// The text of the error that it would have thrown.
  std::string why;
};

namespace detail {
struct RankState;
class RefusalNotes;
}  // namespace detail

/// While it lives, an operator on this manager's sharded tensors that has no rule for its arguments
/// is recorded and runs on gathered values. Operators that write to their arguments or draw random
/// numbers throw as usual. All ranks must open and close scopes alike. For examining programs, not
/// for running them: plans of refused operators are not kept, and each call gathers again.
class RefusalScope {
 public:
  explicit RefusalScope(const DistributedManager& manager);
  ~RefusalScope();
  RefusalScope(const RefusalScope&) = delete;
  RefusalScope& operator=(const RefusalScope&) = delete;

  /// The refusals so far, in order, those of backward included.
  std::vector<Refusal> refusals() const;

 private:
  std::shared_ptr<detail::RankState> state_;
  std::shared_ptr<detail::RefusalNotes> notes_, before_;
};

}  // namespace tessera
