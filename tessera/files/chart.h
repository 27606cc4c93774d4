#pragma once
// Line charts as SVG inside a page (page.h).
//
//   chart_svg({.x_label = "step", .y_label = "loss",
//              .lines = {{"train", "#c8553d", steps, losses}}, .x_ticks = {}})

#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct ChartLine {
  /// The legend shows it; empty: not there.
  std::string name;
  std::string colour;
  std::vector<double> x, y;
  double width = 2;
  double opacity = 1;
};

struct Chart {
  std::string x_label, y_label;
  std::vector<ChartLine> lines;
  /// Empty: round numbers.
  std::vector<std::pair<double, std::string>> x_ticks;
  int width = 560, height = 300;
  /// The vertical axis begins at 0.
  bool from_zero = false;
};

/// Returns at most about `count` round numbers that cover [low, high].
std::vector<double> round_ticks(double low, double high, int count);

/// The chart with its legend; empty if no line has a point. Points that are not finite are left
/// out, and a line is broken there. Texts are escaped.
std::string chart_svg(const Chart& chart);

}  // namespace tessera
