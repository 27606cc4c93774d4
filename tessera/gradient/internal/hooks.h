#pragma once
// Hooks of leaves, beside those that others have set.

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

}  // namespace tessera::detail
