#pragma once
// distribute_module of a TorchScript module, as torch::jit::load() gives it.
//
//   torch::jit::Module net = torch::jit::load("net.pt");
//   tessera::distribute_module(net, mesh);
//   auto y = net.forward({x}).toTensor();   // x is sharded, and so is y

#include "tessera/nn/distribute_module.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace tessera {

/// Parameters and buffers of `module` and of those inside become sharded tensors, in place, as
/// those of a torch::nn::Module do; throws what that throws. What a trace has fixed, a device or a
/// size of a batch, stays as it is.
void distribute_module(torch::jit::Module& module, const DeviceMesh& mesh,
                       const ModuleRule& rule = {}, const ReducerOptions& options = {});

}  // namespace tessera
