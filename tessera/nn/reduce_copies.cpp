#include "tessera/nn/reduce_copies.h"

#include <algorithm>

#include "tessera/nn/detail/parameter_gradient.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

at::Tensor copy_parameter(const at::Tensor& parameter) {
  spec(parameter);  // throws for a plain one
  const at::NoGradGuard no_grad;
  at::Tensor copy = parameter.detach().clone();
  const detail::ShardMeta& meta = *detail::meta_of(copy);
  detail::install(copy, meta.local,
                  detail::marked_like(meta.layout, *detail::meta_of(parameter)->layout));
  return copy.requires_grad_(parameter.requires_grad());
}

void reduce_copies(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const ReducerOptions& options) {
  std::vector<std::pair<DeviceMesh, std::vector<detail::UnitParameter>>> by_mesh;
  for (const auto& [name, parameter] : parameters) {
    const DeviceMesh mesh = spec(parameter).mesh();
    auto at = std::ranges::find_if(by_mesh, [&](const auto& of) { return of.first == mesh; });
    if (at == by_mesh.end()) at = by_mesh.insert(at, {mesh, {}});
    at->second.push_back({name, parameter});
  }
  for (const auto& [mesh, of] : by_mesh) detail::reduce_parameters(of, mesh, options);
}

}  // namespace tessera
