#include "report.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "maps.h"
#include "tessera/base/text.h"
#include "tessera/files/page.h"

namespace winds {

namespace {

using tessera::Chart;
using tessera::chart_svg;
using tessera::ChartLine;
using tessera::round_ticks;

constexpr const char* network_colour = "#c8553d";
constexpr const char* damped_colour = "#2f6f8f";
constexpr const char* climatology_colour = "#a3adb8";
constexpr const char* long_names[variables] = {"west–east wind (UWND)", "south–north wind (VWND)"};

constexpr const char* style = R"(
h3{margin:14px 0 4px}
h3:first-child{margin-top:0}
.figures{display:grid;grid-template-columns:repeat(4,1fr);gap:14px;margin:26px 0 8px}
.figure{background:#fff;border:1px solid #e2e5e3;border-radius:8px;padding:14px 18px}

.figure b{display:block;font-size:29px;line-height:1.15;
font-weight:650;font-variant-numeric:tabular-nums}
.figure span{color:#5b6778;font-size:13px;line-height:1.35;display:block}
.three{display:grid;grid-template-columns:repeat(3,1fr);gap:8px 12px}
.bars{display:grid;grid-template-columns:2fr 1fr;gap:12px;margin-top:4px}
tr.best td{font-weight:650;color:#c8553d;border-bottom:0}
td.meter{width:34%;padding-right:4px}
.meter i{display:block;height:12px;border-radius:2px}
.facts td{text-align:left;padding:5px 12px 5px 0}
.facts td:first-child{color:#5b6778;white-space:nowrap;width:190px}
.map text{fill:#5b6778}.maptitle{font-size:11px;font-weight:600}.map .maptitle{fill:#1b2a41}
.maptick{font-size:8.5px;fill:#5b6778}
.graticule{stroke:#1b2a41;stroke-opacity:.16;stroke-width:.6}
.frame{fill:none;stroke:#8a94a0;stroke-width:.8}

.owner{font-size:11px;font-weight:600;fill:#1b2a41;paint-order:stroke;
stroke:#fff;stroke-width:2.5px;stroke-opacity:.75}
.bar{max-width:340px;margin:2px auto 0}
@media(max-width:820px){.figures,.two{grid-template-columns:1fr 1fr}
.three{grid-template-columns:1fr}}
)";

std::string fixed(double value, int digits = 2) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

std::string percent_less(double value, double than) {
  return tessera::concat(std::lround(100 * (1 - value / than)), " %");
}

double mean_over_winds(const double (&values)[variables]) {
  return std::sqrt((values[0] * values[0] + values[1] * values[1]) / 2);
}

// Neither the best nor the worst: the month whose error, over both winds, is the median.
std::int64_t typical_month(const Skill& skill) {
  std::vector<std::int64_t> order(skill.by_month[0].size());
  std::iota(order.begin(), order.end(), 0);
  const auto error = [&](std::int64_t t) {
    return std::hypot(skill.by_month[0][static_cast<std::size_t>(t)],
                      skill.by_month[1][static_cast<std::size_t>(t)]);
  };
  std::ranges::sort(order, [&](std::int64_t a, std::int64_t b) { return error(a) < error(b); });
  return order[order.size() / 2];
}

// A limit that the colours of a map can bear: what 99.5 % of the values stay below, rounded up.
double limit_of(const at::Tensor& field) {
  const double quantile = at::quantile(field.abs().flatten(), 0.995).item<double>();
  const std::vector<double> ticks = round_ticks(0, quantile, 4);
  return ticks.back();
}

void headline(std::ostream& out, const Report& report) {
  const Skill &network = report.skills.back(), &damped = report.skills[report.skills.size() - 2],
              &climatology = report.skills[1];
  const auto figure = [&](const std::string& value, const std::string& text) {
    out << "<div class=figure><b>" << value << "</b><span>" << text << "</span></div>";
  };
  out << "<div class=figures>";
  figure(fixed(network.all_points[0]) + " m/s", "RMS error of the network, west–east wind");
  figure(fixed(network.all_points[1]) + " m/s", "RMS error of the network, south–north wind");
  figure(percent_less(mean_over_winds(network.all_points), mean_over_winds(climatology.all_points)),
         "less than the monthly climatology, both winds");
  figure(percent_less(mean_over_winds(network.all_points), mean_over_winds(damped.all_points)),
         "less than the damped anomaly with a coefficient at every point");
  out << "</div>";
}

void table(std::ostream& out, const Report& report) {
  double most = 0;
  for (const Skill& skill : report.skills) most = std::max(most, mean_over_winds(skill.all_points));
  out << "<h2>Skill</h2><p>RMS error in m/s over the " << report.test.count() << " months "
      << month_name(report.test.begin) << " to " << month_name(report.test.end - 1)
      << ", each forecast from the month before it. “All” counts every grid point alike; “area” "
         "weights by the cosine of "
      << "the latitude. No test month was seen in training or in choosing anything.</p>";
  out << "<div class=card><table><tr><th></th><th>UWND all</th><th>UWND area</th><th>VWND "
         "all</th><th>VWND area</th><th style='text-align:left'>both "
         "winds, "
      << "all points</th></tr>";
  for (std::size_t i = 0; i < report.skills.size(); ++i) {
    const Skill& skill = report.skills[i];
    const bool best = i + 1 == report.skills.size();
    out << (best ? "<tr class=best>" : "<tr>") << "<td>" << skill.name << "</td>";
    for (std::int64_t v = 0; v < variables; ++v)
      out << "<td>" << fixed(skill.all_points[v]) << "</td><td>" << fixed(skill.area[v]) << "</td>";
    out << "<td class=meter><i style='width:" << 100 * mean_over_winds(skill.all_points) / most
        << "%;background:" << (best ? network_colour : climatology_colour) << "'></i></td></tr>";
  }
  out << "</table></div>";
}

std::string loss_chart(const Report& report) {
  ChartLine steps{
      .name = "one batch", .colour = climatology_colour, .x = {}, .y = {}, .width = 1.2};
  ChartLine epochs{
      .name = "mean of an epoch", .colour = network_colour, .x = {}, .y = {}, .width = 2.6};
  const auto each = static_cast<std::size_t>(report.steps_per_epoch);
  for (std::size_t i = 0; i < report.losses.size(); ++i) {
    steps.x.push_back(static_cast<double>(i + 1) / static_cast<double>(each));
    steps.y.push_back(std::sqrt(report.losses[i]));
    if ((i + 1) % each) continue;
    const double sum =
        std::accumulate(report.losses.begin() + static_cast<std::ptrdiff_t>(i + 1 - each),
                        report.losses.begin() + static_cast<std::ptrdiff_t>(i + 1), 0.0);
    epochs.x.push_back(static_cast<double>(i + 1) / static_cast<double>(each) - 0.5);
    epochs.y.push_back(std::sqrt(sum / static_cast<double>(each)));
  }
  return chart_svg({.x_label = "epoch",
                    .y_label = "RMS error in training, m/s",
                    .lines = {steps, epochs},
                    .x_ticks = {}});
}

std::string month_chart(const Report& report, std::int64_t v) {
  const std::size_t n = report.skills.size();
  Chart chart{.x_label = "", .y_label = "RMS error, m/s", .lines = {}, .x_ticks = {}};
  const auto add = [&](const Skill& skill, const char* colour, double width) {
    ChartLine line{
        .name = skill.name, .colour = colour, .x = {}, .y = skill.by_month[v], .width = width};
    for (std::size_t t = 0; t < line.y.size(); ++t) line.x.push_back(static_cast<double>(t));
    chart.lines.push_back(line);
  };
  add(report.skills[1], climatology_colour, 1.6);
  add(report.skills[n - 2], damped_colour, 1.6);
  add(report.skills[n - 1], network_colour, 2.6);
  for (std::int64_t t = 0; t < report.test.count(); t += 6) {
    const std::string name = month_name(report.test.begin + t);
    chart.x_ticks.emplace_back(
        t, tessera::concat(name.substr(0, 3), " ", name.substr(name.size() - 4)));
  }
  return chart_svg(chart);
}

void maps(std::ostream& out, const Report& report) {
  const std::int64_t t = typical_month(report.skills.back());
  out << "<h2>A month like most: " << month_name(report.test.begin + t)
      << "</h2><p>The month whose error is the median of the " << report.test.count()
      << ". Each row: what the network said from the winds of "
      << month_name(report.test.begin + t - 1)
      << ", what came, and the difference.</p><div class=card>";
  const at::Tensor error = report.forecast[t] - report.truth[t];
  const double wide = limit_of(report.truth[t]), narrow = limit_of(error);
  const MapOptions winds{.colours = &blue_red(), .limit = wide, .title = {}},
      difference{.colours = &purple_green(), .limit = narrow, .title = {}};
  out << "<div class=three>";
  for (std::int64_t v = 0; v < variables; ++v) {
    MapOptions left = winds, middle = winds, right = difference;
    left.title = tessera::concat("Forecast, ", long_names[v]);
    middle.title = "Truth";
    right.title = tessera::concat(
        "Forecast − truth, RMS ",
        fixed(report.skills.back().by_month[v][static_cast<std::size_t>(t)]), " m/s");
    out << map_svg(report.forecast[t][v], report.latitude, report.longitude, left)
        << map_svg(report.truth[t][v], report.latitude, report.longitude, middle)
        << map_svg(error[v], report.latitude, report.longitude, right);
  }
  out << "</div><div class=bars>" << colour_bar(winds, "m/s") << colour_bar(difference, "m/s")
      << "</div></div>";
}

void gain_maps(std::ostream& out, const Report& report) {
  const at::Tensor gain =
      report.skills[report.skills.size() - 2].by_point - report.skills.back().by_point;
  MapOptions options{.colours = &purple_green(), .limit = limit_of(gain), .title = {}};
  out << "<h2>Where the network helps</h2><p>RMS error of the damped anomaly (one coefficient per "
         "point) minus that of the network, over all test "
         "months: "
      << "green where the network is better.</p><div class=card><div class=two>";
  for (std::int64_t v = 0; v < variables; ++v) {
    options.title = long_names[v];
    out << map_svg(gain[v], report.latitude, report.longitude, options);
  }
  out << "</div>" << colour_bar(options, "m/s") << "</div>";
}

// Soft colours, one a rank.
const char* colour_of(int rank) {
  static const char* const colours[] = {"#e8a598", "#9cc3d5", "#e9cf8f", "#a8cfa5",
                                        "#c9b1d9", "#d8b48f", "#9fd3c7", "#c3c8cf"};
  return colours[rank % 8];
}

// Months across, latitudes up: each rank's part of the training. All test months are cut in the
// same way.
std::string owned_chart(const Report& report) {
  constexpr double left = 52, top = 10, w = 494, h = 236;
  const auto rows = static_cast<double>(report.latitude.size(0));
  const auto px = [&](std::int64_t month) {
    return left + w * static_cast<double>(month) / static_cast<double>(report.train_months);
  };
  const auto py = [&](std::int64_t row) { return top + h * (1 - static_cast<double>(row) / rows); };
  std::ostringstream out;
  out << "<svg class=chart viewBox='0 0 560 " << top + h + 44
      << "' role=img><title>Months and latitudes of each rank</title>";
  for (const Owned& o : report.owned) {
    if (o.samples.count() == 0 || o.rows.empty()) continue;
    const double x = px(o.samples.begin), y = py(o.rows.end), wide = px(o.samples.end) - x,
                 high = py(o.rows.begin) - y;
    out << "<rect x=" << x << " y=" << y << " width=" << wide << " height=" << high << " fill='"
        << colour_of(o.rank)
        << "' stroke=#fff stroke-width=2 /><text class=owner text-anchor=middle x=" << x + wide / 2
        << " y=" << y + high / 2 - 3 << ">rank " << o.rank
        << "</text><text text-anchor=middle x=" << x + wide / 2 << " y=" << y + high / 2 + 13 << '>'
        << o.samples.count() << " samples × " << o.rows.size() << " latitudes</text>";
  }
  for (int i = 0; i <= 4; ++i) {
    const double degrees = -90 + 45 * i, y = top + h * (90 - degrees) / 180;
    out << "<text class=tick text-anchor=end x=" << left - 7 << " y=" << y + 4 << '>'
        << (degrees == 0 ? "0" : tessera::concat(std::abs(degrees))) << "°"
        << (degrees > 0   ? "N"
            : degrees < 0 ? "S"
                          : "")
        << "</text>";
  }
  for (std::int64_t month = 0; month < report.train_months; month += 2 * months_a_year)
    out << "<line class=mark x1=" << px(month) << " x2=" << px(month) << " y1=" << top + h
        << " y2=" << top + h + 5 << " /><text class=tick text-anchor=middle x=" << px(month)
        << " y=" << top + h + 18 << '>' << 1982 + month / months_a_year << "</text>";
  out << "<text class=label text-anchor=middle x=" << left + w / 2 << " y=" << top + h + 38
      << ">month that is forecast</text></svg>";
  return out.str();
}

void ownership(std::ostream& out, const Report& report) {
  if (report.owned.empty()) return;
  // Ranks with the same latitudes share a strip of the globe.
  const double south = report.latitude[0].item<double>(),
               step = report.latitude[1].item<double>() - south;
  const auto edge = [&](std::int64_t row) {
    return std::clamp(south + (static_cast<double>(row) - 0.5) * step, -90.0, 90.0);
  };
  std::vector<Band> bands;
  for (const Owned& first : report.owned) {
    std::string ranks;
    int sharing = 0;
    for (const Owned& o : report.owned) {
      if (!(o.rows == first.rows)) continue;
      if (o.rank < first.rank) sharing = -static_cast<int>(report.owned.size());  // Drawn already.
      ranks += tessera::concat(ranks.empty() ? "" : ", ", o.rank);
      ++sharing;
    }
    if (sharing < 1 || first.rows.empty()) continue;
    bands.push_back({edge(first.rows.begin), edge(first.rows.end), colour_of(first.rank),
                     tessera::concat(sharing > 1 ? "ranks " : "rank ", ranks, ": ",
                                     first.rows.size(), " latitudes")});
  }
  const at::Tensor wind = report.truth[0][0];
  out << "<h2>Who owns what</h2><p>Samples are cut over the mesh’s axis <i>data</i>, the "
      << report.latitude.size(0)
      << " latitudes over its axis <i>domain</i>; neither need divide evenly. A rank reads and "
         "holds its part alone. In each convolution it receives "
         "the "
      << "one row of latitudes that its windows need on either side; longitudes are whole on every "
         "rank and go around.</p><div class=two><div "
         "class=card><h3>Training</h3>"
      << owned_chart(report) << "</div><div class=card><h3>The globe</h3>"
      << map_svg(wind, report.latitude, report.longitude,
                 {.colours = &blue_red(), .limit = limit_of(wind), .title = {}, .bands = bands})
      << "</div></div>";
}

}  // namespace

void write_report(const Report& report, const std::string& path) {
  std::ostringstream out;
  out << "<h1>Next month’s winds, from this month’s</h1><p class=sub>US Navy monthly surface "
      << "winds, 2.5° × 2.5°. A small convolutional network, trained with Tessera on samples and "
         "latitudes "
         "that are cut over the ranks, on the years 1982–1989, and judged on 1990–1992.</p>";
  headline(out, report);
  table(out, report);
  maps(out, report);
  gain_maps(out, report);
  ownership(out, report);
  out << "<h2>Month by month</h2><div class=two>";
  for (std::int64_t v = 0; v < variables; ++v)
    out << "<div class=card><h3>" << long_names[v] << "</h3>" << month_chart(report, v) << "</div>";
  out << "</div><h2>Training, and the run</h2><div class=two><div class=card><h3>Loss</h3>"
      << loss_chart(report) << "</div><div class=card><h3>Facts</h3><table class=facts>";
  for (const auto& [name, value] : report.facts)
    out << "<tr><td>" << name << "</td><td>" << value << "</td></tr>";
  out << "</table></div></div>";
  tessera::write_page({.title = "Next month’s winds", .style = style, .body = out.str()}, path);
}

}  // namespace winds
