#pragma once
// Line charts as inline SVG.

#include <string>
#include <vector>

namespace pictures {

struct Line {
  /// In the legend; empty: not there.
  std::string name;
  std::string colour;
  std::vector<double> x, y;
  double width = 2;
  double opacity = 1;
};

struct Chart {
  std::string x_label, y_label;
  std::vector<Line> lines;
  /// Empty: round numbers.
  std::vector<std::pair<double, std::string>> x_ticks;
  int width = 560, height = 300;
  /// The vertical axis begins at 0.
  bool from_zero = false;
};

/// At most about `count` round numbers that cover [low, high].
std::vector<double> round_ticks(double low, double high, int count);

std::string svg(const Chart& chart);

}  // namespace pictures
