#include "tessera/partition/transfer.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

// Every index of a box, as a number in the global array.
std::set<std::int64_t> elements(const Box& box, const std::vector<std::int64_t>& shape) {
  std::set<std::int64_t> all{0};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::set<std::int64_t> next;
    for (std::int64_t base : all)
      for (std::int64_t i = box[d].begin; i < box[d].end; ++i) next.insert(base * shape[d] + i);
    all = std::move(next);
  }
  return all;
}

// Runs the plans of all ranks on sets of elements, and checks that each rank ends with its target
// box, having received the fewest elements possible.
void check(const Sharding& from, const Sharding& to, int world) {
  std::vector<TransferPlan> plans;
  for (int r = 0; r < world; ++r) plans.push_back(transfer_plan(from, to, r));
  std::map<std::pair<int, int>, std::vector<Box>> sent;
  for (int r = 0; r < world; ++r) {
    const int source = from.position(r);
    for (const Piece& piece : plans[r].sends) {
      ASSERT_GE(source, 0);
      ASSERT_NE(piece.rank, r);
      ASSERT_EQ(intersect(piece.box, from.box(source)), piece.box);  // a rank sends what it holds
      sent[{r, piece.rank}].push_back(piece.box);
    }
  }
  std::map<std::pair<int, int>, std::vector<Box>> received;
  for (int r = 0; r < world; ++r) {
    for (const Piece& piece : plans[r].receives) received[{piece.rank, r}].push_back(piece.box);
    const int target = to.position(r), source = from.position(r);
    if (target < 0) {
      EXPECT_TRUE(plans[r].receives.empty() && plans[r].copies.empty());
      continue;
    }
    std::multiset<std::int64_t> got;
    for (const Piece& piece : plans[r].receives)
      for (std::int64_t e : elements(piece.box, from.shape())) got.insert(e);
    for (const Box& box : plans[r].copies)
      for (std::int64_t e : elements(box, from.shape())) got.insert(e);
    const auto wanted = elements(to.box(target), to.shape());
    EXPECT_EQ(got, std::multiset<std::int64_t>(wanted.begin(), wanted.end()));  // once each
    const std::int64_t own = source < 0 ? 0 : volume(intersect(to.box(target), from.box(source)));
    EXPECT_EQ(plans[r].received(), volume(to.box(target)) - own);
  }
  EXPECT_EQ(sent, received);
}

TEST(Transfer, EveryRankGetsItsBoxWithTheFewestElements) {
  Generator random(4);
  for (int n = 0; n < 1500; ++n) {
    std::vector<std::int64_t> shape(random.number(0, 3));
    for (auto& extent : shape) extent = random.number(0, 6);
    const auto mesh = random.mesh(3, 12);
    int positions = 1;
    for (int size : mesh) positions *= size;
    const auto ranks = random.permutation(positions, positions + 2);
    check(random.sharding(shape, mesh, ranks), random.sharding(shape, mesh, ranks), positions + 2);
  }
}

TEST(Transfer, BetweenMeshesOfOtherRanks) {
  Generator random(5);
  for (int n = 0; n < 1500; ++n) {
    std::vector<std::int64_t> shape(random.number(1, 3));
    for (auto& extent : shape) extent = random.number(0, 6);
    const int world = 14;
    auto any = [&] {
      const auto mesh = random.mesh(3, 12);
      int positions = 1;
      for (int size : mesh) positions *= size;
      return random.sharding(shape, mesh, random.permutation(positions, world));
    };
    const auto from = any(), to = any();
    check(from, to, world);
  }
}

TEST(Transfer, StaysWithinAReplica) {
  // data 2 x domain 2; dim 0 over domain, {4, 2} -> {1, 5}: domain 1 gets rows 1..3 from domain 0
  // of its own data coordinate.
  const Sharding from({6}, {2, 2}, {{{1}, Partition({4, 2})}}),
      to({6}, {2, 2}, {{{1}, Partition({1, 5})}});
  for (int data = 0; data < 2; ++data) {
    const auto plan = transfer_plan(from, to, 2 * data + 1);
    EXPECT_EQ(plan.receives, (std::vector<Piece>{{2 * data, {{1, 4}}}}));
    EXPECT_EQ(plan.copies, (std::vector<Box>{{{4, 6}}}));
  }
}

TEST(Transfer, RefusesOtherShapes) {
  EXPECT_THROW(transfer_plan(Sharding({6}, {1}, {{}}), Sharding({7}, {1}, {{}}), 0),
               InvalidArgument);
}

}  // namespace
}  // namespace tessera
