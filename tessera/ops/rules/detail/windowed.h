#pragma once
// Helpers shared by rules of windowed and image operators.

#include <c10/core/MemoryFormat.h>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/partition/internal/window_call.h"
#include "tessera/partition/interval.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera::detail {

/// The spec with other partitions in some dims.
inline ShardSpec with_parts(const ShardSpec& spec,
                            const std::vector<std::pair<int, Partition>>& parts) {
  if (!spec || parts.empty()) return spec;
  return mapped_spec(spec, spec.shape(), all_labels(spec.dims()), true, parts);
}

/// True if a dim is sharded over more than one rank.
inline bool is_distributed(const ShardSpec& spec, int d) {
  return spec.is_sharded(d) && spec.dim(d).partition.parts() > 1;
}
inline bool any_distributed(const ShardSpec& spec, int first_dim) {
  for (int d = first_dim; d < spec.dims(); ++d)
    if (is_distributed(spec, d)) return true;
  return false;
}

/// The partition whose shards end at `to(end)` in place of `end`, or where the one before ends if
/// that is later.
template <class To>
Partition with_boundaries(const Partition& parts, const To& to) {
  std::vector<std::int64_t> sizes;
  std::int64_t last = 0;
  for (int i = 0; i < parts.parts(); ++i) {
    const std::int64_t boundary = std::max<std::int64_t>(last, to(parts.interval(i).end));
    sizes.push_back(boundary - last);
    last = boundary;
  }
  return Partition(sizes);
}

/// The partition with every shard `by` times as large.
inline Partition scaled(const Partition& parts, std::int64_t by) {
  return with_boundaries(parts, [by](std::int64_t end) { return end * by; });
}

/// The partition in units of `by`, which divides the extent: each boundary is moved to the nearest
/// whole unit. in_units({5, 1, 6}, 4) -> {1, 1, 1}.
inline Partition in_units(const Partition& parts, std::int64_t by) {
  return with_boundaries(parts, [by](std::int64_t end) { return (end + by / 2) / by; });
}

/// The spec of a field of another resolution, whose last dims have these sizes and are sharded as
/// those of `x`, by resampled_partition().
inline ShardSpec resampled_spec(const ShardSpec& x, const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> shape = x.shape();
  std::ranges::copy(sizes, shape.end() - std::ssize(sizes));
  std::vector<std::pair<int, Partition>> parts;
  for (int d = x.dims() - static_cast<int>(sizes.size()); d < x.dims(); ++d)
    if (x.is_sharded(d)) parts.emplace_back(d, resampled_partition(x.dim(d).partition, shape[d]));
  return mapped_spec(x, shape, all_labels(x.dims()), false, parts);
}

/// True if libtorch treats the tensor as channels_last. One with one spatial dim is computed as
/// images of one row.
inline bool is_channels_last(std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
  if (shape.size() == 3) {
    strides.insert(strides.begin() + 2, shape[2] * strides[2]);
    shape.insert(shape.begin() + 2, 1);
  }
  return (shape.size() == 4 && c10::is_channels_last_strides_2d(shape, strides)) ||
         (shape.size() == 5 && c10::is_channels_last_strides_3d(shape, strides));
}
/// Strides with channels as the fastest dim, then the spatial dims from the last to the first.
inline std::vector<std::int64_t> channels_last(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> like(shape.size(), 0);
  for (std::size_t d = 0; d < shape.size(); ++d)
    like[d] = d == 1 ? 1 : static_cast<std::int64_t>(shape.size() - d + 1);
  return strides_in_order(shape, like);
}

/// One number per dim from a list of one number, which stands for all dims, or of one per dim.
/// Throws InvalidArgument for a list of another length; `name` is the argument's.
inline std::vector<std::int64_t> per_dim(std::vector<std::int64_t> values, std::size_t dims,
                                         const char* name) {
  if (values.size() == 1) values.assign(dims, values[0]);
  if (values.size() != dims)
    throw InvalidArgument(name, " has ", values.size(), " numbers for ", dims,
                          " spatial dims: give one, or one per dim");
  return values;
}

}  // namespace tessera::detail
