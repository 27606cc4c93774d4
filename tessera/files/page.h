#pragma once
// Page: a report as one HTML file that needs nothing beside it, and no network.

#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct Page {
  std::string title;
  /// CSS beside that of all pages: text, cards (.card, .two), tables, charts and their legends.
  std::string style;
  /// The body begins with its heading (`h1`).
  std::string body;
  /// The page is dark where its reader prefers that; its own style must use the colours of the
  /// common one: var(--text), var(--faint), var(--card), var(--edge).
  bool dark = false;
  /// The browser reads the file again after so many seconds; 0: never.
  int refresh = 0;
};

/// Writes the page, complete or not at all. Throws FileError. Folders that are missing are made.
void write_page(const Page& page, const std::string& path);

// Line charts as SVG inside a page:
//
//   chart_svg({.x_label = "step", .y_label = "loss",
//              .lines = {{"train", "#c8553d", steps, losses}}, .x_ticks = {}})

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
