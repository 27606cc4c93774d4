#pragma once
// MeshContext: what the tensors of one mesh share on one rank: coordinate, groups, and the tables
// that make specs and layouts unique.

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tessera/comm/job/manager.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

struct Layout;
struct RankState;
class RedistributionPlans;

/// Values by hash, held weakly: an entry lives as long as it is used.
template <class T>
class InternTable {
 public:
  /// Returns the entry equal to `candidate`, which becomes an entry itself if there is none. Equal
  /// candidates have equal `hash`.
  std::shared_ptr<const T> intern(std::uint64_t hash, std::shared_ptr<const T> candidate) {
    const std::lock_guard lock(mutex_);
    auto [it, end] = entries_.equal_range(hash);
    while (it != end) {
      if (auto found = it->second.lock()) {
        if (found->same(*candidate)) return found;
        ++it;
      } else {
        it = entries_.erase(it);
      }
    }
    if (entries_.size() >= sweep_at_) {
      std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
      sweep_at_ = 2 * entries_.size() + 256;
    }
    entries_.emplace(hash, candidate);
    return candidate;
  }

 private:
  std::mutex mutex_;
  std::unordered_multimap<std::uint64_t, std::weak_ptr<const T>> entries_;
  std::size_t sweep_at_ = 256;
};

struct SpecData {
  std::shared_ptr<MeshContext> context;
  std::vector<Placement> placements;
  Sharding sharding;  // shape, axes and partition of each dim
  std::vector<std::int64_t> local_shape, local_offset;
  std::int64_t numel = 1, local_numel = 1;
  bool replicated = true, partial = false, shard = false;
  std::uint64_t hash = 0;

  bool same(const SpecData& other) const {
    return placements == other.placements && sharding.shape() == other.sharding.shape() &&
           sharding.dims() == other.sharding.dims();
  }
};

struct MeshContext {
  explicit MeshContext(const DeviceMesh& mesh);
  /// The context of this rank's view of the mesh: one for each (manager, layout) while it is used.
  static std::shared_ptr<MeshContext> of(const DeviceMesh& mesh);

  const DeviceMesh mesh;
  const std::vector<int> sizes;       // of each axis
  const std::vector<int> coordinate;  // of this rank
  int position = 0;                   // row-major
  std::shared_ptr<RankState> state;
  const std::shared_ptr<RedistributionPlans> redistributions;

  Group group(int axis) const { return mesh.group(axis); }

  InternTable<SpecData> specs;
  InternTable<Layout> layouts;
};

/// The state of a rank of a manager, made on first use.
std::shared_ptr<RankState> rank_state(const DistributedManager& manager);

/// The unique spec with these values. `shape` and `dims` must be consistent (callers that take them
/// from users check that).
ShardSpec make_spec(const std::shared_ptr<MeshContext>& context, std::vector<std::int64_t> shape,
                    std::vector<Placement> placements, std::vector<DimSharding> dims);
/// As above, with dims sharded evenly unless `parts` has a partition for them; `parts[d]` is used
/// if its extent and number of shards fit.
ShardSpec make_spec(const std::shared_ptr<MeshContext>& context, std::vector<std::int64_t> shape,
                    std::vector<Placement> placements,
                    const std::vector<const DimSharding*>& parts);

inline const std::shared_ptr<MeshContext>& context_of(const ShardSpec& spec) {
  return spec.data()->context;
}

}  // namespace tessera::detail
