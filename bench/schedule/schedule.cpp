// Lengths of pipeline schedules beside the bound that none can beat, over a grid of ranks,
// micro-batches and times: the list scheduler and the known schedules, without and with a memory
// limit. Exact numbers of the simulator; only the scheduler's own time is measured. Prints a table
// and writes the records as JSON.
//
//   bench_schedule [--out FILE] [--only PATTERN]

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/schedule/costs.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/list_schedule.h"
#include "tessera/schedule/simulate.h"
#include "tessera/schedule/validate.h"

using namespace tessera;

namespace {

// A way to lay stages over ranks, and the schedules that are known for it.
struct Layout {
  const char* name;
  std::function<std::vector<int>(int)> placement;
  std::vector<std::pair<const char*, std::function<PipelineSchedule(int, int)>>> known;
};

std::vector<Layout> layouts() {
  return {
      {"1 stage a rank",
       [](int p) { return loop_placement(p); },
       {{"1F1B", schedule_1f1b}, {"ZB-H1", schedule_zero_bubble_h1}}},
      {"2 in a loop",
       [](int p) { return loop_placement(p, 2); },
       {{"interleaved", [](int p, int m) { return schedule_interleaved(p, 2, m); }}}},
      {"2 as a V", [](int p) { return v_placement(p); }, {{"ZB-V", schedule_zero_bubble_v}}},
  };
}

std::vector<int> counts(int p) {
  std::vector<int> counts{p, p + 1, 3 * p / 2, 2 * p, 3 * p, 4 * p};
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

// The worst and the mean of what is shown.
struct Spread {
  double worst = 0, sum = 0;
  int count = 0;
  void add(double value) {
    worst = std::max(worst, value);
    sum += value;
    ++count;
  }
  std::string text() const {
    char text[40];
    if (count == 0) return "-";
    std::snprintf(text, sizeof(text), "%.3f (%.3f)", worst, sum / count);
    return text;
  }
};

// Each cell: the largest of length / bound over all times, and the mean. `limited`: no rank holds
// more than 1F1B's first. `few` and `many`: what the worst may be with fewer than 2 p micro-batches
// and with more; 0: anything.
void grid(bench::Report& report, const Layout& layout, double communication, bool limited,
          double few, double many) {
  const std::string name =
      concat(layout.name, ", communication ", communication, limited ? ", limited" : "");
  const std::string when_few = name + ", m < 2 p", when_many = name + ", m >= 2 p";
  if (!report.wants(name) && !report.wants(when_few) && !report.wants(when_many)) return;
  std::printf("\n%s, communication %g F%s: worst (mean) of length / bound\n", layout.name,
              communication, limited ? ", no rank above 1F1B's memory" : "");
  std::printf("%3s %3s  %-15s", "p", "m", "list");
  for (const auto& known : layout.known) std::printf(" %-15s", known.first);
  std::printf("\n");
  Spread all[2];
  int worse = 0;
  for (const int p : {2, 4, 8}) {
    for (const int m : counts(p)) {
      Spread list;
      std::vector<Spread> spreads(layout.known.size());
      for (const double i : {1.0, 1.25, 1.5}) {
        for (const double w : {0.5, 0.75, 1.0}) {
          const std::vector<int> placement = layout.placement(p);
          const int stages = static_cast<int>(placement.size());
          const auto costs = PipelineCosts::uniform(stages, 1, i, w, communication);
          const double bound = makespan_bound(placement, m, costs).makespan;
          ListScheduleOptions options;
          if (limited) options.memory_limit = {static_cast<double>(stages)};
          const double ours = simulate(list_schedule(placement, m, costs, options), costs).makespan;
          list.add(ours / bound);
          for (std::size_t n = 0; n < layout.known.size(); ++n) {
            const PipelineSchedule known = layout.known[n].second(p, m);
            const Timeline t = simulate(known, costs);
            const double peak = *std::ranges::max_element(t.peak);
            if (limited && peak > stages) continue;
            spreads[n].add(t.makespan / bound);
            worse += ours > t.makespan * (1 + 1e-9) ? 1 : 0;
          }
        }
      }
      std::printf("%3d %3d  %-15s", p, m, list.text().c_str());
      for (const Spread& spread : spreads) std::printf(" %-15s", spread.text().c_str());
      std::printf("\n");
      all[m < 2 * p ? 0 : 1].add(list.worst);
    }
  }
  if (few > 0) report.value(when_few, "longest / bound", all[0].worst, "", few);
  if (many > 0) report.value(when_many, "longest / bound", all[1].worst, "", many);
  report.value(name, "cases worse than a known one", worse, "", 0);
}

void own_time(bench::Report& report) {
  for (const auto& [p, m] : {std::pair{8, 32}, {16, 128}}) {
    const std::string name = concat("V of ", p, " ranks, ", m, " micro-batches");
    if (!report.wants(name)) continue;
    const std::vector<int> placement = v_placement(p);
    const auto costs = PipelineCosts::uniform(2 * p, 1, 1.37, 0.71, 0.05);
    const auto begin = std::chrono::steady_clock::now();
    const double length = simulate(list_schedule(placement, m, costs), costs).makespan;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    report.value(name, "own time", seconds, "s", 10);
    std::printf("\n%s: %.4f of the bound", name.c_str(),
                length / makespan_bound(placement, m, costs).makespan);
  }
  std::printf("\n\n");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Pipeline schedules beside the bound that none can beat");
  bench::Output output;
  bench::add_output(app, output);
  CLI11_PARSE(app, argc, argv);
  bench::Report report("schedule", output);
  for (const Layout& layout : layouts()) {
    // Two stages in a loop with hardly more micro-batches than ranks: the search or the bound is
    // not tight there.
    const bool loop = std::string(layout.name) == "2 in a loop";
    grid(report, layout, 0, false, loop ? 1.08 : 1.02, 1.02);
    grid(report, layout, 0, true, 0, 0);
    grid(report, layout, 0.1, false, 0, 1.02);
  }
  own_time(report);
  return report.finish();
}
