#include "tessera/files/page.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/files/operations.h"

namespace tessera {
namespace {

constexpr const char* kCommonStyle = R"(
:root{color-scheme:light;--page:#f5f6f4;--text:#1b2a41;--faint:#5b6778;--card:#fff;
--edge:#e2e5e3;--grid:#e8eae8;--axis:#8a94a0}

body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1320px;margin:0 auto;padding:36px 28px 60px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:19px;margin:42px 0 4px}
h3{font-size:14px;margin:0 0 4px;font-weight:600}
p{margin:4px 0 12px;max-width:78ch}
.sub{color:var(--faint)}
.card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:16px 18px;
margin:10px 0;overflow-x:auto}
.two{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
.two .card{margin:10px 0 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:7px 12px;border-bottom:1px solid var(--grid)}
th{font-weight:600;color:var(--faint);font-size:13px}
th:first-child,td:first-child{text-align:left}
svg{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:12px;fill:var(--faint)}.grid{stroke:var(--grid)}
.axis,.mark{stroke:var(--axis)}
.legend{margin:2px 0 0;font-size:13px;color:var(--faint)}
.legend span{display:inline-block;margin-right:18px;overflow-wrap:anywhere}

.legend i{display:inline-block;width:18px;height:3px;border-radius:2px;
margin-right:6px;vertical-align:middle}
@media(max-width:820px){.two{grid-template-columns:minmax(0,1fr)}main{padding:20px 14px 40px}}
@media(max-width:520px){.chart text{font-size:17px}}
)";

constexpr const char* kDarkStyle = R"(
@media(prefers-color-scheme:dark){:root{color-scheme:dark;--page:#14181f;--text:#e6e9ee;
--faint:#9aa6b5;--card:#1c222b;--edge:#2d3541;--grid:#2a313b;--axis:#6b7684}}
)";

}  // namespace

void write_page(const Page& page, const std::string& path) {
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  std::filesystem::create_directories(folder_of(path), ignored);
  AtomicFile file(path);
  file.write(
      concat("<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport "
             "content='width=device-width,initial-scale=1'>",
             page.refresh > 0 ? concat("<meta http-equiv=refresh content=", page.refresh, ">") : "",
             "<title>", markup_text(page.title), "</title><style>", kCommonStyle,
             page.dark ? kDarkStyle : "", page.style, "</style></head><body><main>", page.body,
             "</main></body></html>\n"));
  file.commit();
}

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
