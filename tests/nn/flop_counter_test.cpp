// Floating-point operations counted from shapes: by hand, and over any ranks as on one process.

#include "tessera/nn/flop_counter.h"

#include <thread>

#include "support.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera::test::flop_counter_test {

namespace {

double flop_of(const std::function<at::Tensor()>& forward, bool backward = true) {
  FlopCounter counter;
  const at::Tensor result = forward();
  if (backward) result.sum().backward();
  return counter.total();
}

at::Tensor leaf(at::IntArrayRef shape) { return randn(shape, at::kDouble).requires_grad_(); }

// A convolution, attention and a perceptron, of [rows, 2, 6, 4] fields.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("convolution", convolution);
    register_module("first", first);
    register_module("second", second);
    to(at::kDouble);
    fill(*this, 3);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor tokens = convolution(x).flatten(2).transpose(1, 2);  // [rows, 24, 4]
    const at::Tensor mixed = at::scaled_dot_product_attention(tokens, tokens, tokens);
    return second(at::gelu(first(mixed))).square().mean();
  }
  torch::nn::Conv2d convolution{torch::nn::Conv2dOptions(2, 4, 3).padding(1)};
  torch::nn::Linear first{4, 8}, second{8, 3};
};
TORCH_MODULE(Net);

// The input needs no gradient.
constexpr double kOfRow = 2. * (4 * 24) * (2 * 9) * 2   // convolution: forward, its kernel
                          + 2. * 24 * 24 * (4 + 4) * 3  // attention: forward, twice that backward
                          + 2. * 24 * (4 * 8 + 8 * 3) * 3;

double sum_over(DistributedManager& manager, double mine) {
  const at::Tensor sum = at::full({1}, mine, at::kDouble);
  manager.world().all_reduce(sum);
  return sum.item<double>();
}

}  // namespace

TEST(FlopCounter, OperatorsByHand) {
  const at::Tensor a = leaf({3, 4}), b = leaf({4, 5}), plain = randn({3, 4}, at::kDouble);
  EXPECT_EQ(flop_of([&] { return at::mm(a, b); }, false), 2 * 3 * 4 * 5 * 3);
  EXPECT_EQ(flop_of([&] { return at::mm(a, b); }), 2 * 3 * 4 * 5 * 3) << "backward counts once";
  EXPECT_EQ(flop_of([&] { return plain.matmul(b); }), 2 * 3 * 4 * 5 * 2);
  EXPECT_EQ(flop_of([&] { return at::addmm(leaf({5}), plain, b); }), 2 * 3 * 4 * 5 * 2);
  EXPECT_EQ(flop_of([&] { return at::linear(leaf({2, 7, 4}), leaf({5, 4}), leaf({5})); }),
            2 * 14 * 4 * 5 * 3);
  EXPECT_EQ(flop_of([&] { return at::matmul(leaf({6, 1, 3, 4}), leaf({2, 4, 5})); }),
            2 * 6 * 2 * 3 * 4 * 5 * 3);
  EXPECT_EQ(flop_of([&] { return at::mv(a, leaf({4})); }), 2 * 3 * 4 * 3);
  EXPECT_EQ(flop_of([&] { return leaf({6}).dot(leaf({6})); }), 2 * 6 * 3);
  EXPECT_EQ(flop_of([&] { return at::baddbmm(leaf({2, 3, 5}), leaf({2, 3, 4}), leaf({2, 4, 5})); }),
            2 * 2 * 3 * 4 * 5 * 3);
  EXPECT_EQ(flop_of([&] { return at::conv2d(leaf({2, 4, 6, 6}), leaf({8, 4, 3, 3})); }),
            2 * (2 * 8 * 16) * (4 * 9) * 3);
  // Of two groups.
  EXPECT_EQ(flop_of([&] {
              return at::convolution(leaf({1, 4, 8}), leaf({6, 2, 3}), {}, {2}, {1}, {1}, false,
                                     {0}, 2);
            }),
            2 * (6 * 4) * (2 * 3) * 3);
  // What such a one is the adjoint of.
  EXPECT_EQ(flop_of([&] { return at::conv_transpose1d(leaf({1, 3, 4}), leaf({3, 2, 3})); }),
            2 * (3 * 4) * (2 * 3) * 3);
  const at::Tensor q = leaf({2, 3, 5, 4}), k = leaf({2, 3, 7, 4}), v = leaf({2, 3, 7, 6});
  EXPECT_EQ(flop_of([&] { return at::scaled_dot_product_attention(q, k, v); }),
            2 * 6 * 5 * 7 * (4 + 6) * 3);
  EXPECT_EQ(flop_of([&] { return at::scaled_dot_product_attention(q, k.detach(), v.detach()); }),
            2 * 6 * 5 * 7 * ((4 + 6) + (4 + 6)))
      << "the gradients of the weights and of the queries";
  EXPECT_EQ(
      flop_of([&] { return at::einsum("bij, bjk -> bik", {leaf({2, 3, 4}), leaf({2, 4, 5})}); }),
      2 * 2 * 3 * 4 * 5 * 3);
  // First ij,jk -> ik, of which k is summed in the second product.
  EXPECT_EQ(flop_of([&] { return at::einsum("ij,jk,k", {leaf({3, 4}), leaf({4, 5}), leaf({5})}); }),
            2 * 3 * 4 * 5 * 3 + 2 * 3 * 5 * 3);
  EXPECT_EQ(flop_of([&] { return at::einsum("...ij,jk->...ik", {leaf({2, 3, 4}), leaf({4, 5})}); }),
            2 * 6 * 4 * 5 * 3)
      << "by what it is made of";
  EXPECT_EQ(flop_of([&] { return (a * a).exp(); }), 0);
  EXPECT_EQ(flop_of([&] { return at::mm(a, leaf({4, 0})); }), 0);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(flop_of([&] { return at::mm(a, b); }, false), 2 * 3 * 4 * 5);
}

