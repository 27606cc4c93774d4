#include "tessera/partition/ghosts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "generate.h"
#include "tessera/base/error.h"
#include "tessera/partition/internal/ghost_directory.h"

namespace tessera {
namespace {

using testing::Generator;
using Ids = std::vector<std::int64_t>;
using IdsOfRanks = std::vector<Ids>;

constexpr std::int64_t kFar = std::int64_t{1} << 40;

struct DrawnOwners {
  IdsOfRanks owned, needed;
  std::map<std::int64_t, int> owner;
};

// Ids in runs, in steps or anywhere, beyond 2^31 too; some ranks without any.
DrawnOwners draw_owners(Generator& random) {
  const int ranks = static_cast<int>(random.number(1, 9));
  DrawnOwners drawn{IdsOfRanks(ranks), IdsOfRanks(ranks), {}};
  const auto n = random.number(0, 60);
  const std::int64_t first = random.chance(2) ? 0 : random.number(0, kFar);
  const std::int64_t step = random.chance(2) ? 1 : std::int64_t{1} << random.number(1, 16);
  std::vector<int> with_rows;
  for (int r = 0; r < ranks; ++r)
    if (r == 0 || !random.chance(4)) with_rows.push_back(r);
  for (std::int64_t i = 0; i < n; ++i)
    drawn.owner[first + i * step] =
        with_rows[random.number(0, static_cast<std::int64_t>(with_rows.size()) - 1)];
  Ids all;
  for (const auto& [id, owner] : drawn.owner) all.push_back(id);
  for (std::size_t i = all.size(); i > 1; --i)
    std::swap(all[i - 1], all[random.number(0, static_cast<std::int64_t>(i) - 1)]);
  for (const auto id : all) drawn.owned[drawn.owner[id]].push_back(id);
  for (int r = 0; r < ranks; ++r) {
    for (auto k = all.empty() ? 0 : random.number(0, 30); k > 0; --k) {
      const auto id = all[random.number(0, static_cast<std::int64_t>(all.size()) - 1)];
      if (drawn.owner[id] != r) drawn.needed[r].push_back(id);
    }
  }
  return drawn;
}

TEST(Ghosts, EachComesFromItsOwnerAndNothingElseIsSent) {
  Generator random(11);
  for (int n = 0; n < 4000; ++n) {
    const DrawnOwners drawn = draw_owners(random);
    const auto plans = plan_ghosts(drawn.owned, drawn.needed);
    std::int64_t sent = 0, needed = 0;
    for (std::size_t r = 0; r < plans.size(); ++r) {
      const GhostRows& plan = plans[r];
      ASSERT_EQ(plan.rank, static_cast<int>(r));
      ASSERT_EQ(plan.ranks, static_cast<int>(plans.size()));
      ASSERT_EQ(plan.owned, static_cast<std::int64_t>(drawn.owned[r].size()));
      ASSERT_EQ(plan.ghosts, static_cast<std::int64_t>(drawn.needed[r].size()));
      sent += static_cast<std::int64_t>(plan.sent.size());
      needed += plan.ghosts;
      // Every ghost gets, from the message of its owner, the row that holds its id.
      std::set<std::int64_t> filled;
      auto ghost = plan.received.begin();
      for (std::size_t p = 0; p < plan.receives.size(); ++p) {
        const auto& peer = plan.receives[p];
        ASSERT_TRUE(p == 0 || plan.receives[p - 1].rank < peer.rank) << "peers ascend";
        ASSERT_NE(peer.rank, plan.rank);
        const GhostRows& theirs = plans[peer.rank];
        auto row = theirs.sent.begin();
        auto message = theirs.sends.begin();
        for (; message != theirs.sends.end() && message->rank != plan.rank; ++message)
          row += message->rows;
        ASSERT_NE(message, theirs.sends.end());
        ASSERT_EQ(message->rows, peer.rows);
        for (std::int64_t k = 0; k < peer.rows; ++k, ++row, ++ghost) {
          ASSERT_EQ(drawn.owned[peer.rank][*row], drawn.needed[r][*ghost]);
          ASSERT_TRUE(filled.insert(*ghost).second) << "a ghost arrives once";
        }
      }
      ASSERT_EQ(static_cast<std::int64_t>(filled.size()), plan.ghosts);
    }
    ASSERT_EQ(sent, needed);
  }
}

TEST(Ghosts, TheExampleOfTheHeader) {
  const IdsOfRanks owned{{7, 2, 9}, {4}, {}}, needed{{4}, {9, 7}, {}};
  const auto plans = plan_ghosts(owned, needed);
  EXPECT_EQ(plans[0].sent, (Ids{2, 0}));
  EXPECT_EQ(plans[0].sends, (std::vector<GhostRows::Peer>{{1, 2}}));
  EXPECT_EQ(plans[0].receives, (std::vector<GhostRows::Peer>{{1, 1}}));
  EXPECT_EQ(plans[2], (GhostRows{2, 3, 0, 0, {}, {}, {}, {}}));
  EXPECT_EQ(plans[1].summary(),
            "rank 1 of 3: 1 owned, 2 ghosts from 1 rank, 1 row sent to 1 rank\n"
            "  rank 0: sends 1, receives 2\n");
  EXPECT_EQ(plan_ghosts(IdsOfRanks{}, IdsOfRanks{}).size(), 0u);
}

TEST(Ghosts, AMessageHasTheOrderOfItsReceiver) {
  const IdsOfRanks owned{{0, 1}, {2, 3}, {4}}, needed{{3, 4, 2, 3}, {}, {}};
  const auto plans = plan_ghosts(owned, needed);
  EXPECT_EQ(plans[0].received, (Ids{0, 2, 3, 1}));
  EXPECT_EQ(plans[1].sent, (Ids{1, 0, 1})) << "twice, as it is needed twice";
  EXPECT_EQ(plans[2].sent, (Ids{0}));
}

TEST(Ghosts, HomesHoldAboutAsManyIdsEachWhateverTheirPattern) {
  constexpr int kRanks = 64;
  std::vector<int> names(kRanks);
  std::iota(names.begin(), names.end(), 0);
  for (const std::int64_t step : {std::int64_t{1}, std::int64_t{64}, std::int64_t{1} << 20}) {
    Ids owned;
    for (std::int64_t i = 0; i < 64 * 1000; ++i) owned.push_back(kFar + i * step);
    detail::GhostDirectory directory(0, names, owned, {});
    const auto claims = directory.claims();
    EXPECT_LT(*std::ranges::max_element(claims.counts), 1200) << step;
    EXPECT_GT(*std::ranges::min_element(claims.counts), 800) << step;
  }
}

TEST(Ghosts, ManyRanksArePlannedAtOnce) {
  // A ring of blocks: each rank needs the last two ids of the block before, one of the next.
  constexpr std::int64_t kRanks = 500, kBlock = 200, kAll = kRanks * kBlock;
  IdsOfRanks owned(kRanks), needed(kRanks);
  for (std::int64_t r = 0; r < kRanks; ++r) {
    owned[r].resize(kBlock);
    std::iota(owned[r].begin(), owned[r].end(), r * kBlock);
    const std::int64_t first = r * kBlock + kAll;
    needed[r] = {(first - 2) % kAll, (first - 1) % kAll, (first + kBlock) % kAll};
  }
  for (const GhostRows& plan : plan_ghosts(owned, needed)) {
    EXPECT_EQ(plan.received, (plan.rank == 0            ? Ids{2, 0, 1}
                              : plan.rank + 1 == kRanks ? Ids{2, 0, 1}
                                                        : Ids{0, 1, 2}));
    EXPECT_EQ(plan.sent.size(), 3u);
    EXPECT_EQ(plan.sends.size(), 2u);
  }
}

// The text of the error, or an empty one.
std::string refusal(const IdsOfRanks& owned, const IdsOfRanks& needed) {
  try {
    plan_ghosts(owned, needed);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "";
}

TEST(Ghosts, WrongPartitionsAreRefusedWithIdsAndRanks) {
  const auto says = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(refusal({{1, 2}, {3, 2}}, {{}, {}}), "2 (ranks 0 and 1)"));
  EXPECT_TRUE(says(refusal({{1}, {3}}, {{3, 8}, {}}), "no rank owns: 8 (needed by rank 0)"));
  EXPECT_TRUE(says(refusal({{1, -4}, {3}}, {{3}, {}}), "rank 0: negative ids: -4 (owned row 1)"));
  EXPECT_TRUE(says(refusal({{1}, {3}}, {{}, {1, -1}}), "rank 1: negative ids: -1 (ghost 1)"));
  EXPECT_TRUE(says(refusal({{1}, {5, 6, 5}}, {{}, {}}), "5 (rows 0 and 2)"));
  EXPECT_TRUE(says(refusal({{1}, {5, 6}}, {{}, {1, 6}}), "owns itself: 6 (ghost 1, row 1)"));
  EXPECT_TRUE(says(refusal({{1}}, {}), "owned ids of 1 ranks"));
  // Both kinds at once, and many: the text stays short.
  Ids many(100);
  std::iota(many.begin(), many.end(), 0);
  const std::string text = refusal({many, many, {}}, {{}, {}, {1000}});
  EXPECT_TRUE(says(text, "1000 (needed by rank 2)")) << text;
  EXPECT_TRUE(says(text, "in all)")) << text;
  EXPECT_LT(text.size(), 1200u);
}

TEST(Ghosts, IdsOfEdgesBecomeRows) {
  const Ids owned{70, kFar, 9}, edges{9, 4, 70, 4, kFar + 1, 9, 0};
  const Ids ghosts = ghosts_of(owned, edges);
  EXPECT_EQ(ghosts, (Ids{4, kFar + 1, 0}));
  EXPECT_EQ(local_rows(owned, ghosts, edges), (Ids{2, 3, 0, 3, 4, 2, 5}));
  EXPECT_EQ(local_rows(owned, Ids{4, 4}, Ids{4}), (Ids{3})) << "the first of two";
  EXPECT_THROW(local_rows(owned, ghosts, Ids{9, 5}), InvalidArgument);
  EXPECT_THROW(local_rows(owned, ghosts, Ids{-1}), InvalidArgument);
  EXPECT_EQ(ghosts_of({}, {}), Ids{});
  EXPECT_EQ(ghosts_of(Ids{}, Ids{-3, 1, -3}), (Ids{-3, 1})) << "the plan refuses them";
}

}  // namespace
}  // namespace tessera
