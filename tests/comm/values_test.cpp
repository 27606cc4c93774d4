// Values of any type between ranks, and what cannot be sent, told on all of them.

#include "tessera/comm/group/values.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/custom_class.h>

#include "../support/ranks.h"

namespace tessera::values_test {
namespace {

// A number, a text, nothing, a list, and a dictionary of tensors inside of a tuple.
c10::IValue nested(int rank) {
  c10::Dict<std::string, at::Tensor> tensors;
  tensors.insert("rows", at::full({rank, 3}, rank, at::kDouble));  // empty on rank 0
  tensors.insert("turned", at::arange(6).view({2, 3}).t());
  tensors.insert("half", at::full({2}, rank, at::kHalf));
  return c10::ivalue::Tuple::create({rank * 0.5, "rank " + std::string(rank, 'r'), c10::IValue(),
                                     c10::List<std::int64_t>({rank, -1}), tensors});
}

void expect_same(const c10::IValue& got, int rank) {
  const auto& parts = got.toTupleRef().elements();
  ASSERT_EQ(parts.size(), 5U);
  EXPECT_EQ(parts[0].toDouble(), rank * 0.5);
  EXPECT_EQ(parts[1].toStringRef(), "rank " + std::string(rank, 'r'));
  EXPECT_TRUE(parts[2].isNone());
  EXPECT_EQ(parts[3].toIntVector(), (std::vector<std::int64_t>{rank, -1}));
  const auto expected = nested(rank).toTupleRef().elements()[4].toGenericDict();
  const auto tensors = parts[4].toGenericDict();
  ASSERT_EQ(tensors.size(), expected.size());
  for (const auto& entry : expected) {
    const at::Tensor mine = tensors.at(entry.key()).toTensor(), other = entry.value().toTensor();
    EXPECT_EQ(mine.scalar_type(), other.scalar_type());
    EXPECT_EQ(mine.sizes(), other.sizes());
    EXPECT_TRUE(at::equal(mine, other));
  }
}

}  // namespace

TEST(Values, OfEveryRankOnEveryRank) {
  for (const char* backend : {"threads", "gloo"})
    for (int ranks = 1; ranks <= 3; ++ranks)
      test::on_ranks(ranks,
                     [&](DistributedManager& manager) {
                       const Group world = manager.world();
                       for (int root = 0; root < ranks; ++root) {
                         expect_same(broadcast_value(world, nested(manager.rank()), root), root);
                         const auto gathered = gather_values(world, nested(manager.rank()), root);
                         ASSERT_EQ(gathered.size(), root == manager.rank() ? ranks : 0U);
                         for (std::size_t r = 0; r < gathered.size(); ++r)
                           expect_same(gathered[r], static_cast<int>(r));
                       }
                       const auto all = all_gather_values(world, nested(manager.rank()));
                       for (std::size_t r = 0; r < all.size(); ++r)
                         expect_same(all[r], static_cast<int>(r));
                       // Each of a type of its own.
                       const auto kinds = all_gather_values(
                           world, manager.rank() == 0 ? c10::IValue(1.5) : c10::IValue("x"));
                       EXPECT_TRUE(kinds[0].isDouble());
                       for (int r = 1; r < ranks; ++r) EXPECT_EQ(kinds[r].toStringRef(), "x");
                     },
                     {.backend = backend});
}

TEST(Values, WhatOneRankCannotSendIsToldOnAll) {
  test::on_ranks(3, [](DistributedManager& manager) {
    const Group world = manager.world();
    const auto wrong = [&](const at::Tensor& t) {
      return manager.rank() == 1 ? c10::IValue(c10::List<at::Tensor>({t})) : c10::IValue(1);
    };
    const at::Tensor meta = at::empty({2}, at::TensorOptions(at::kMeta)),
                     sparse = at::eye(3).to_sparse();
    for (const at::Tensor& t : {meta, sparse}) {
      EXPECT_THROW(all_gather_values(world, wrong(t)), InvalidArgument);
      EXPECT_THROW(gather_values(world, wrong(t), 0), InvalidArgument);
      EXPECT_THROW(broadcast_value(world, wrong(t), 1), InvalidArgument);
      EXPECT_EQ(broadcast_value(world, wrong(t), 2).toInt(), 1);
    }
    EXPECT_THROW(broadcast_value(world, 1, 3), InvalidArgument);
    EXPECT_THROW(gather_values(world, 1, -1), InvalidArgument);
    EXPECT_EQ(all_gather_values(world, manager.rank())[2].toInt(), 2);  // all are in step
  });
  EXPECT_THROW(value_of_bytes("no pickle"), Error);
  EXPECT_THROW(value_of_bytes(""), Error);
  const std::string bytes = value_bytes(nested(1));
  for (const std::size_t size : {std::size_t{1}, bytes.size() / 2, bytes.size() - 1})
    EXPECT_THROW(value_of_bytes(bytes.substr(0, size)), Error);
}

}  // namespace tessera::values_test
