#pragma once
// Pictures of a spec: which rank holds which shard. Arithmetic only, no communication.
//
//   std::cout << visualize_sharding(spec(x));  // a grid of shards with the ranks that hold each
//   std::ofstream("x.svg") << visualize_sharding_svg(spec(x));

#include <string>

#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// Draws as text which rank holds which shard. Shows two dims: the first two that are sharded, or
/// else the first two. A line below names the other dims that are sharded.
std::string visualize_sharding(const ShardSpec& spec);
/// Draws visualize_sharding() as a self-contained SVG picture with the shards to scale.
std::string visualize_sharding_svg(const ShardSpec& spec);

}  // namespace tessera
