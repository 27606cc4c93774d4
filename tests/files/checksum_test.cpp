#include "tessera/files/internal/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "../support/folder.h"

namespace tessera {
namespace {

TEST(Checksum, PublishedValues) {
  EXPECT_EQ(Checksum().value(), 0xEF46DB3751D8E999ull);
  EXPECT_EQ(Checksum().add("a").value(), 0xD24EC4F1A98C6E5Bull);
  EXPECT_EQ(Checksum().add("abc").value(), 0x44BC2CF5AD770999ull);
  EXPECT_EQ(Checksum().add("Nobody inspects the spammish repetition").value(),
            0xFBCEA83C8A378BF1ull);
}

TEST(Checksum, DoesNotDependOnHowBytesAreAddedAndSeesEveryBit) {
  std::mt19937 engine(1);
  for (int i = 0; i < 200; ++i) {
    std::string text(engine() % 300, '\0');
    for (char& c : text) c = static_cast<char>(engine());
    const std::uint64_t whole = Checksum().add(text).value();
    Checksum parts;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t n = std::min<std::size_t>(engine() % 70, text.size() - at);
      parts.add(text.data() + at, n);
      (void)parts.value();
      at += n;
    }
    ASSERT_EQ(parts.value(), whole);
    std::set<std::uint64_t> seen{whole};
    for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
      ASSERT_TRUE(seen.insert(Checksum().add(text).value()).second);
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
    }
  }
}

TEST(Checksum, Text) {
  EXPECT_EQ(to_hex(0x0123456789abcdefull), "0123456789abcdef");
  EXPECT_EQ(from_hex("0123456789abcdef"), 0x0123456789abcdefull);
  EXPECT_EQ(from_hex(to_hex(~0ull)), ~0ull);
  for (const char* bad : {"", "0", "0123456789abcdeg", "0123456789ABCDEF", "00123456789abcdef"})
    testing::thrown<InvalidArgument>([&] { from_hex(bad); });
}

}  // namespace
}  // namespace tessera
