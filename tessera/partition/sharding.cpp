#include "tessera/partition/sharding.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/text.h"

namespace tessera {

Sharding::Sharding(std::vector<std::int64_t> shape, std::vector<int> mesh,
                   std::vector<DimSharding> dims, std::vector<int> ranks)
    : shape_(std::move(shape)),
      mesh_(std::move(mesh)),
      stride_(mesh_.size()),
      dims_(std::move(dims)),
      ranks_(std::move(ranks)) {
  for (std::size_t axis = mesh_.size(); axis-- > 0;) {
    if (mesh_[axis] < 1)
      throw InvalidArgument("mesh axis ", axis, " has size ", mesh_[axis], "; give at least 1");
    stride_[axis] = positions_;
    positions_ *= mesh_[axis];
  }
  if (dims_.size() != shape_.size())
    throw InvalidArgument(dims_.size(), " dim shardings for an array with ", shape_.size(),
                          " dims");
  if (!ranks_.empty() && static_cast<int>(ranks_.size()) != positions_)
    throw InvalidArgument(ranks_.size(), " ranks for a mesh with ", positions_, " positions");
  std::vector<int> dim_of(mesh_.size(), -1);
  for (std::size_t d = 0; d < dims_.size(); ++d) {
    if (dims_[d].axes.empty()) {
      dims_[d].partition = Partition();
      continue;
    }
    int parts = 1;
    for (int axis : dims_[d].axes) {
      if (axis < 0 || axis >= static_cast<int>(mesh_.size()))
        throw InvalidArgument("dim ", d, " is sharded over axis ", axis, " of a mesh with ",
                              counted(mesh_.size(), "axis", "axes"));
      if (dim_of[axis] >= 0)
        throw InvalidArgument("mesh axis ", axis, " shards dim ", dim_of[axis], " and dim ", d,
                              "; an axis shards one dim, once");
      dim_of[axis] = static_cast<int>(d);
      parts *= mesh_[axis];
    }
    if (dims_[d].partition.parts() != parts)
      throw InvalidArgument("dim ", d, " is sharded over ", parts, " ranks, but ",
                            dims_[d].partition.parts(),
                            " sizes were given: ", list(dims_[d].partition.sizes()));
    if (dims_[d].partition.extent() != shape_[d])
      throw InvalidArgument("the sizes of dim ", d, ", ", list(dims_[d].partition.sizes()),
                            ", add up to ", dims_[d].partition.extent(), ", not to its extent ",
                            shape_[d]);
  }
  for (std::size_t axis = 0; axis < mesh_.size(); ++axis)
    if (dim_of[axis] < 0) free_axes_.push_back(static_cast<int>(axis));
}

int Sharding::position(int rank) const {
  if (ranks_.empty()) return rank >= 0 && rank < positions_ ? rank : -1;
  const auto at = std::ranges::find(ranks_, rank);
  return at == ranks_.end() ? -1 : static_cast<int>(at - ranks_.begin());
}

Box Sharding::box(int position) const {
  Box box(shape_.size());
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    if (dims_[d].axes.empty()) {
      box[d] = {0, shape_[d]};
      continue;
    }
    int part = 0;
    for (int axis : dims_[d].axes) part = part * mesh_[axis] + coordinate(position, axis);
    box[d] = dims_[d].partition.interval(part);
  }
  return box;
}

int Sharding::position_of_part(const DimSharding& dim, int part) const {
  int position = 0;
  for (std::size_t i = dim.axes.size(); i-- > 0;) {
    const int axis = dim.axes[i];
    position += part % mesh_[axis] * stride_[axis];
    part /= mesh_[axis];
  }
  return position;
}

}  // namespace tessera
