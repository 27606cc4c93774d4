// The page of a report: what the runs have come to, charts that they share, checkpoints.

#include "report_page.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/files/page.h"

namespace tessera::app {
namespace {

// Told apart on a light and on a dark page, also by the colour-blind (after M. Okabe and K. Ito).
constexpr const char* kColours[] = {"#c8553d", "#2f7fb5", "#009e73", "#cc79a7",
                                    "#d18f00", "#56b4e9", "#8c6bb1", "#7a8a00"};
const char* colour_of(std::size_t i) { return kColours[i % std::size(kColours)]; }

constexpr std::size_t kMostPoints = 1200;

// What a chart shows together, in the order of the page.
struct Topic {
  const char* title;
  std::vector<std::string> words;  // in the name of a series
};
const std::vector<Topic>& topics() {
  static const std::vector<Topic> all = {
      {"Loss", {"loss"}},
      {"Learning rate", {"learning_rate", "lr"}},
      {"Throughput", {"throughput", "per_second", "mfu"}},
      {"Memory", {"memory", "bytes"}},
  };
  return all;
}

constexpr std::size_t kLearningRate = 1;  // of topics()

bool has_word(const std::string& name, const std::string& word) {
  const std::size_t at = name.find(word);
  if (at == std::string::npos) return false;
  const auto letter = [&](std::size_t i) {
    return i < name.size() && std::isalpha(static_cast<unsigned char>(name[i])) != 0;
  };
  return word.size() > 3 || ((at == 0 || !letter(at - 1)) && !letter(at + word.size()));
}

std::size_t topic_of(const std::string& name) {
  for (std::size_t t = 0; t < topics().size(); ++t) {
    const auto& words = topics()[t].words;
    if (std::ranges::any_of(words, [&](const std::string& word) { return has_word(name, word); }))
      return t;
  }
  return topics().size();
}

std::string size_text(double bytes) {
  const char* unit = "bytes";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (bytes < 1024) break;
    bytes /= 1024;
    unit = next;
  }
  return concat(significant(bytes, 4), " ", unit);
}

std::string time_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole < 60) return concat(significant(seconds, 3), " s");
  if (whole < 3600) return concat(whole / 60, " min ", whole % 60, " s");
  return concat(whole / 3600, " h ", whole / 60 % 60, " min");
}

std::string number_text(double value) {
  return std::isfinite(value) ? significant(value, 5) : "not finite";
}

// At most kMostPoints: of each stretch the lowest and the highest, so that no peak is lost.
ChartLine thinned(ChartLine line) {
  const std::size_t n = line.x.size();
  if (n <= kMostPoints) return line;
  ChartLine few = line;
  few.x.clear();
  few.y.clear();
  const std::size_t stretches = kMostPoints / 2;
  for (std::size_t s = 0; s < stretches; ++s) {
    const std::size_t begin = s * n / stretches, end = (s + 1) * n / stretches;
    std::size_t low = begin, high = begin;
    for (std::size_t i = begin; i < end; ++i) {
      if (line.y[i] < line.y[low] || !std::isfinite(line.y[low])) low = i;
      if (line.y[i] > line.y[high] || !std::isfinite(line.y[high])) high = i;
    }
    for (const std::size_t i : {std::min(low, high), std::max(low, high)}) {
      few.x.push_back(line.x[i]);
      few.y.push_back(line.y[i]);
    }
  }
  return few;
}

// The mean of the last points, by which a noisy line is read.
ChartLine smoothed(ChartLine line) {
  const std::size_t window = std::max<std::size_t>(line.x.size() / 40, 2);
  double sum = 0;
  std::size_t inside = 0;
  const std::vector<double> values = line.y;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) sum += values[i], ++inside;
    if (i >= window && std::isfinite(values[i - window])) sum -= values[i - window], --inside;
    line.y[i] = inside > 0 ? sum / static_cast<double>(inside) : values[i];
  }
  return line;
}

class PageBody {
 public:
  explicit PageBody(const std::vector<RunLog>& runs) : runs_(runs) {}

  std::string text() {
    head();
    for (std::size_t t = 0; t <= topics().size(); ++t) charts(t);
    checkpoints();
    return std::move(out_).str();
  }

 private:
  std::set<std::string> names_of(std::size_t topic) const {
    std::set<std::string> names;
    for (const RunLog& run : runs_)
      for (const auto& [name, series] : run.series)
        if (topic_of(name) == topic && !series.steps.empty()) names.insert(name);
    return names;
  }

  void head() {
    out_ << "<h1>" << (runs_.size() == 1 ? concat("Run ", markup_text(runs_[0].name)) : "Runs")
         << "</h1><div class=card><table><tr><th>run</th><th>steps</th><th>time</th>"
            "<th>loss, at last</th><th>least</th><th>last checkpoint</th></tr>";
    for (std::size_t r = 0; r < runs_.size(); ++r) run_line(r);
    out_ << "</table></div>";
    for (const RunLog& run : runs_) {
      for (const std::string& problem : run.problems)
        out_ << "<p class=warn>" << markup_text(problem) << "</p>";
      for (const auto& [name, series] : run.series) not_finite(run, name, series);
    }
  }

