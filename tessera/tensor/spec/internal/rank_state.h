#pragma once
// RankState: what belongs to a rank rather than to a mesh; all meshes of one manager share it.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/TensorBase.h>

#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/policy.h"

namespace tessera::detail {

/// What the ranks of a mesh are known to agree on, as hashes. Belongs to the rank and not to the
/// context of a mesh, which lives only as long as this rank holds a tensor of it. Forgets what is
/// known of a mesh once it is much, and what is from before a failure (failures_of()), of which one
/// rank may know more than another: all of its ranks at the same time, because they add the same,
/// whatever other meshes they are in.
class Agreed {
 public:
  explicit Agreed(std::size_t most) : most_(most) {}

  bool contains(const std::vector<int>& ranks, std::uint64_t failures, std::uint64_t what) {
    const std::lock_guard lock(mutex_);
    return of(ranks, failures).contains(what);
  }
  bool full(const std::vector<int>& ranks, std::uint64_t failures) {
    const std::lock_guard lock(mutex_);
    return of(ranks, failures).size() >= most_;
  }
  /// `failures`: when the ranks began to compare it.
  void add(const std::vector<int>& ranks, std::uint64_t failures, std::uint64_t what) {
    const std::lock_guard lock(mutex_);
    auto& known = of(ranks, failures);
    if (known.size() >= most_) known.clear();
    known.insert(what);
  }

 private:
  struct Known {
    std::uint64_t failures = 0;
    std::unordered_set<std::uint64_t> hashes;
  };
  std::unordered_set<std::uint64_t>& of(const std::vector<int>& ranks, std::uint64_t failures) {
    Known& known = known_[ranks];
    if (known.failures != failures) known = {failures, {}};
    return known.hashes;
  }

  const std::size_t most_;
  std::mutex mutex_;
  std::map<std::vector<int>, Known> known_;
};

/// For meshes whose ranks failed alone: the number of the failure after which they have agreed on a
/// state of the generator, by their ranks. A state from before may differ between them.
using GeneratorMeetings = std::map<std::vector<int>, std::uint64_t>;

struct ViewCopy;

/// The views in memory of their own that are still in use: when their base is written to in another
/// way, they become stale. (Version counters do not suffice: there are none in inference mode, and
/// `.data` has one of its own.)
class ViewCopies {
 public:
  void add(ViewCopy* copy);
  void remove(ViewCopy* copy);
  /// True if wrote() has anything to do; costs one load.
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }
  /// To be called when the memory of `local` was written to; through `own`, if that is not null.
  void wrote(const at::TensorBase& local, const ViewCopy* own);

 private:
  std::atomic<int> count_ = 0;
  std::mutex mutex_;
  std::vector<ViewCopy*> live_;
};

struct RankState {
  std::mutex mutex;
  // The generator of sharded tensors: a seed and the stream of the next draw, alike on all ranks.
  std::uint64_t seed = 0x7e55e7a;
  std::uint64_t stream = 0;
  // What the ranks of meshes have agreed on of it; and of states that were read since there is any,
  // for the time when they are set again.
  GeneratorMeetings met;
  std::map<std::pair<std::uint64_t, std::uint64_t>, GeneratorMeetings> met_when_read;
  Policies policies;
  std::atomic<HaloPolicy> halo_policy = HaloPolicy{};
  Agreed agreed{4096};           // by from_local()
  Agreed compared{1024};         // by Policies::plain_values
  std::set<std::string> warned;  // warnings that were given once
  ViewCopies copies;
  ParameterSources sources;
  std::shared_ptr<std::vector<Refusal>> refusals;  // of the innermost RefusalScope
};

}  // namespace tessera::detail
