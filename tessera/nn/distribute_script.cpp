#include "tessera/nn/distribute_module.h"

#include <torch/csrc/jit/api/module.h>

namespace tessera {

void distribute_module(torch::jit::Module& module, const DeviceMesh& mesh, const ModuleRule& rule,
                       const ReducerOptions& options) {
  std::vector<NamedTensor> all;
  for (const auto& p : module.named_parameters(/*recurse=*/true))
    all.push_back({p.name, p.value, true});
  for (const auto& b : module.named_buffers(/*recurse=*/true))
    all.push_back({b.name, b.value, false});
  distribute_in_place(all, mesh, rule, options);
}

}  // namespace tessera