  void run_line(std::size_t r) {
    const RunLog& run = runs_[r];
    double steps = 0, seconds = 0;
    for (const auto& [name, series] : run.series) {
      if (series.steps.empty()) continue;
      steps = std::max(steps, series.steps.back());
      seconds = std::max(seconds, *std::ranges::max_element(series.seconds));
    }
    const Series* loss = loss_of(run);
    const auto complete = std::find_if(run.checkpoints.rbegin(), run.checkpoints.rend(),
                                       [](const SavedStep& s) { return s.complete; });
    out_ << "<tr><td>" << swatch(r) << markup_text(run.name) << "</td><td>"
         << significant(steps, 10) << "</td><td>" << (seconds > 0 ? time_text(seconds) : "–")
         << "</td><td>" << (loss ? number_text(loss->values.back()) : "–") << "</td><td>"
         << (loss ? number_text(least(*loss)) : "–") << "</td><td>"
         << (complete != run.checkpoints.rend() ? markup_text(complete->name) : "–")
         << "</td></tr>";
  }

  std::string swatch(std::size_t r) const {
    return runs_.size() == 1 ? ""
                             : concat("<i class=dot style='background:", colour_of(r), "'></i>");
  }

  static const Series* loss_of(const RunLog& run) {
    for (const char* name : {"val/loss", "train/loss", "loss"}) {
      const auto found = run.series.find(name);
      if (found != run.series.end() && !found->second.values.empty()) return &found->second;
    }
    for (const auto& [name, series] : run.series)
      if (topic_of(name) == 0 && !series.values.empty()) return &series;
    return nullptr;
  }

  static double least(const Series& series) {
    double found = std::nan("");
    for (const double v : series.values)
      if (std::isfinite(v) && !(found <= v)) found = v;
    return found;
  }

  void not_finite(const RunLog& run, const std::string& name, const Series& series) {
    const auto bad =
        std::ranges::count_if(series.values, [](double v) { return !std::isfinite(v); });
    if (bad == 0) return;
    const auto first =
        std::ranges::find_if(series.values, [](double v) { return !std::isfinite(v); });
    out_ << "<p class=warn>" << markup_text(concat(run.name, ": ", name)) << " is not finite at "
         << bad << " of " << series.values.size() << " steps, first at step "
         << significant(series.steps[static_cast<std::size_t>(first - series.values.begin())], 10)
         << ".</p>";
  }

  // One chart for the series of a topic; of what belongs to none, one for each series.
  void charts(std::size_t topic) {
    const std::set<std::string> names = names_of(topic);
    if (names.empty()) return;
    const bool other = topic == topics().size();
    out_ << "<h2>" << (other ? "Other" : topics()[topic].title) << "</h2><div class=two>";
    // Series of one kind whose sizes are far apart would be flat lines beside each other.
    std::map<std::string, std::vector<std::string>> together;
    for (const std::string& name : names)
      together[other || topic > 1 || runs_.size() > 1 ? name : std::string()].push_back(name);
    for (const auto& [title, shown] : together) chart(title, shown);
    out_ << "</div>";
  }

  void chart(const std::string& title, const std::vector<std::string>& names) {
    Chart chart{.x_label = "step", .y_label = "", .lines = {}, .x_ticks = {}};
    std::size_t colour = 0;
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      for (const std::string& name : names) {
        const auto found = runs_[r].series.find(name);
        if (found == runs_[r].series.end()) continue;
        const char* paint = colour_of(runs_.size() > 1 ? r : colour++);
        ChartLine line{.name = runs_.size() > 1 ? runs_[r].name
                               : title.empty()  ? name
                                                : "",
                       .colour = paint,
                       .x = found->second.steps,
                       .y = found->second.values};
        // What is set, and not measured, has no noise: a mean would be another rate.
        if (line.x.size() >= 80 && topic_of(name) != kLearningRate) {
          ChartLine mean = thinned(smoothed(line));
          line.name.clear();
          line.width = 1;
          line.opacity = 0.35;
          chart.lines.push_back(thinned(std::move(line)));
          chart.lines.push_back(std::move(mean));
        } else {
          chart.lines.push_back(std::move(line));
        }
      }
    }
    const std::string drawn = chart_svg(chart);
    out_ << "<div class=card>";
    if (!title.empty()) out_ << "<h3>" << markup_text(title) << "</h3>";
    out_ << (drawn.empty() ? "<p class=sub>no finite value</p>" : drawn) << "</div>";
  }

  void checkpoints() {
    if (std::ranges::all_of(runs_, [](const RunLog& run) { return run.checkpoints.empty(); }))
      return;
    out_ << "<h2>Checkpoints</h2><div class=card><table><tr><th>run</th><th>checkpoint</th>"
            "<th>size</th><th></th></tr>";
    for (const RunLog& run : runs_)
      for (const SavedStep& saved : run.checkpoints)
        out_ << "<tr><td>" << markup_text(run.name) << "</td><td>" << markup_text(saved.name)
             << "</td><td>" << size_text(static_cast<double>(saved.bytes)) << "</td><td>"
             << (saved.complete ? "" : "not complete") << "</td></tr>";
    out_ << "</table></div>";
  }

  const std::vector<RunLog>& runs_;
  TextStream out_;
};

constexpr const char* kStyle = R"(
td{white-space:nowrap}
.warn{border-left:4px solid #d18f00;padding:2px 0 2px 10px}
.dot{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:8px}
)";

}  // namespace

Page report_page(const std::vector<RunLog>& runs, int refresh) {
  std::string title = "Runs";
  if (runs.size() == 1) title = concat("Run ", runs[0].name);
  return {.title = std::move(title),
          .style = kStyle,
          .body = PageBody(runs).text(),
          .dark = true,
          .refresh = refresh};
}

}  // namespace tessera::app
