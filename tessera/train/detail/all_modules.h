#pragma once
// The modules of a task as children of one, so that what takes a module takes them all, by names
// like "net.0.weight". The children stay the caller's.

#include <algorithm>
#include <memory>
#include <vector>

#include "tessera/mesh/mesh.h"
#include "tessera/tensor/spec/placement.h"
#include "tessera/train/strategy.h"

namespace tessera::detail {

struct AllModules : torch::nn::Module {
  explicit AllModules(const NamedModules& modules) {
    check_modules(modules);
    for (const NamedModule& m : modules) register_module(m.name, m.module);
  }
  // For DistributedDataParallel, which does something before it.
  void forward() {}
};

/// Those of `modules` that are not among `prepared`. In a second run over modules that lie on one
/// mesh since the first there are none.
inline NamedModules not_among(const std::vector<std::weak_ptr<torch::nn::Module>>& prepared,
                              const NamedModules& modules) {
  NamedModules fresh;
  for (const NamedModule& m : modules)
    if (std::ranges::none_of(prepared, [&](const auto& one) { return one.lock() == m.module; }))
      fresh.push_back(m);
  return fresh;
}

/// How many ranks of the mesh share each row of a batch that lies as `batch`. Throws
/// InvalidArgument, naming `strategy`, for placements that tensors of other numbers of dims cannot
/// have.
inline int ranks_sharing(const char* strategy, const std::vector<Placement>& batch,
                         const Mesh& mesh) {
  int sharing = 1;
  for (std::size_t a = 0; a < batch.size(); ++a) {
    if (batch[a].is_partial() || (batch[a].is_shard() && batch[a].dim < 0))
      throw InvalidArgument(strategy, ": a batch that lies as ", batch[a],
                            "; give Replicate or Shard of a dim counted from the first");
    if (!batch[a].is_shard(0)) sharing *= mesh.size(static_cast<int>(a));
  }
  return sharing;
}

}  // namespace tessera::detail
