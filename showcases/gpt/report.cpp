#include "report.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "tessera/base/text.h"
#include "tessera/files/page.h"

namespace gpt {

namespace {

constexpr const char* step_colour = "#a3adb8";
constexpr const char* mean_colour = "#c8553d";
constexpr const char* held_out_colour = "#2f6f8f";

constexpr const char* style = R"(
pre{white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace;margin:6px 0 2px}
.facts td{text-align:left}
)";

double bits(double nats) { return nats / std::log(2.0); }

std::string fixed(double value, int digits) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << std::fixed;
  out.precision(digits);
  out << value;
  return out.str();
}

// Lines stay lines.
std::string lines_of(const std::string& text) {
  std::istringstream in(text);
  std::string out;
  for (std::string line; std::getline(in, line);) out += tessera::markup_text(line) + '\n';
  return out;
}

std::string loss_chart(const Result& result) {
  tessera::ChartLine steps{
      .name = "one batch", .colour = step_colour, .x = {}, .y = {}, .width = 1.2};
  tessera::ChartLine mean{
      .name = "mean of the last 20", .colour = mean_colour, .x = {}, .y = {}, .width = 2.6};
  tessera::ChartLine held_out{
      .name = "text held out", .colour = held_out_colour, .x = {}, .y = {}, .width = 2};
  double sum = 0;
  for (std::size_t i = 0; i < result.losses.size(); ++i) {
    const auto& [step, loss] = result.losses[i];
    steps.x.push_back(static_cast<double>(step)), steps.y.push_back(bits(loss));
    sum += loss - (i >= 20 ? result.losses[i - 20].second : 0);
    mean.x.push_back(static_cast<double>(step));
    mean.y.push_back(bits(sum / static_cast<double>(std::min<std::size_t>(i + 1, 20))));
  }
  for (const Sample& s : result.samples)
    held_out.x.push_back(static_cast<double>(s.step)), held_out.y.push_back(bits(s.loss));
  return tessera::chart_svg({.x_label = "step",
                             .y_label = "bits a byte",
                             .lines = {steps, mean, held_out},
                             .x_ticks = {}});
}

void memory(std::ostream& out, const Result& result) {
  out << "<div class=card><h3>Memory of each rank, MiB</h3><table><tr><th>rank</th>"
         "<th>parameters</th><th>Adam’s moments</th><th>tensors, at most</th>"
         "<th>process, at most</th></tr>";
  const auto cell = [&](std::int64_t bytes) {
    out << "<td>" << fixed(static_cast<double>(bytes) / (1 << 20), 2) << "</td>";
  };
  for (std::size_t r = 0; r < result.memory.size(); ++r) {
    const Memory& m = result.memory[r];
    out << "<tr><td>" << r << "</td>";
    cell(m.parameters), cell(m.moments), cell(m.tensors), cell(m.process);
    out << "</tr>";
  }
  out << "</table></div>";
}

}  // namespace

void write_report(const Result& result,
                  const std::vector<std::pair<std::string, std::string>>& facts,
                  const std::string& text, const std::string& prompt, const std::string& path) {
  std::ostringstream out;
  out << "<h1>A small GPT, byte by byte</h1><p class=sub>Trained with Tessera on "
      << tessera::markup_text(text)
      << ": samples are sharded over the mesh’s axes data and sharded, parameters over sharded, "
         "heads, features and the vocabulary over tensor, layers over pipe.</p><h2>Training</h2>"
         "<div class=two><div class=card><h3>Loss</h3>"
      << loss_chart(result) << "</div><div class=card><h3>Facts</h3><table class=facts>";
  for (const auto& [name, value] : facts)
    out << "<tr><td>" << name << "</td><td>" << tessera::markup_text(value) << "</td></tr>";
  out << "</table></div></div>";
  memory(out, result);
  if (!result.timeline.empty())
    out << "<h2>The pipeline</h2><div class=card><h3>The last step: ranks waited for "
        << fixed(100 * result.waited, 0) << " % of it</h3>" << result.timeline << "</div>";
  if (!result.samples.empty())
    out << "<h2>What it writes</h2><p>Behind “" << tessera::markup_text(prompt)
        << "”, as the training goes on.</p>";
  for (const Sample& s : result.samples) {
    out << "<div class=card><h3>After " << s.step << " steps, " << fixed(bits(s.loss), 2)
        << " bits a byte of the text held out</h3><pre>" << lines_of(prompt + s.text)
        << "</pre></div>";
  }
  if (!result.plan.empty())
    out << "<h2>The plan" << (result.timeline.empty() ? "" : " of the first rank’s stages")
        << "</h2><div class=card><pre>" << lines_of(result.plan) << "</pre></div>";
  tessera::write_page({.title = "A small GPT", .style = style, .body = out.str()}, path);
}

}  // namespace gpt
