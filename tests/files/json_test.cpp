#include "tessera/files/json.h"

#include <gtest/gtest.h>

#include <random>

#include "../support/folder.h"
#include "tessera/base/internal/json_text.h"

namespace tessera {
namespace {

TEST(Json, Values) {
  const Json json = Json::parse(
      " {\"a\" : [1, 0, 18446744073709551615, -2.5e+3], \"\\u00e9\\ud83d\\ude00\\n\":null, "
      "\"t\":true, \"f\":false, \"o\":{}, \"s\":\"x\xc3\xa9\"} ");
  EXPECT_EQ(json.at("a").items()[2].number(), ~0ull);
  EXPECT_EQ(json.members()[1].first, "\xc3\xa9\xf0\x9f\x98\x80\n");
  EXPECT_TRUE(json.at("t").boolean());
  EXPECT_FALSE(json.at("f").boolean());
  EXPECT_EQ(json.at("s").string(), "x\xc3\xa9");
  EXPECT_EQ(json.find("z"), nullptr);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { json.at("z"); }, [&] { json.at("a").items()[3].number(); },
           [&] { json.at("a").items()[2].index(); }, [&] { json.at("t").string(); },
           [&] { json.at("s").members(); }})
    testing::thrown<InvalidArgument>(call);
}

TEST(Json, BrokenTextsAreRefused) {
  for (const std::string bad : {"",
                                " ",
                                "{",
                                "}",
                                "[1,]",
                                "[1 2]",
                                "{\"a\"}",
                                "{\"a\":1,}",
                                "{\"a\":1,\"a\":2}",
                                "01",
                                "-",
                                "1.",
                                "1e",
                                "+1",
                                "nul",
                                "truex",
                                "[1]x",
                                "\"",
                                "\"\\",
                                "\"\\x\"",
                                "\"\\u12g4\"",
                                "\"\\ud800\"",
                                "\"\\ud800\\u0041\"",
                                "\"\\udc00\"",
                                "\"a\nb\"",
                                "\"\x80\"",
                                "\"\xc0\x80\"",
                                "\"\xe0\x80\x80\"",
                                "\"\xed\xa0\x80\"",
                                "\"\xf4\x90\x80\x80\"",
                                "\"\xf0\x9f\x98\"",
                                "{1:2}",
                                "'a'",
                                "[1]]",
                                "NaN",
                                "Infinity"})
    testing::thrown<InvalidArgument>([&] { Json::parse(bad); });
  testing::thrown<InvalidArgument>([] { Json::parse(std::string("\"\0\"", 3)); });
  testing::thrown<InvalidArgument>([] { Json::parse(std::string(1000000, '[')); });
  testing::thrown<InvalidArgument>([] { Json::parse("[[[1]]]", 3); });
  EXPECT_NO_THROW(Json::parse("[[[1]]]", 4));
}

TEST(Json, RealNumbers) {
  EXPECT_EQ(Json::parse("-1.5e-3").real(), -1.5e-3);
  EXPECT_EQ(Json::parse("7").real(), 7);
  testing::thrown<InvalidArgument>([] { Json::parse("1e999").real(); });
  testing::thrown<InvalidArgument>([] { Json::parse("\"7\"").real(); });
}

TEST(Json, AnyTextComesBackFromItsEscapedForm) {
  std::mt19937 engine(2);
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (int n = static_cast<int>(engine() % 20); n > 0; --n) {
      const char* const some[] = {"a",    "\"",   "\\",       "\n",
                                  "\x01", "\x7f", "\xc3\xa9", "\xe2\x82\xac"};
      text += some[engine() % 8];
    }
    ASSERT_EQ(Json::parse(json_text(text)).string(), text);
  }
}

// Any change of a byte is read as something or refused, and never more than that.
TEST(Json, ChangedBytes) {
  const std::string text =
      R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":"\u00e9"})";
  std::mt19937 engine(3);
  for (int i = 0; i < 3000; ++i) {
    std::string changed = text;
    for (int n = 1 + static_cast<int>(engine() % 3); n > 0; --n)
      changed[engine() % changed.size()] = static_cast<char>(engine());
    try {
      Json::parse(changed);
    } catch (const InvalidArgument&) {
    }
  }
}

}  // namespace
}  // namespace tessera
