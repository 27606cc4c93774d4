#pragma once
// The relief of the whole earth, cut over the ranks in rows, and what a coarse look at it says.
//
// Heights are [1, 1, latitudes, longitudes] in km: latitudes from pole to pole, both included,
// longitudes once around. Fine rows are `factor` times as dense as coarse ones, and every factor-th
// of them lies on one: rows = factor * (coarse - 1) + 1.

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/sources/source.h"
#include "tessera/partition/partition.h"

namespace relief {

inline constexpr std::int64_t factor = 4;

/// `width` cells more on every side: circular in longitude, the pole rows repeated.
at::Tensor pad_globe(const at::Tensor& field, std::int64_t width);

class Field {
 public:
  /// The variable's two dims are latitude and longitude. Each rank of the mesh, which has the axis
  /// "domain" alone, reads its own rows. Throws InvalidArgument where rows or columns do not fit
  /// `factor`.
  Field(const tessera::Source& source, const std::string& variable, const tessera::DeviceMesh& mesh,
        at::ScalarType dtype);

  const tessera::DeviceMesh& mesh() const { return mesh_; }
  /// [1, 1, rows, columns], sharded in its rows.
  const at::Tensor& fine() const { return fine_; }
  std::int64_t rows() const { return fine_.size(2); }
  std::int64_t columns() const { return fine_.size(3); }
  /// Rows of each rank. They are cut evenly on the coarse grid, so that fine and coarse rows of one
  /// place have one owner; that is a choice, not a need.
  const tessera::Partition& cut() const { return cut_; }
  std::int64_t values_read() const { return values_read_; }

 private:
  tessera::DeviceMesh mesh_;
  tessera::Partition cut_;
  at::Tensor fine_;
  std::int64_t values_read_ = 0;
};

}  // namespace relief
