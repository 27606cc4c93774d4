#include "tessera/mesh/resize.h"

#include <gtest/gtest.h>

#include <numeric>

#include "random_mesh.h"
#include "refused.h"
#include "tessera/mesh/errors.h"

using namespace tessera;
using Ranks = std::vector<int>;
using Kind = RankMove::Kind;

TEST(Resize, ANewcomerReplacesTheLost) {
  const Mesh old({{"data", 3}, {"model", 2}});
  const auto resize = resize_mesh(old, "data", {0, 1, 3, 4, 5, -1});
  EXPECT_EQ(resize.mesh.ranks(), (Ranks{0, 1, 5, 2, 3, 4}));
  EXPECT_EQ(resize.count(Kind::kept), 5);
  EXPECT_EQ(resize.moves[5], (RankMove{Kind::joined, -1, 5, {}, {1, 0}}));
  EXPECT_EQ(resize.moves[6], (RankMove{Kind::left, 2, -1, {1, 0}, {}}));
}

TEST(Resize, ShrinkingFillsHolesWhereNothingElseChanges) {
  // Ranks 2 = (1, 0) and 5 = (2, 1) are lost: slice 0 is whole, 1 and 2 have one survivor each, so
  // 4 = (2, 0) fills the hole at (1, 0).
  const Mesh old({{"data", 3}, {"model", 2}});
  const auto resize = resize_mesh(old, "data", {0, 1, 3, 4});
  EXPECT_EQ(resize.mesh, Mesh({{"data", 2}, {"model", 2}}, {0, 1, 3, 2}));
  EXPECT_EQ(resize.moves[3], (RankMove{Kind::moved, 4, 3, {2, 0}, {1, 0}}));
  EXPECT_EQ(resize.count(Kind::kept), 3);
  EXPECT_EQ(resize.count(Kind::left), 2);
}

TEST(Resize, AHoleInTheFirstSliceIsFilledByWhoMovesAlongTheAxisAlone) {
  std::vector<int> ranks(12);
  std::iota(ranks.begin(), ranks.end(), 0);
  const Mesh old({{"data", 3}, {"model", 4}}, ranks);
  // (0, 0) and (0, 1) are lost; of the last slice (2, 1) is left, and one rank is new.
  const auto resize = resize_mesh(old, "data", {2, 3, 4, 5, 6, 7, 9, -1});
  EXPECT_EQ(resize.mesh.ranks(), (Ranks{7, 6, 0, 1, 2, 3, 4, 5}));
}

TEST(Resize, Growing) {
  const Mesh old({{"data", 2}, {"model", 2}}, {3, 2, 1, 0});
  const auto resize = resize_mesh(old, "data", {0, 1, 2, 3, -1, 9});
  EXPECT_EQ(resize.mesh, Mesh({{"data", 3}, {"model", 2}}, {3, 2, 1, 0, 4, 5}));
  EXPECT_EQ(resize.count(Kind::kept), 4);
  EXPECT_EQ(resize.count(Kind::joined), 2);
}

TEST(Resize, BadInput) {
  const Mesh old({{"data", 3}, {"model", 2}});
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { resize_mesh(old, "data", {0, 1, 3, 4, 5}); }),
              "use 4 or 6 ranks");
  EXPECT_SAYS(refused<WorldSizeMismatch>([&] { resize_mesh(old, "data", {0}); }), "use 2 ranks");
  EXPECT_SAYS(refused<InvalidArgument>([&] { resize_mesh(old, "data", {0, 0}); }), "old rank 0");
  EXPECT_SAYS(refused<InvalidArgument>([&] { resize_mesh(old, "x", {0, 1}); }), "no axis 'x'");
}

TEST(Resize, Properties) {
  std::mt19937 random(31);
  for (int n = 0; n < 5000; ++n) {
    const Mesh old = random_mesh(random, 3, 5, 60);
    if (old.dims() == 0) continue;
    const int along = static_cast<int>(random() % old.dims());
    const int slice = old.size() / old.size(along), new_size = pick(random, 1, 6),
              world = slice * new_size;
    auto survivors = old.ranks();
    shuffle(survivors, random);
    survivors.resize(std::min<int>(world, pick(random, 0, old.size())));
    auto old_rank_of = survivors;
    old_rank_of.resize(world, -1);
    shuffle(old_rank_of, random);
    const auto resize = resize_mesh(old, old.axes()[along].name, old_rank_of);
    ASSERT_EQ(resize.mesh.size(), world);
    ASSERT_EQ(resize.mesh.size(along), new_size);
    ASSERT_EQ(resize.count(Kind::kept) + resize.count(Kind::moved),
              static_cast<int>(survivors.size()));
    ASSERT_EQ(resize.count(Kind::left), old.size() - static_cast<int>(survivors.size()));
    for (int r = 0; r < world; ++r) {
      const auto& move = resize.moves[r];
      ASSERT_EQ(move.new_rank, r);
      ASSERT_EQ(resize.mesh.rank_at(move.to), r);
      if (move.kind == Kind::joined) continue;
      ASSERT_EQ(old_rank_of[r], move.old_rank);
      ASSERT_EQ(old.rank_at(move.from), move.old_rank);
      // A rank moves only from a slice that is gone or renumbered: none leaves a coordinate
      // that another survivor then takes, unless the slice is gone.
      if (new_size >= old.size(along)) {
        ASSERT_EQ(move.kind, Kind::kept);
      }
    }
  }
}
