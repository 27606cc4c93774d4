#include "report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "image.h"
#include "tessera/base/text.h"
#include "tessera/files/page.h"

namespace relief {

namespace {

constexpr const char* tensors_colour = "#c8553d";
constexpr const char* resident_colour = "#2f6f8f";
constexpr const char* share_colour = "#a3adb8";

constexpr const char* style = R"(
.card{margin:10px 0 0}
.two img{width:100%;display:block;image-rendering:pixelated;border-radius:4px}
@media(max-width:820px){.two{grid-template-columns:1fr}}
)";

double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }
std::int64_t most(const std::vector<std::int64_t>& values) {
  return *std::ranges::max_element(values);
}

std::string fixed(double value, int digits) {
  std::ostringstream out;
  out << std::fixed;
  out.precision(digits);
  out << value;
  return out.str();
}

std::string scientific(double value) {
  std::ostringstream out;
  out.precision(1);
  out << std::scientific << value;
  return out.str();
}

// Heights as an atlas shows them, lit from the north-west.
at::Tensor painted(const at::Tensor& metres) {
  struct Stop {
    double height;
    std::array<double, 3> colour;
  };
  static constexpr Stop stops[] = {{-8000, {16, 40, 84}},   {-5000, {38, 84, 142}},
                                   {-3000, {74, 128, 184}}, {-200, {170, 208, 230}},
                                   {-1, {214, 234, 240}},   {0, {120, 160, 104}},
                                   {300, {168, 190, 128}},  {1000, {222, 208, 156}},
                                   {2500, {178, 138, 96}},  {5500, {250, 250, 250}}};
  const at::Tensor h =
      metres.to(at::kDouble).clamp(stops[0].height, stops[std::size(stops) - 1].height);
  at::Tensor rgb = at::zeros({h.size(0), h.size(1), 3}, at::kDouble);
  for (std::size_t i = 0; i + 1 < std::size(stops); ++i) {
    const Stop &low = stops[i], &high = stops[i + 1];
    const at::Tensor inside =
        (h >= low.height)
            .logical_and(i + 2 == std::size(stops) ? h <= high.height : h < high.height)
            .to(at::kDouble);
    const at::Tensor part = (h - low.height) / (high.height - low.height);
    for (int c = 0; c < 3; ++c) {
      const auto k = static_cast<std::size_t>(c);
      rgb.select(2, c).add_(inside * ((1 - part) * low.colour[k] + part * high.colour[k]));
    }
  }
  const auto slope = [&](int dim) {
    return at::cat({h.diff(1, dim), at::zeros_like(h.narrow(dim, 0, 1))}, dim);
  };
  const at::Tensor light = (1 + (slope(1) - slope(0)) / 2500).clamp(0.6, 1.3).unsqueeze(2);
  return (rgb * light).clamp(0, 255).round().to(at::kByte).flip(0);
}

std::string loss_chart(const Record& record) {
  tessera::ChartLine losses{.name = "", .colour = tensors_colour, .x = {}, .y = {}};
  for (const double loss : record.losses)
    losses.x.push_back(static_cast<double>(losses.x.size() + 1)),
        losses.y.push_back(std::sqrt(loss));
  return tessera::chart_svg(
      {.x_label = "step", .y_label = "RMS error in training, m", .lines = {losses}, .x_ticks = {}});
}

