#pragma once
// A claim of a page of docs/operators/: the calls that an operator makes forward and backward on
// sharded inputs, beside the values of plain libtorch.

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "call_counts.h"
#include "support.h"

namespace tessera::test::operator_pages_test {

using Calls = std::map<std::string, int>;
using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

const Sizes kUneven{3, 0, 2};
const Calls kNothing = {};

struct Input {
  std::vector<std::int64_t> shape;
  Placement placement;
  ShardSizes sizes = {};
  bool gradient = true;
};
inline Input rows(std::vector<std::int64_t> shape) {
  return {std::move(shape), Shard(0), {{0, kUneven}}};
}
// Along another dim; sizes as even as they get.
inline Input along(std::vector<std::int64_t> shape, int dim) {
  return {std::move(shape), Shard(dim)};
}
inline Input whole_on_all(std::vector<std::int64_t> shape) {
  return {std::move(shape), Replicate()};
}

class Page {
 public:
  Page(DistributedManager& manager, Policy policy = Policy::error)
      : manager_(manager), mesh_(manager.mesh({{"x", 3}})) {
    set_policies(manager, {.redistribution = policy, .plain_values = Policy::allow});
  }
  const DeviceMesh& mesh() const { return mesh_; }

  // The calls of f on sharded inputs, and those of its backward; `backward` empty: there is none.
  // Where the loss is partial its sum is a part of no claim.
  void claim(const std::string& what, const std::vector<Input>& inputs, const Function& f,
             const Calls& forward, const std::optional<Calls>& backward = kNothing) {
    std::vector<at::Tensor> plain, sharded;
    for (const Input& i : inputs) {
      const at::Tensor value = rand(i.shape, at::kDouble) + 0.5;
      plain.push_back(value.clone().requires_grad_(i.gradient && backward.has_value()));
      sharded.push_back(leaf(value, ShardSpec(mesh_, i.shape, {i.placement}, i.sizes),
                             i.gradient && backward.has_value()));
    }
    const at::Tensor expected = f(plain);
    at::Tensor got;
    {
      const CommTraceScope trace(manager_);
      got = f(sharded);
      EXPECT_EQ(calls(*trace), forward) << what << ", forward\n" << trace->table();
    }
    EXPECT_LT(difference(got, expected), 1e-12) << what;
    if (!backward) return;
    const at::Tensor weight = randn(expected.sizes(), at::kDouble);
    (expected * weight).sum().backward();
    const at::Tensor loss = (got * distribute_tensor(weight, mesh_, {Replicate()})).sum();
    {
      const CommTraceScope trace(manager_);
      loss.backward();
      EXPECT_EQ(calls(*trace), *backward) << what << ", backward\n" << trace->table();
    }
    for (std::size_t i = 0; i < plain.size(); ++i) {
      ASSERT_EQ(sharded[i].grad().defined(), plain[i].grad().defined()) << what;
      if (plain[i].grad().defined()) {
        EXPECT_LT(difference(sharded[i].grad(), plain[i].grad()), 1e-11)
            << what << ", gradient " << i;
      }
    }
  }

  // Refused unless Policies::redistribution allows it.
  void moves_shards(const std::string& what, const std::vector<Input>& inputs, const Function& f) {
    std::vector<at::Tensor> plain, sharded;
    for (const Input& i : inputs) {
      const at::Tensor value = rand(i.shape, at::kDouble) + 0.5;
      plain.push_back(value);
      sharded.push_back(leaf(value, ShardSpec(mesh_, i.shape, {i.placement}, i.sizes), false));
    }
    EXPECT_THROW(f(sharded), ImplicitRedistributionError) << what;
    set_policies(manager_, {.redistribution = Policy::allow});
    EXPECT_LT(difference(f(sharded), f(plain)), 1e-12) << what;
    set_policies(manager_, {.redistribution = Policy::error});
  }

 private:
  DistributedManager& manager_;
  const DeviceMesh mesh_;
};

inline void page(const std::function<void(DistributedManager&, Page&)>& body) {
  on_threads(3, [&](DistributedManager& manager) {
    Page p(manager);
    body(manager, p);
  });
}

inline at::Tensor index_of(const std::vector<at::Tensor>& t,
                           const std::vector<std::int64_t>& values) {
  const at::Tensor plain = at::tensor(values, at::kLong);
  return is_sharded(t[0]) ? distribute_tensor(plain, spec(t[0]).mesh(), {Replicate()}) : plain;
}

}  // namespace tessera::test::operator_pages_test
