#pragma once
// Host memory: a sharded tensor may show the device that operators compute on while this rank's
// local lies in host memory. fully_shard() keeps parameters so when they are offloaded, and their
// gradients and optimizer states follow.
//
// Where a call computes follows from where the locals lie, which is the same on all ranks:
//   - in host memory, if it writes to a tensor that lies there, or if all its tensors do (one
//     without dims that lies on the device is brought along),
//   - else on the device shown; a parameter comes from what its source has gathered there, any
//     other local is copied.
// Results lie where the call computes, and show the device all the same.

#include <ATen/core/Tensor.h>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

/// Whether the local lies in host memory, and the tensor shows another device.
inline bool in_host_memory(const ShardMeta& meta) {
  return !meta.layout->device.is_cpu() && meta.local.is_cpu();
}

/// The local on the device that the tensor shows: itself where it lies there, else a copy.
at::Tensor on_device(const ShardMeta& meta);

/// A copy of `t` in host memory, page-locked if `pinned`, in the same memory order if `t` is dense.
/// Returns when it is complete.
at::Tensor to_host(const at::Tensor& t, bool pinned = false);

/// As wrap(), for a tensor that shows `device`, whichever the local lies on.
at::Tensor wrap_shown(at::Tensor local, LayoutPtr layout, c10::Device device);
/// As wrap_fresh(), likewise.
at::Tensor wrap_fresh(at::Tensor local, const LayoutPtr& layout, c10::Device device);

}  // namespace tessera::detail