TEST(FlopCounter, CountersNestAndEnd) {
  const at::Tensor a = at::ones({2, 2});
  FlopCounter outer;
  {
    const FlopCounter inner;
    at::mm(a, a);
    EXPECT_EQ(inner.total(), 16);
  }
  EXPECT_EQ(outer.total(), 16);
  EXPECT_THROW(at::mm(a, at::ones({3, 3})), c10::Error);
  at::mm(a, a);
  EXPECT_EQ(outer.total(), 32) << "a call that throws counts nothing, and others go on";
  double other = -1;
  std::thread([&] {
    const FlopCounter own;
    at::mm(a, a);
    other = own.total();
  }).join();
  EXPECT_EQ(other, 16);
  EXPECT_EQ(outer.total(), 32);
  EXPECT_GT(measure_peak_flop(at::kCPU), 1e6);
}

// The ranks' sum is the count of one process, whatever they hold and compute.
TEST(FlopCounter, ShardedRunsHaveTheTotalOfOneProcess) {
  constexpr std::int64_t kRows = 5;
  seed(1);
  const at::Tensor x = randn({kRows, 2, 6, 4}, at::kDouble);
  Net one;
  const double expected = flop_of([&] { return one->forward(x); });
  EXPECT_EQ(expected, kRows * kOfRow);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto line = manager.mesh({{"data", ranks}});
      const auto check = [&](const std::string& what, const DeviceMesh& mesh,
                             const std::vector<Placement>& placements,
                             const std::function<void(Net&)>& prepare) {
        Net net;
        prepare(net);
        const at::Tensor input = distribute_tensor(x, mesh, placements);
        const double mine = flop_of([&] { return net->forward(input); });
        EXPECT_DOUBLE_EQ(sum_over(manager, mine), expected) << what << ", " << ranks << " ranks";
      };
      const auto replicated = [&](Net& net) { distribute_module(*net, line); };
      check("rows", line, {Shard(0)}, replicated);
      check("fields", line, {Shard(2)}, replicated);
      check("replicas", line, {Replicate()}, replicated);
      check("fully sharded", line, {Shard(0)}, [&](Net& net) { fully_shard(*net, line); });
      check("features", line, {Replicate()}, [&](Net& net) {
        tensor_parallel(*net, line, {{"first", column()}, {"second", row()}}, {.axis = "data"});
      });
      // Plain tensors: each rank's own rows.
      Net own;
      const at::Tensor mine = x.tensor_split(ranks)[static_cast<std::size_t>(manager.rank())];
      EXPECT_DOUBLE_EQ(sum_over(manager, flop_of([&] { return own->forward(mine); })), expected);
    });
  }
}

}  // namespace tessera::test::flop_counter_test
