#pragma once
// Hooks of leaves, beside those that others have set, and of the end of a backward.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>

#include "tessera/base/host_lock.h"
#include "tessera/gradient/sync.h"

namespace tessera::detail {

/// Runs after a leaf's gradient was accumulated. What had been set before runs first.
struct ChainedHook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& leaf) final {
    if (before) (*before)(leaf);
    if (accumulated) raising([&] { accumulated(leaf); });
  }

  std::function<void(const at::Tensor& leaf)> accumulated;
  /// What reduces the leaf's gradient, if this hook is its.
  std::weak_ptr<GradientSync> sync;
  std::unique_ptr<PostAccumulateGradHook> before;
};

void add_hook_after(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> accumulated,
                    const std::weak_ptr<GradientSync>& sync = {});

/// Runs before a leaf's gradient is accumulated, also for autograd::grad(), and gives what is.
/// Stays when others are added by Tensor::register_hook() of C++.
void add_hook_before(const at::Tensor& leaf,
                     std::function<at::TensorBase(const at::TensorBase&)> hook);

/// Calls `then` with what this returns, which stands for the backward that runs on this thread:
/// with true at its end, or with false where an exception ends it. That calls nobody back, but
/// destroys what was queued. A nested backward ends before the one around it.
const void* at_end_of_backward(std::function<void(const void* backward, bool completed)> then);

}  // namespace tessera::detail
