// Reducers that a parameter had already when another one was made for it.

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/gradient/detail/reducer_state.h"
#include "tessera/gradient/internal/announce.h"

namespace tessera {
namespace {

// The place of `one` among `all`, of which it becomes one.
template <class T>
std::size_t place_among(std::vector<std::weak_ptr<T>>& all, const std::shared_ptr<T>& one) {
  const auto at = std::ranges::find_if(all, [&](const auto& weak) { return weak.lock() == one; });
  const auto place = static_cast<std::size_t>(at - all.begin());
  if (at == all.end()) all.push_back(one);
  return place;
}

}  // namespace

// Says which reducers of the same ranks the parameter has already, in words that the ranks compare:
// one that lives on one rank alone makes calls there that no other rank makes. `refused`: the first
// error, which follows from what is said.
std::string GradientReducer::State::find_earlier(const ReducedParameter& p,
                                                 std::exception_ptr& refused) {
  std::string text;
  for (const auto& sync : gradient_syncs({p.parameter})) {
    const auto other = std::dynamic_pointer_cast<State>(sync);
    if (!other) continue;
    place_among(earlier, other);
    const std::size_t at = other->index.at(p.parameter.unsafeGetTensorImpl());
    const Entry& entry = other->parameters[at];
    if (other->access(at).uniform() ||
        detail::shared_ranks(entry.group.ranks(), p.group.ranks()) < 2)
      continue;
    auto of = std::ranges::find_if(preceded,
                                   [&](const Preceded& known) { return known.group == p.group; });
    if (of == preceded.end()) of = preceded.insert(of, {p.group, {}});
    text += concat(", reduced already by earlier reducer ", place_among(of->by, other), " (",
                   to_string(entry.op.kind), "), which is still alive");
    const bool means = entry.op.kind == ReduceOp::Kind::avg && p.op.kind == ReduceOp::Kind::avg;
    if (!means && !refused)
      refused = std::make_exception_ptr(GradientError(concat(
          "the gradient of parameter '", p.name, "' is reduced over group '", entry.group.name(),
          "' already, which shares ranks with group '", p.group.name(),
          "': it would be counted several times. Reduce it once (list it in "
          "DistributedDataParallelOptions::ignore), or over groups that share this rank alone.")));
  }
  return text;
}

// A reducer that one rank alone has dropped since: from then on each call of that rank would meet
// another one of the others.
void GradientReducer::State::require_earlier_alike() {
  for (Preceded& of : preceded) {
    std::string alive;
    for (const auto& weak : of.by) alive += weak.expired() ? '0' : '1';
    agree::same(of.group,
                "which of the gradient reducers (DistributedDataParallel) that its parameters had "
                "before are alive (1); drop such a one on all ranks, or on none",
                alive);
    if (alive.find('1') == std::string::npos) of.by.clear();
  }
  std::erase_if(preceded, [](const Preceded& of) { return of.by.empty(); });
}

}  // namespace tessera
