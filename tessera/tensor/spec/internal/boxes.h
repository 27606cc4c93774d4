#pragma once
// Boxes of tensors, and specs without partial sums.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/partition/interval.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

inline std::vector<std::int64_t> shape_of(const Box& box) {
  std::vector<std::int64_t> shape;
  for (const Interval& i : box) shape.push_back(i.size());
  return shape;
}

/// The box `box` of a tensor that holds the box `held`. A view.
inline at::Tensor slice(at::Tensor t, const Box& held, const Box& box) {
  for (std::size_t d = 0; d < box.size(); ++d) {
    if (!(box[d] == held[d]))
      t = t.narrow(static_cast<std::int64_t>(d), box[d].empty() ? 0 : box[d].begin - held[d].begin,
                   box[d].size());
  }
  return t;
}

/// This rank's shard of a tensor of the global shape. A view.
inline at::Tensor local_slice(at::Tensor t, const ShardSpec& spec) {
  for (int d = 0; d < spec.dims(); ++d)
    t = t.narrow(d, spec.local_offset()[d], spec.local_shape()[d]);
  return t;
}

/// The mesh axes whose placement is one for which `holds` is true.
template <class Holds>
std::vector<int> axes_where(const std::vector<Placement>& placements, const Holds& holds) {
  std::vector<int> axes;
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (holds(placements[a])) axes.push_back(static_cast<int>(a));
  return axes;
}

/// The spec with Replicate in place of Partial.
inline ShardSpec without_partial(const ShardSpec& spec) {
  auto placements = spec.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return spec.with_placements(placements);
}

/// The spec with Replicate on every axis.
inline ShardSpec replicated(const ShardSpec& spec) {
  return spec.with_placements(std::vector<Placement>(spec.placements().size()));
}

}  // namespace tessera::detail
