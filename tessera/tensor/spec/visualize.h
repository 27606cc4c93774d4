#pragma once
// Pictures of a spec: which rank holds which part. Arithmetic only, no communication.
//
//   std::cout << visualize_sharding(spec(x));  // a grid of parts with the ranks that hold each
//   std::ofstream("x.svg") << visualize_sharding_svg(spec(x));

#include <string>

#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// As text. Two dims are shown, the first two that are sharded (else the first two); the others are
/// whole, or named as such that are cut as well.
std::string visualize_sharding(const ShardSpec& spec);
/// The same as a self-contained SVG drawing, parts to scale.
std::string visualize_sharding_svg(const ShardSpec& spec);

}  // namespace tessera
