// The soak of one host, for some seconds; that of two hosts is in tests/system/netns_test.cpp, and
// `make soak` runs it for hours. TESSERA_SOAK_SECONDS sets how long.

#include "soak.h"

namespace tessera {
namespace {

TEST(Soak, GroupsAndStrangersLeaveNothingBehind) {
  const auto time = testing::soak_time(5);
  const testing::SoakPlace place{{0, 0, 0}};
  const auto ends = testing::fork_ranks(
      3, [&](const Launch& launch) { return testing::live(place, launch, time); },
      time + std::chrono::seconds(60));
  for (const auto& end : ends) {
    EXPECT_TRUE(end.ended) << "hung";
    EXPECT_EQ(end.report.rfind("ok after", 0), 0u) << end.report << " signal " << end.signal;
  }
}

TEST(Soak, RanksThatDieEndTheirJobAndNoOther) {
  EXPECT_GT(testing::die({{0, 0, 0}}, testing::soak_time(5) / 2), 0);
}

}  // namespace
}  // namespace tessera
