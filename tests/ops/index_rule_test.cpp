// Rules in index notation: what they plan, and what they refuse.

#include <torch/library.h>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/ops/rules/index_rule.h"

namespace tessera::test::index_rule_test {

namespace {

at::Tensor blur(const at::Tensor& x) { return (x + x.roll(1, -1) + x.roll(-1, -1)) / 3; }
at::Tensor affine(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  const at::Tensor product = a.mm(b);
  return bias ? product + *bias : product;
}
at::Tensor widest(const at::Tensor& x) { return std::get<0>(x.max(1)); }

const bool index_rule_test_registered = [] {
  register_rule("tessera_index_rule_test::blur", index_rule("... w! -> ... w!", {.linear = true}));
  register_rule("tessera_index_rule_test::affine",
                index_rule("m k, k n, n? -> m n", {.linear = true, .added = {2}}));
  register_rule("tessera_index_rule_test::widest",
                index_rule("m n -> m", {.reduce = ReduceOp::Kind::max}));
  return true;
}();

at::Tensor call_blur(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_index_rule_test::blur", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}
at::Tensor call_affine(const at::Tensor& a, const at::Tensor& b,
                       const std::optional<at::Tensor>& bias) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_index_rule_test::affine", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&,
                                               const std::optional<at::Tensor>&)>();
  return op.call(a, b, bias);
}
at::Tensor call_widest(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_index_rule_test::widest", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

}  // namespace

TORCH_LIBRARY(tessera_index_rule_test, m) {
  m.def("blur(Tensor x) -> Tensor");
  m.def("affine(Tensor a, Tensor b, Tensor? bias) -> Tensor");
  m.def("widest(Tensor x) -> Tensor");
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::Meta}) {
    m.impl("blur", torch::dispatch(key, blur));
    m.impl("affine", torch::dispatch(key, affine));
    m.impl("widest", torch::dispatch(key, widest));
  }
}

TEST(IndexRule, KeepsWhatMayBeSharded) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = randn({2, 7, 4}, at::kDouble);
    for (const int dim : {0, 1}) {
      const at::Tensor x = leaf(value, ShardSpec(mesh, {2, 7, 4}, {Shard(dim)}), false);
      set_policies(manager, {.redistribution = Policy::error});
      const CommTraceScope trace(manager);
      const at::Tensor y = call_blur(x);
      EXPECT_TRUE(trace->events().empty()) << trace->table();
      EXPECT_EQ(spec(y), spec(x));
      EXPECT_LT(difference(y, blur(value)), 1e-14);
    }
    const at::Tensor last = leaf(value, ShardSpec(mesh, {2, 7, 4}, {Shard(2)}), false);
    EXPECT_THROW(call_blur(last), ImplicitRedistributionError);
    set_policies(manager, {.redistribution = Policy::allow});
    EXPECT_LT(difference(call_blur(last), blur(value)), 1e-14);
    const at::Tensor sum = last.sum(2, true).expand({2, 7, 4});
    EXPECT_TRUE(spec(sum).has_partial());
    const at::Tensor blurred = call_blur(sum);
    EXPECT_TRUE(spec(blurred).has_partial()) << "linear: a partial sum stays one";
    EXPECT_LT(difference(blurred, value.sum(2, true).expand({2, 7, 4})), 1e-14);
  });
}

TEST(IndexRule, ReducesAndAddsOnce) {
  for (const int ranks : {1, 2, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
      Draw draw(ranks);
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::int64_t m = draw.between(1, 5), k = draw.between(1, 5), n = draw.between(1, 5);
        test::seed(i);
        const at::Tensor a = randn({m, k}, at::kDouble), b = randn({k, n}, at::kDouble),
                         bias = randn({draw.chance(50) ? n : 1}, at::kDouble);
        const at::Tensor x = leaf(a, draw.spec(mesh, {m, k}), false),
                         y = leaf(b, draw.spec(mesh, {k, n}), false),
                         z = leaf(bias, draw.spec(mesh, bias.sizes().vec()), false);
        ASSERT_LT(difference(call_affine(x, y, z), a.mm(b) + bias, 1), 1e-13) << i;
        ASSERT_LT(difference(call_affine(x, y, std::nullopt), a.mm(b), 1), 1e-13) << i;
        // an empty shard has no maximum: even ones only
        if (k % ranks == 0) {
          const at::Tensor even =
              leaf(a,
                   ShardSpec(mesh, {m, k},
                             std::vector<Placement>(spec(x).placements().size(), Shard(1))),
                   false);
          const at::Tensor top = call_widest(even);
          ASSERT_LT(difference(top, widest(a), 1), 1e-15) << i;
        }
      }
    });
  }
}

TEST(IndexRule, RefusesWhatDoesNotAgree) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
    const at::Tensor matrix =
        leaf(at::ones({6, 4}, at::kDouble), ShardSpec(mesh, {6, 4}, {Shard(0)}), false);
    const auto goes_on = [&] { EXPECT_EQ(whole(matrix).sum().item<double>(), 24); };
    EXPECT_ANY_THROW(call_affine(matrix.select(1, 0), matrix, std::nullopt));
    goes_on();
    EXPECT_ANY_THROW(call_affine(matrix, matrix, std::nullopt));
    goes_on();
  });
  EXPECT_THROW(index_rule("m k"), RuleError);
  EXPECT_THROW(index_rule("m k -> m -> k"), RuleError);
  EXPECT_THROW(index_rule("m m -> m"), RuleError);
  EXPECT_THROW(index_rule("... m ... -> m"), RuleError);
  EXPECT_THROW(index_rule("m-k -> m"), RuleError);
}

}  // namespace tessera::test::index_rule_test
