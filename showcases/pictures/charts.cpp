#include "charts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "tessera/base/text.h"

namespace pictures {

std::vector<double> round_ticks(double low, double high, int count) {
  const double rough = std::max(high - low, 1e-12) / count,
               power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 2.5, 5.0})
    if (factor * power >= rough) {
      step = factor * power;
      break;
    }
  std::vector<double> ticks;
  for (double i = std::floor(low / step); (i - 1) * step < high; ++i)
    ticks.push_back(std::round(i * step * 1e9) / 1e9);
  return ticks;
}

std::string svg(const Chart& chart) {
  constexpr double left = 52, right = 14, top = 10, bottom = 44;
  double x0 = std::numeric_limits<double>::max(), x1 = -x0, y0 = x0, y1 = -x0;
  for (const Line& line : chart.lines) {
    for (const double x : line.x) x0 = std::min(x0, x), x1 = std::max(x1, x);
    for (const double y : line.y) y0 = std::min(y0, y), y1 = std::max(y1, y);
  }
  if (!(x0 <= x1)) return {};
  if (x0 == x1) x1 = x0 + 1;
  if (chart.from_zero) y0 = std::min(y0, 0.0);
  const std::vector<double> y_ticks = round_ticks(y0, y1, 5);
  y0 = y_ticks.front(), y1 = y_ticks.back();
  auto x_ticks = chart.x_ticks;
  if (x_ticks.empty())
    for (const double x : round_ticks(x0, x1, 7))
      if (x >= x0 && x <= x1) x_ticks.emplace_back(x, tessera::concat(x));
  const double w = chart.width - left - right, h = chart.height - top - bottom;
  const auto px = [&](double x) { return left + w * (x - x0) / (x1 - x0); };
  const auto py = [&](double y) { return top + h * (y1 - y) / (y1 - y0); };

  std::ostringstream out;
  out.precision(5);
  out << "<svg class=chart viewBox='0 0 " << chart.width << ' ' << chart.height << "' role=img>";
  for (const double y : y_ticks)
    out << "<line class=grid x1=" << left << " x2=" << left + w << " y1=" << py(y)
        << " y2=" << py(y) << " /><text class=tick text-anchor=end x=" << left - 7
        << " y=" << py(y) + 4 << '>' << y << "</text>";
  for (const auto& [x, text] : x_ticks)
    out << "<line class=mark x1=" << px(x) << " x2=" << px(x) << " y1=" << top + h
        << " y2=" << top + h + 5 << " /><text class=tick text-anchor=middle x=" << px(x)
        << " y=" << top + h + 18 << '>' << text << "</text>";
  out << "<line class=axis x1=" << left << " x2=" << left + w << " y1=" << top + h
      << " y2=" << top + h << " />";
  out << "<text class=label text-anchor=middle x=" << left + w / 2 << " y=" << chart.height - 6
      << '>' << chart.x_label << "</text>";
  out << "<text class=label text-anchor=middle transform='translate(13 " << top + h / 2
      << ") rotate(-90)'>" << chart.y_label << "</text>";
  for (const Line& line : chart.lines) {
    out << "<polyline fill=none stroke-linejoin=round stroke='" << line.colour
        << "' stroke-width=" << line.width << " opacity=" << line.opacity << " points='";
    for (std::size_t i = 0; i < line.x.size(); ++i)
      out << px(line.x[i]) << ',' << py(line.y[i]) << ' ';
    out << "' />";
  }
  out << "</svg><p class=legend>";
  for (const Line& line : chart.lines)
    if (!line.name.empty())
      out << "<span><i style='background:" << line.colour << "'></i>" << line.name << "</span>";
  out << "</p>";
  return out.str();
}

}  // namespace pictures
