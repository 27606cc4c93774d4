#pragma once
// Operators that keep a field as it is sharded: values and gradients of one process, nothing
// redistributed (the policy is `error`), and the output's placement is that of the input.

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "support.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test {

using Shape = std::vector<std::int64_t>;
using Values = std::vector<at::Tensor>;
using OfValues = std::function<at::Tensor(const Values&)>;

/// A field sharded in some dims at random, and others replicated: forward and backward of `f`,
/// which takes and returns fields of one shape.
inline void keeps_its_cut(const char* what, int ranks, int seeds,
                          const std::function<std::pair<OfValues, std::vector<Shape>>(Draw&)>& make,
                          bool same_shape = true) {
  on_threads(ranks, [&](DistributedManager& manager) {
    Draw draw(900 + ranks);
    for (int i = 0; i < seeds; ++i) {
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const auto [f, shapes] = make(draw);
      const ShardSpec lies = draw.spec(mesh, shapes[0], false);
      test::seed(i);
      Values plain, sharded;
      for (std::size_t k = 0; k < shapes.size(); ++k) {
        const at::Tensor value = randn(shapes[k], at::kDouble);
        plain.push_back(value.clone().requires_grad_(true));
        sharded.push_back(leaf(value, k == 0 ? lies : ShardSpec::replicated(mesh, shapes[k])));
      }
      const std::string where = concat(what, " ", i, " on ", lies);
      set_policies(manager, {.redistribution = Policy::error});
      const at::Tensor expected = f(plain), got = f(sharded);
      if (same_shape) {
        ASSERT_EQ(spec(got), lies) << where;
      }
      ASSERT_LT(difference(got, expected, 1), 1e-12) << where;
      const at::Tensor along = randn(expected.sizes(), at::kDouble);
      (expected * along).sum().backward();
      // weights that lie as the field does: a replicated gradient may stay one
      (got * (same_shape ? distribute_tensor(along, lies) : along)).sum().backward();
      set_policies(manager, {.redistribution = Policy::allow});
      for (std::size_t k = 0; k < shapes.size(); ++k)
        ASSERT_LT(difference(sharded[k].grad(), plain[k].grad(), 1), 1e-11)
            << where << " input " << k;
      if (same_shape) {
        ASSERT_EQ(spec(sharded[0].grad()), lies) << where;
      }
    }
  });
}

inline std::int64_t most_bytes(const CommTrace& trace) {
  std::int64_t most = 0;
  for (const auto& e : trace.events()) most = std::max(most, e.bytes);
  return most;
}

}  // namespace tessera::test
