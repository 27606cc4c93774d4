#pragma once
// A state of rows of one value over all ranks, and the value that is loaded of it.

#include <string>

#include "support.h"

namespace tessera::test {

inline CheckpointState rows_state(DistributedManager& manager, double value) {
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  CheckpointState state;
  state.add("t", distribute_tensor(at::full({8, 3}, value), mesh, {Shard(0)}));
  return state;
}

inline double loaded_value(DistributedManager& manager, const std::string& folder,
                           const std::string& name) {
  const auto mesh = manager.mesh({{"x", manager.world_size()}});
  const CheckpointReader saved(manager.world(), folder, name);
  const at::Tensor t = full_tensor(saved.read("t", ShardSpec(mesh, {8, 3}, {Shard(1)})));
  EXPECT_TRUE(t.eq(t[0][0]).all().item<bool>()) << "half loaded";
  return t[0][0].item<double>();
}

}  // namespace tessera::test
