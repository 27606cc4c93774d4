#include "tessera/files/chart.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "tessera/base/markup_text.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

std::vector<double> round_ticks(double low, double high, int count) {
  // What is constant has an axis all the same.
  const double span = std::max({high - low, 1e-3 * std::max(std::abs(low), std::abs(high)), 1e-12});
  high = low + span;
  const double rough = span / count, exponent = std::floor(std::log10(rough)),
               power = std::pow(10.0, exponent), inverse = std::pow(10.0, -exponent);
  double factor = 10;
  for (const double f : {5.0, 2.5, 2.0, 1.0})
    if (f * power >= rough) factor = f;
  std::vector<double> ticks;
  for (auto n = static_cast<std::int64_t>(std::floor(low / (factor * power)));; ++n) {
    const auto i = static_cast<double>(n);
    if ((i - 1) * factor * power >= high) return ticks;
    ticks.push_back(exponent < 0 ? i * factor / inverse : i * factor * power);
  }
}

namespace {

// Without the points that are not finite, where the line has gaps.
template <class X, class Y>
void draw(TextStream& out, const ChartLine& line, const X& px, const Y& py) {
  bool drawing = false;
  for (std::size_t i = 0; i < line.x.size(); ++i) {
    const bool is_point = std::isfinite(line.y[i]);
    if (is_point && !drawing)
      out << "<polyline fill=none stroke-linejoin=round stroke-linecap=round stroke='"
          << line.colour << "' stroke-width=" << line.width << " opacity=" << line.opacity
          << " points='";
    if (!is_point && drawing) out << "' />";
    if (is_point) out << px(line.x[i]) << ',' << py(line.y[i]) << ' ';
    drawing = is_point;
  }
  if (drawing) out << "' />";
}

}  // namespace

std::string chart_svg(const Chart& chart) {
  constexpr double right = 14, top = 10, bottom = 44;
  double x0 = std::numeric_limits<double>::max(), x1 = -x0, y0 = x0, y1 = -x0;
  for (const ChartLine& line : chart.lines) {
    for (std::size_t i = 0; i < line.x.size(); ++i) {
      if (!std::isfinite(line.y[i])) continue;
      x0 = std::min(x0, line.x[i]), x1 = std::max(x1, line.x[i]);
      y0 = std::min(y0, line.y[i]), y1 = std::max(y1, line.y[i]);
    }
  }
  if (!(x0 <= x1)) return {};
  if (x0 == x1) x1 = x0 + 1;
  if (chart.from_zero) y0 = std::min(y0, 0.0);
  const std::vector<double> y_ticks = round_ticks(y0, y1, 5);
  y0 = y_ticks.front(), y1 = y_ticks.back();
  // Of the widest label; 12 pixels of a sans-serif font take at most 7 a digit.
  const double beside = chart.y_label.empty() ? 14 : 30;
  double left = 52;
  for (const double y : y_ticks)
    left = std::max(left, beside + 7.0 * static_cast<double>(significant(y, 5).size()));
  auto x_ticks = chart.x_ticks;
  if (x_ticks.empty())
    for (const double x : round_ticks(x0, x1, 7))
      if (x >= x0 && x <= x1) x_ticks.emplace_back(x, concat(x));
  const double w = chart.width - left - right, h = chart.height - top - bottom;
  const auto px = [&](double x) { return left + w * (x - x0) / (x1 - x0); };
  const auto py = [&](double y) { return top + h * (y1 - y) / (y1 - y0); };

  TextStream out;
  out.precision(5);
  out << "<svg class=chart viewBox='0 0 " << chart.width << ' ' << chart.height << "' role=img>";
  for (const double y : y_ticks)
    out << "<line class=grid x1=" << left << " x2=" << left + w << " y1=" << py(y)
        << " y2=" << py(y) << " /><text class=tick text-anchor=end x=" << left - 7
        << " y=" << py(y) + 4 << '>' << significant(y, 5) << "</text>";
  for (const auto& [x, text] : x_ticks)
    out << "<line class=mark x1=" << px(x) << " x2=" << px(x) << " y1=" << top + h
        << " y2=" << top + h + 5 << " /><text class=tick text-anchor=middle x=" << px(x)
        << " y=" << top + h + 18 << '>' << markup_text(text) << "</text>";
  out << "<line class=axis x1=" << left << " x2=" << left + w << " y1=" << top + h
      << " y2=" << top + h << " />";
  out << "<text class=label text-anchor=middle x=" << left + w / 2 << " y=" << chart.height - 6
      << '>' << markup_text(chart.x_label) << "</text>";
  out << "<text class=label text-anchor=middle transform='translate(13 " << top + h / 2
      << ") rotate(-90)'>" << markup_text(chart.y_label) << "</text>";
  for (const ChartLine& line : chart.lines) draw(out, line, px, py);
  out << "</svg><p class=legend>";
  for (const ChartLine& line : chart.lines)
    if (!line.name.empty())
      out << "<span><i style='background:" << line.colour << "'></i>" << markup_text(line.name)
          << "</span>";
  out << "</p>";
  return std::move(out).str();
}

}  // namespace tessera
