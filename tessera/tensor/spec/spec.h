#pragma once
// ShardSpec: where every element of a tensor is on a mesh. Arithmetic only, no communication.
//
//   Mesh (data 2, domain 3); a 4 x 7 tensor, dim 0 over `data` as {3, 1}, dim 1 over `domain` as
//     {4, 0, 3}:
//   ShardSpec spec(mesh, {4, 7}, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {4, 0, 3}}});
//   on data 1, domain 2:  spec.local_shape() -> {1, 3}    spec.local_offset() -> {3, 4}
//
// A dim may be sharded by several axes: its sizes are over their ranks flattened, the outermost
// mesh axis slowest. With Shard(0) on both axes above, {0, {2, 1, 0, 0, 1, 0}} gives data 0 rows
// 0..2 and data 1 row 3; the shards within them may differ.
//
// Specs are immutable and interned: two equal specs of one mesh are one object, so that comparing
// them compares pointers.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/job/manager.h"
#include "tessera/partition/sharding.h"
#include "tessera/tensor/spec/placement.h"

namespace tessera {

namespace detail {
struct MeshContext;
struct SpecData;
}  // namespace detail

/// Maps a sharded dim to the sizes of its shards, over the flattened ranks of the axes that shard
/// it.
using ShardSizes = std::map<int, Sizes>;

class ShardSpec {
 public:
  ShardSpec() = default;
  /// `placements` has one entry per mesh axis. Sharded dims without sizes are sharded evenly
  /// (Partition::even). Throws InvalidArgument if counts, dims or sums do not match, if sizes are
  /// given for a dim that is not sharded, or if this rank is not in the mesh.
  ShardSpec(const DeviceMesh& mesh, const std::vector<std::int64_t>& shape,
            const std::vector<Placement>& placements, const ShardSizes& sizes = {});
  static ShardSpec replicated(const DeviceMesh& mesh, const std::vector<std::int64_t>& shape);

  explicit operator bool() const { return data_ != nullptr; }
  const DeviceMesh& mesh() const;
  /// The global shape.
  const std::vector<std::int64_t>& shape() const;
  /// One entry per mesh axis.
  const std::vector<Placement>& placements() const;
  int dims() const { return static_cast<int>(shape().size()); }
  int mesh_dims() const { return static_cast<int>(placements().size()); }
  /// The mesh axes that shard a dim, outermost first, and its partition over their flattened ranks;
  /// no axes: not sharded. Throws InvalidArgument for a dim that the tensor does not have.
  const DimSharding& dim(int d) const;
  bool is_sharded(int d) const { return !dim(d).axes.empty(); }
  /// Sizes of all shards of the sharded dims.
  ShardSizes sizes() const;

  /// True if the placement is Replicate on every axis.
  bool is_replicated() const;
  bool has_partial() const;
  bool has_shard() const;

  /// The shape of this rank's local tensor.
  const std::vector<std::int64_t>& local_shape() const;
  /// Global index of this rank's first element, per dim.
  const std::vector<std::int64_t>& local_offset() const;
  std::int64_t numel() const;
  std::int64_t local_numel() const;
  /// The boxes of all ranks in global indices; axes that are Partial count as replicated.
  const Sharding& sharding() const;

  /// Returns the spec with other placements on the same mesh. Dims that stay sharded by the same
  /// axes keep their sizes, others are sharded evenly. Throws InvalidArgument unless there is one
  /// placement per axis, and for one that shards a dim that the tensor does not have.
  ShardSpec with_placements(const std::vector<Placement>& placements) const;
  /// Returns the spec with the placement of one axis replaced. Throws InvalidArgument for an axis
  /// that the mesh does not have, or a dim that the tensor does not have.
  ShardSpec with_placement(int axis, Placement placement) const;

  /// "[4, 7] data=Shard(0){3, 1} domain=Replicate".
  std::string to_string() const;
  bool operator==(const ShardSpec& other) const { return data_ == other.data_; }

  const std::shared_ptr<const detail::SpecData>& data() const { return data_; }
  explicit ShardSpec(std::shared_ptr<const detail::SpecData> data) : data_(std::move(data)) {}

 private:
  std::shared_ptr<const detail::SpecData> data_;
};

std::ostream& operator<<(std::ostream& out, const ShardSpec& spec);

// Pictures: which rank holds which shard.
//
//   std::cout << visualize_sharding(spec(x));  // a grid of shards with the ranks that hold each
//   std::ofstream("x.svg") << visualize_sharding_svg(spec(x));

/// Draws as text which rank holds which shard. Shows two dims: the first two that are sharded, or
/// else the first two. A line below names the other dims that are sharded.
std::string visualize_sharding(const ShardSpec& spec);
/// Draws visualize_sharding() as a self-contained SVG picture with the shards to scale.
std::string visualize_sharding_svg(const ShardSpec& spec);

}  // namespace tessera
