// Every reduction of the MPI backend, in all ways of mpi_ways.h, against values computed on one
// rank.

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "mpi_ways.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::test {

namespace {

TEST(Mpi, AllReduceAndReduce) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes)
      for (const auto op : kOps) {
        if (!valid(dtype, op)) continue;
        for (const auto& shape : std::vector<std::vector<std::int64_t>>{{1}, {2, 5}, {0}}) {
          const auto inputs = inputs_of(way, 1, shape, dtype);
          const at::Tensor mine = inputs[static_cast<std::size_t>(way.rank())];
          std::vector<at::Tensor> t{way.place(mine)};
          auto options = way.options<c10d::AllreduceOptions>();
          options.reduceOp = op;
          way.backend->allreduce(t, options)->wait();
          expect_same(t[0], reduced(inputs, op, dtype), label(way, dtype, "all_reduce"));

          const int root = way.size() - 1;
          std::vector<at::Tensor> u{way.place(mine)};
          auto to_root = way.options<c10d::ReduceOptions>();
          to_root.reduceOp = op;
          to_root.rootRank = root;
          way.backend->reduce(u, to_root)->wait();
          expect_same(u[0], way.rank() == root ? reduced(inputs, op, dtype) : mine,
                      label(way, dtype, "reduce"));
        }
      }
}

TEST(Mpi, PremultipliedSum) {
  for (const auto& way : ways())
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexDouble}) {
      auto inputs = inputs_of(way, 2, {3, 3}, dtype);
      const at::Tensor mine = inputs[static_cast<std::size_t>(way.rank())].clone();
      for (std::size_t r = 0; r < inputs.size(); ++r)
        inputs[r] = inputs[r].mul(0.5 * static_cast<double>(way.ranks[r] + 1));
      std::vector<at::Tensor> t{way.place(mine)};
      auto options = way.options<c10d::AllreduceOptions>();
      options.reduceOp =
          detail::to_c10d(tessera::ReduceOp::Kind::premultiplied, 0.5 * (world->rank() + 1));
      way.backend->allreduce(t, options)->wait();
      expect_same(t[0], reduced(inputs, ReduceOp::SUM, dtype), label(way, dtype, "premultiplied"));
    }
}

TEST(Mpi, BitwiseReductions) {
  const auto group = backend(*world, all_ranks(*world));
  for (const auto op : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
    std::int64_t expected = op == ReduceOp::BAND ? -1 : 0;
    for (int r = 0; r < world->size(); ++r) {
      const std::int64_t x = 0b1011 << r;
      expected = op == ReduceOp::BAND  ? expected & x
                 : op == ReduceOp::BOR ? expected | x
                                       : expected ^ x;
    }
    std::vector<at::Tensor> t{at::full({4}, std::int64_t{0b1011} << world->rank(), at::kLong)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    group->allreduce(t, options)->wait();
    EXPECT_TRUE(t[0].eq(expected).all().item<bool>()) << t[0] << expected;
  }
}

TEST(Mpi, NanOfAnyRankPropagates) {
  const auto group = backend(*world, all_ranks(*world));
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const auto op : kOps)
      for (int from = 0; from < world->size(); ++from)
        for (const bool blocking : {false, true}) {
          std::vector<at::Tensor> t{at::full({9}, 1.0 + world->rank(), dtype)};
          if (world->rank() == from) t[0][4] = std::numeric_limits<double>::quiet_NaN();
          c10d::AllreduceOptions options;
          options.reduceOp = op;
          options.asyncOp = !blocking;
          group->allreduce(t, options)->wait();
          const at::Tensor nan = t[0].to(at::kDouble).isnan();
          EXPECT_EQ(nan.sum().item<std::int64_t>(), 1)
              << c10::toString(dtype) << " NaN of rank " << from;
          EXPECT_TRUE(nan[4].item<bool>());
        }
}

// Whole numbers whose running sum cannot be held by 16 bits, while the result can: only a sum in
// float32 gives it.
TEST(Mpi, SixteenBitSumsAreMadeInFloat32) {
  if (world->size() < 3) GTEST_SKIP() << "needs 3 ranks";
  const auto group = backend(*world, all_ranks(*world));
  const double mine = world->rank() == 0   ? 256.0
                      : world->rank() == 1 ? 1.0
                      : world->rank() == 2 ? 1.0
                                           : 0.0;
  std::vector<at::Tensor> t{at::full({33}, mine, at::kBFloat16)};
  group->allreduce(t, c10d::AllreduceOptions())->wait();
  EXPECT_TRUE(t[0].to(at::kDouble).eq(258.0).all().item<bool>()) << t[0][0];
}

TEST(Mpi, ReduceScatterUneven) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes)
      for (const auto op : kOps) {
        if (!valid(dtype, op)) continue;
        for (const auto& sizes : size_lists(way.size())) {
          const auto inputs = inputs_of(way, 6, {sum(sizes), 2}, dtype);
          const auto me = static_cast<std::size_t>(way.rank());
          const at::Tensor input = inputs[me].clone();
          std::vector<at::Tensor> output{at::empty({sizes[me], 2}, dtype)};
          std::vector<std::vector<at::Tensor>> lists{input.split_with_sizes(sizes)};
          auto options = way.options<c10d::ReduceScatterOptions>();
          options.reduceOp = op;
          way.backend->reduce_scatter(output, lists, options)->wait();
          expect_same(output[0], reduced(inputs, op, dtype).split_with_sizes(sizes)[me],
                      label(way, dtype, "reduce_scatter_v"));
          expect_same(input, inputs[me], label(way, dtype, "reduce_scatter_v keeps its input"));
        }
      }
}

TEST(Mpi, LargeReductionsTravelInPieces) {
  const auto group = backend(*world, all_ranks(*world));
  const std::int64_t n = (9 << 18) + 77;
  for (const bool blocking : {false, true}) {
    std::vector<at::Tensor> t{at::arange(n, at::kFloat).fmod(1000).add(world->rank())};
    const at::Tensor expected = at::arange(n, at::kFloat)
                                    .fmod(1000)
                                    .mul(world->size())
                                    .add(world->size() * (world->size() - 1) / 2);
    c10d::AllreduceOptions options;
    options.asyncOp = !blocking;
    group->allreduce(t, options)->wait();
    EXPECT_TRUE(t[0].equal(expected));
  }
}

TEST(Mpi, LeafThatRequiresGradIsReducedInPlace) {
  const auto group = backend(*world, all_ranks(*world));
  at::Tensor leaf = at::ones({2, 2}).requires_grad_();
  at::Tensor transposed = at::ones({2, 3}).t().requires_grad_();
  for (auto& t : {leaf, transposed}) {
    std::vector<at::Tensor> list{t};
    c10d::AllreduceOptions options;
    options.reduceOp = ReduceOp::AVG;
    group->allreduce(list, options)->wait();
    EXPECT_TRUE(t.eq(1).all().item<bool>());
  }
}

}  // namespace

}  // namespace tessera::test
