#pragma once
// Modules of libtorch on the meta device, where Module::to() of C++ moves none.

#include <ATen/ops/empty_like.h>
#include <torch/nn/module.h>

namespace tessera::test {

/// Leaves the parameters and buffers of a module without memory, for every handle to them.
inline void to_meta(const torch::nn::Module& module) {
  const auto forget = [](const at::Tensor& t) {
    const at::Tensor meta = at::empty_like(t.detach(), at::TensorOptions(at::kMeta));
    if (!t.is_meta()) t.unsafeGetTensorImpl()->shallow_copy_from(meta.getIntrusivePtr());
  };
  for (const at::Tensor& p : module.parameters()) forget(p);
  for (const at::Tensor& b : module.buffers()) forget(b);
}

}  // namespace tessera::test
