#include "tessera/tensor/blob.h"

#include <ATen/ops/from_blob.h>

#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera {
namespace {

using detail::Dims;

// Strides of a block of these sizes.
Dims strides_of(const Dims& sizes, MemoryOrder order) {
  if (order == MemoryOrder::row_major) return detail::contiguous_strides(sizes);
  Dims strides = detail::contiguous_strides(Dims(sizes.rbegin(), sizes.rend()));
  return {strides.rbegin(), strides.rend()};
}

void require_dims(const char* what, const Dims& given, const ShardSpec& spec) {
  if (!given.empty() && static_cast<int>(given.size()) != spec.dims())
    throw InvalidArgument("from_blob: ", what, " ", list(given), " are ", given.size(),
                          " numbers, the tensor has ", spec.dims(), " dims: ", spec);
}

void require_inside(const Dims& allocated, const Dims& before, const ShardSpec& spec) {
  const Dims& local = spec.local_shape();
  for (std::size_t d = 0; d < local.size(); ++d)
    if (before[d] < 0 || allocated[d] - before[d] < local[d])
      throw InvalidArgument("from_blob: the local ", list(local), " with ", list(before),
                            " cells before it does not fit into the allocated ", list(allocated));
}

// Elements that lie over each other would be written twice.
void require_apart(const Dims& strides, const ShardSpec& spec) {
  const Dims& local = spec.local_shape();
  for (std::size_t d = 0; d < local.size(); ++d)
    if (local[d] > 1 && strides[d] < 1)
      throw InvalidArgument("from_blob: strides ", list(strides), " of a local ", list(local),
                            ": dim ", d, " needs one of at least 1");
}

}  // namespace

at::Tensor from_blob(void* data, const ShardSpec& spec, const BlobMemory& memory,
                     const at::TensorOptions& options, const std::function<void(void*)>& deleter) {
  detail::ensure_registered();
  require_dims("allocated sizes", memory.allocated, spec);
  require_dims("the cells before it", memory.before, spec);
  require_dims("strides", memory.strides, spec);
  if (!data && spec.local_numel() > 0)
    throw InvalidArgument("from_blob: no memory for the local of ", spec);
  if (spec.has_partial())
    throw InvalidArgument("from_blob: a solver's memory holds values, not summands: ", spec);
  const Dims& local = spec.local_shape();
  const Dims before = memory.before.empty() ? Dims(local.size(), 0) : memory.before;
  const Dims block = memory.allocated.empty() ? local : memory.allocated;
  if (memory.strides.empty() || !memory.allocated.empty()) require_inside(block, before, spec);
  const Dims strides = memory.strides.empty() ? strides_of(block, memory.order) : memory.strides;
  require_apart(strides, spec);
  std::int64_t first = 0;
  for (std::size_t d = 0; d < strides.size(); ++d) first += before[d] * strides[d];
  // What the tensor shows follows from what all ranks share: of memory with gaps, the strides of a
  // whole with a gap after each row.
  Dims shown = spec.shape();
  if (!memory.allocated.empty() || !memory.strides.empty())
    for (auto& n : shown) ++n;
  const auto bytes = first * static_cast<std::int64_t>(options.dtype().itemsize());
  void* at = data ? static_cast<char*>(data) + bytes : nullptr;
  const detail::LocalCallGuard guard;
  const auto give_back = [data, deleter](void*) {
    if (deleter) deleter(data);
  };
  const at::Tensor own = at::from_blob(at, local, strides, give_back, options.requires_grad(false));
  return detail::wrap(own, detail::make_layout(spec, strides_of(shown, memory.order), 0,
                                               own.scalar_type(), own.device()))
      .requires_grad_(options.requires_grad());
}

}  // namespace tessera
