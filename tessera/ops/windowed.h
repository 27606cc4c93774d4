#pragma once
// What rules of operators with windows share.

#include <utility>
#include <vector>

#include "tessera/ops/labels.h"
#include "tessera/partition/interval.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

/// The same placements with other parts in some dims.
inline ShardSpec with_parts(const ShardSpec& spec, const std::vector<std::pair<int, Partition>>& parts) {
  if (!spec || parts.empty()) return spec;
  return mapped_spec(spec, spec.shape(), all_labels(spec.dims()), true, parts);
}

/// Whether a dim is spread over more than one rank.
inline bool is_cut(const ShardSpec& spec, int d) { return spec.is_sharded(d) && spec.dim(d).partition.parts() > 1; }
inline bool any_cut(const ShardSpec& spec, int first_dim) {
  for (int d = first_dim; d < spec.dims(); ++d) {
    if (is_cut(spec, d)) return true;
  }
  return false;
}

inline std::vector<std::int64_t> shape_of(const Box& box) {
  std::vector<std::int64_t> shape;
  for (const Interval& i : box) shape.push_back(i.size());
  return shape;
}

/// The part `box` of a tensor whose first element has the indices of `of`. A view.
inline at::Tensor part(at::Tensor t, const Box& of, const Box& box) {
  for (std::size_t d = 0; d < box.size(); ++d) {
    if (!(of[d] == box[d])) t = t.narrow(static_cast<std::int64_t>(d), box[d].begin - of[d].begin, box[d].size());
  }
  return t;
}

/// A number or one number a dim, as one a dim.
inline std::vector<std::int64_t> per_dim(std::vector<std::int64_t> values, std::size_t dims) {
  if (values.size() == 1) values.assign(dims, values[0]);
  return values;
}

}  // namespace tessera::detail
