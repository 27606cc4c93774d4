// Charts and pages: what strangers logged is drawn, and never taken for markup.

#include <cmath>
#include <limits>

#include "../support/folder.h"
#include "tessera/base/text.h"
#include "tessera/files/page.h"

namespace tessera {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

Chart of(std::vector<double> values) {
  std::vector<double> steps;
  for (std::size_t i = 0; i < values.size(); ++i) steps.push_back(static_cast<double>(i));
  return {.x_label = "step",
          .y_label = "<loss>",
          .lines = {{"a & b", "#123456", steps, std::move(values)}},
          .x_ticks = {}};
}

TEST(Chart, TicksCoverWhatIsShown) {
  const double ranges[][2] = {{0, 1},     {-3, 7},       {1e-5, 3e-4}, {5, 5},   {0, 0},
                              {1e9, 1e9}, {-2e-8, 2e-8}, {0.1, 0.3},   {-1, -1}, {1e-30, 2e-30}};
  for (const auto& [low, high] : ranges) {
    const auto ticks = round_ticks(low, high, 5);
    ASSERT_GE(ticks.size(), 2u) << low << " to " << high;
    ASSERT_LE(ticks.size(), 9u) << low << " to " << high;
    EXPECT_LE(ticks.front(), low);
    EXPECT_GE(ticks.back(), high);
    for (std::size_t i = 1; i < ticks.size(); ++i) EXPECT_GT(ticks[i], ticks[i - 1]);
  }
  EXPECT_EQ(round_ticks(0, 1, 5), (std::vector<double>{0, 0.2, 0.4, 0.6, 0.8, 1}));
}

TEST(Chart, BreaksLinesWhereThereIsNoNumberAndEscapesTexts) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const std::string drawn = chart_svg(of({1, 2, nan, 3, inf, 4, 5}));
  EXPECT_EQ(count(drawn, "<polyline"), 3u);
  EXPECT_EQ(count(drawn, "nan") + count(drawn, "inf"), 0u);
  EXPECT_EQ(count(drawn, "a &amp; b"), 1u);
  EXPECT_EQ(count(drawn, "&lt;loss&gt;"), 1u);
  EXPECT_EQ(chart_svg(of({nan})), "");
  EXPECT_EQ(chart_svg(of({})), "");
  for (const auto& one : {of({7}), of({7, 7, 7}), of({0})})
    EXPECT_EQ(count(chart_svg(one), "nan"), 0u) << "what is constant has an axis";
}

TEST(Chart, LeavesRoomForTheWidestLabel) {
  Chart rate = of({1e-3, 1e-3});  // 0.0010002, ...
  EXPECT_EQ(count(chart_svg(of({0, 1})), "class=grid x1=52 "), 6u);
  EXPECT_EQ(count(chart_svg(rate), "class=grid x1=93 "), 6u);
  rate.y_label.clear();
  EXPECT_EQ(count(chart_svg(rate), "class=grid x1=77 "), 6u);
}

TEST(Page, IsWholeAndNeedsNothingBesideIt) {
  const testing::Folder folder;
  const std::string path = folder / "new/page.html";
  write_page({.title = "<7>", .style = ".x{}", .body = "<p>text</p>"}, path);
  write_page({.title = "<7>", .style = ".x{}", .body = "<p>text</p>", .dark = true, .refresh = 5},
             path);
  std::ifstream file(path);
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  for (const char* part : {"<title>&lt;7&gt;</title>", "<p>text</p>", "prefers-color-scheme:dark",
                           "http-equiv=refresh content=5", "</html>"})
    EXPECT_EQ(count(page, part), 1u) << part;
  EXPECT_EQ(count(page, "//"), 0u) << "no address";
  EXPECT_THROW(write_page({.title = "", .style = "", .body = ""}, "/proc/nowhere/page.html"),
               FileError);
}

}  // namespace
}  // namespace tessera
