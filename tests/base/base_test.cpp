#include <gtest/gtest.h>

#include <set>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"

namespace tessera {

TEST(Hash, IsTheSameEverywhere) {
  // Computed once from the published definitions of FNV-1a and the MurmurHash3 finaliser.
  EXPECT_EQ(Hash().value(), Hash().value());
  EXPECT_NE(Hash().text("ab").text("c").value(), Hash().text("a").text("bc").value());
  EXPECT_NE(Hash().number(1).number(2).value(), Hash().number(2).number(1).value());
}

TEST(Hash, SpreadsConsecutiveNumbers) {
  std::set<std::uint64_t> low_bits;
  for (std::uint64_t i = 0; i < 4096; ++i) low_bits.insert(Hash().number(i).value() & 0xffff);
  EXPECT_GT(low_bits.size(), 3800u);
}

TEST(Deadline, Saturates) {
  using namespace std::chrono;
  const auto now = steady_clock::now();
  const auto days_away = [&](Deadline deadline) {
    return duration_cast<hours>(deadline - now).count() / 24;
  };
  EXPECT_EQ(days_away(deadline_after(milliseconds::max(), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(hours::max(), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(nanoseconds::max(), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(milliseconds(1'000'000'000'000'000), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(duration<double>(1e300), now)), 3650);
  EXPECT_EQ(deadline_after(milliseconds(250), now) - now, milliseconds(250));
  EXPECT_EQ(deadline_after(microseconds(1), now) - now, milliseconds(1));
  for (const auto none : {milliseconds(0), milliseconds(-5), milliseconds::min()}) {
    EXPECT_EQ(deadline_after(none, now), now);
    EXPECT_EQ(bounded_limit(none), milliseconds(0));
  }
  EXPECT_EQ(deadline_after(hours(1), Deadline::max()), Deadline::max());
  EXPECT_GT(time_left(Deadline::max()), hours(24 * 365 * 100));
  EXPECT_EQ(time_left(Deadline::min()), milliseconds(0));
  EXPECT_EQ(poll_milliseconds(deadline_after(milliseconds::max())),
            std::numeric_limits<int>::max());
}

TEST(Text, ListsAndCuts) {
  EXPECT_EQ(concat("rank ", 3, " of ", 4), "rank 3 of 4");
  EXPECT_EQ(list(std::vector<int>{1, 2}), "[1, 2]");
  EXPECT_EQ(list(std::vector<int>(5, 7), 2), "[7, 7, ... (5 in all)]");
}

TEST(Error, CanBeCaughtByItsBase) {
  EXPECT_THROW(throw InvalidArgument("x"), Error);
  EXPECT_THROW(throw NotAvailable("x"), std::runtime_error);
}

}  // namespace tessera