void memory(std::ostream& out, const Report& report) {
  tessera::ChartLine tensors{
      .name = "tensors", .colour = tensors_colour, .x = {}, .y = {}, .width = 2.6};
  tessera::ChartLine resident{.name = "the process, libraries included",
                              .colour = resident_colour,
                              .x = {},
                              .y = {},
                              .width = 1.6};
  tessera::ChartLine share{.name = "tensors of the fewest ranks, shared evenly",
                           .colour = share_colour,
                           .x = {},
                           .y = {},
                           .width = 1.6};
  tessera::Chart chart{.x_label = "ranks",
                       .y_label = "peak of the largest rank, MiB",
                       .lines = {},
                       .x_ticks = {},
                       .from_zero = true};
  const Record& first = report.records.front();
  for (const Record& r : report.records) {
    tensors.x.push_back(r.ranks()), tensors.y.push_back(megabytes(most(r.tensor_bytes)));
    resident.x.push_back(r.ranks()), resident.y.push_back(megabytes(most(r.resident_bytes)));
    share.x.push_back(r.ranks()),
        share.y.push_back(megabytes(most(first.tensor_bytes)) * first.ranks() / r.ranks());
    chart.x_ticks.emplace_back(r.ranks(), std::to_string(r.ranks()));
  }
  chart.lines = {share, resident, tensors};
  out << "<h2>Memory falls with the ranks</h2><p>The same training of the same " << report.rows
      << " × " << report.columns
      << " field; each run cuts its latitudes over more ranks, and no rank ever holds more than "
         "its own rows and the few that its windows "
         "need.</p><div class=two><div class=card><h3>Peak memory</h3>"
      << tessera::chart_svg(chart) << "</div><div class=card><h3>Training</h3>"
      << loss_chart(report.records.back())
      << "</div></div><div class=card><table><tr><th>ranks</th><th>rows</th><th>heights "
         "read</th><th>tensors, MiB</th><th>of one "
         "share</th><th>process, "
         "MiB</th><th>s a step</th><th>losses differ by</th></tr>";
  for (const Record& r : report.records) {
    std::string rows, read;
    for (std::size_t i = 0; i < r.rows.size(); ++i)
      rows += tessera::concat(i ? " + " : "", r.rows[i]);
    for (std::size_t i = 0; i < r.values_read.size(); ++i)
      read +=
          tessera::concat(i ? " + " : "", fixed(static_cast<double>(r.values_read[i]) / 1e6, 1));
    const double share_of = static_cast<double>(most(r.tensor_bytes)) * r.ranks() /
                            (static_cast<double>(most(first.tensor_bytes)) * first.ranks());
    const double apart = distance(r, first);
    out << "<tr><td>" << r.ranks() << "</td><td>" << rows << "</td><td>" << read << " M</td><td>"
        << fixed(megabytes(most(r.tensor_bytes)), 0) << "</td><td>" << fixed(share_of, 2)
        << "</td><td>" << fixed(megabytes(most(r.resident_bytes)), 0) << "</td><td>"
        << fixed(r.seconds_a_step, 2) << "</td><td>"
        << (&r == &first ? "–"
            : apart < 0  ? "another number of steps"
                         : scientific(apart))
        << "</td></tr>";
  }
  out << "</table><p class=sub>Losses differ by: the largest relative difference of a step’s loss "
         "from that of the first line. Seconds on machines "
         "with "
         "fewer cores than ranks say nothing.</p></div>";
}

}  // namespace

void write_report(const Report& report, const std::string& path) {
  const Record& last = report.records.back();
  std::ostringstream out;
  out << "<h1>The relief of the earth, four times finer</h1><p class=sub>" << report.network
      << " Trained with Tessera on two thirds of the longitudes of a field that is cut over the "
         "ranks, and judged on the other third. Data: ETOPO5, "
         "5 "
         "arc minutes (NOAA, in Debian’s ferret-datasets), public domain.</p>";
  memory(out, report);
  out << "<h2>What it draws: " << report.place
      << "</h2><p>RMS error on the longitudes that training did not see, weighted by area: "
      << fixed(last.interpolation, 1) << " m between the coarse points linearly, "
      << fixed(last.network, 1) << " m with the network, "
      << fixed(100 * (1 - last.network / last.interpolation), 0) << " % less.</p><div class=two>";
  static const char* const names[] = {"What the network sees", "Interpolation", "The network",
                                      "Truth"};
  for (std::size_t i = 0; i < report.look.size(); ++i)
    out << "<div class=card><h3>" << names[i] << "</h3><img alt='" << names[i] << "' src='"
        << pictures::image_uri(painted(report.look[i])) << "'></div>";
  out << "</div>";
  tessera::write_page(
      {.title = "The relief of the earth, finer", .style = style, .body = out.str()}, path);
}

}  // namespace relief
