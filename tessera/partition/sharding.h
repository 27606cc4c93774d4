#pragma once
// Sharding: which box of an N-d array each rank of a mesh holds. Rectilinear: every dim has one
// list of sizes.
//
//   A 7 x 8 array on a mesh (data 2, domain 3), dim 0 sharded over `domain` into {3, 0, 4},
//   replicated over `data`:
//   Sharding s({7, 8}, {2, 3}, {{{1}, Partition({3, 0, 4})}, {}});
//   s.box(2) -> [3, 7) x [0, 8)        // mesh position 2 = data 0, domain 2
//   s.box(5) -> the same               // data 1, domain 2

#include <cstdint>
#include <vector>

#include "tessera/partition/partition.h"

namespace tessera {

/// How one dim is sharded. `axes`: the mesh axes that shard it, first = outermost (slowest) in the
/// flattened order of the shards; empty: not sharded. With axes of sizes a and b the partition has
/// a * b shards, shard = coordinate on the first * b + coordinate on the second.
struct DimSharding {
  std::vector<int> axes;
  Partition partition;
  bool operator==(const DimSharding&) const = default;
};

class Sharding {
 public:
  /// `mesh`: size of each axis. `dims`: one per dim of `shape`; for a dim that is not sharded the
  /// partition may be left empty. `ranks`: rank of each mesh position, row-major; empty: 0, 1, 2,
  /// ... Throws InvalidArgument if counts do not match, or an axis shards two dims.
  Sharding(std::vector<std::int64_t> shape, std::vector<int> mesh, std::vector<DimSharding> dims,
           std::vector<int> ranks = {});

  const std::vector<std::int64_t>& shape() const { return shape_; }
  const std::vector<int>& mesh() const { return mesh_; }
  const std::vector<DimSharding>& dims() const { return dims_; }
  int positions() const { return positions_; }
  int rank(int position) const { return ranks_.empty() ? position : ranks_[position]; }
  const std::vector<int>& ranks() const { return ranks_; }
  /// Row-major position of a rank, -1 if it is not in the mesh.
  int position(int rank) const;
  int coordinate(int position, int axis) const { return position / stride_[axis] % mesh_[axis]; }

  /// The box of a mesh position, in global indices.
  Box box(int position) const;
  /// Axes that shard no dim: positions that differ on those alone hold the same box.
  const std::vector<int>& free_axes() const { return free_axes_; }

  /// Calls visit(position, box) for every mesh position whose box meets `region`; `box` is the
  /// intersection. Positions that hold the same box are all visited.
  template <class Visit>
  void for_each_overlapping(const Box& region, Visit visit) const {
    Box box(shape_.size());
    visit_from(region, 0, 0, box, visit);
  }

 private:
  // `at`: first the dims, then the free axes.
  template <class Visit>
  void visit_from(const Box& region, std::size_t at, int position, Box& box, Visit& visit) const;
  int position_of_part(const DimSharding& dim, int part) const;

  std::vector<std::int64_t> shape_;
  std::vector<int> mesh_, stride_;
  std::vector<DimSharding> dims_;
  std::vector<int> ranks_;
  std::vector<int> free_axes_;
  int positions_ = 1;
};

template <class Visit>
void Sharding::visit_from(const Box& region, std::size_t at, int position, Box& box,
                          Visit& visit) const {
  if (at < shape_.size()) {
    const auto& [axes, partition] = dims_[at];
    const Interval parts = axes.empty() ? Interval{0, 1} : partition.overlapping(region[at]);
    for (auto part = static_cast<int>(parts.begin); part < parts.end; ++part) {
      const Interval held = axes.empty() ? Interval{0, shape_[at]} : partition.interval(part);
      box[at] = intersect(region[at], held);
      if (!box[at].empty())
        visit_from(region, at + 1, position + position_of_part(dims_[at], part), box, visit);
    }
  } else if (at < shape_.size() + free_axes_.size()) {
    const int axis = free_axes_[at - shape_.size()];
    for (int c = 0; c < mesh_[axis]; ++c)
      visit_from(region, at + 1, position + c * stride_[axis], box, visit);
  } else {
    visit(position, box);
  }
}

}  // namespace tessera
