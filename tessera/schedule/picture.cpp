#include "tessera/schedule/picture.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/base/markup_text.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

constexpr double kLeft = 70, kTop = 70, kRow = 30, kBeside = 5, kGap = 8, kRight = 110;
constexpr std::size_t kMostDrawn = 200000;

struct DrawnKind {
  const char* name;
  int hue;
};
// In the order of ActionKind.
constexpr std::array<DrawnKind, 4> kDrawnKinds = {
    {{"forward", 215}, {"input gradient", 140}, {"weight gradient", 45}, {"backward", 165}}};

std::string number(double value) { return significant(value, 6); }

std::string colour(ActionKind kind, int chunk) {
  return concat("hsl(", kDrawnKinds.at(static_cast<std::size_t>(kind)).hue, ",60%,",
                std::min(68 + 12 * chunk, 92), "%)");
}

void check_spans(const PipelineSchedule& schedule, const Timeline& timeline) {
  bool same = timeline.spans.size() == schedule.actions.size() &&
              timeline.peak.size() == schedule.actions.size();
  std::size_t actions = 0;
  for (std::size_t r = 0; same && r < schedule.actions.size(); ++r) {
    same = timeline.spans[r].size() == schedule.actions[r].size();
    actions += schedule.actions[r].size();
  }
  if (!same)
    throw InvalidArgument("a timeline of another schedule: ranks or actions differ in number");
  if (actions > kMostDrawn) {
    throw InvalidArgument(
        concat("a picture of ", actions, " actions; at most ", kMostDrawn, " are drawn"));
  }
}

class Picture {
 public:
  Picture(const PipelineSchedule& schedule, const Timeline& timeline)
      : schedule_(schedule), timeline_(timeline) {
    // The shortest action that takes time has room for a digit, but a long step stays a picture.
    double shortest = timeline.makespan;
    for (int r = 0; r < schedule.ranks(); ++r) {
      for (const ActionSpan& span : timeline.spans[r]) {
        if (span.end > span.start) shortest = std::min(shortest, span.end - span.start);
      }
    }
    const double wanted = shortest > 0 ? 16 * timeline.makespan / shortest : 0;
    width_ = std::clamp(wanted, 480.0, 4000.0);
    scale_ = timeline.makespan > 0 ? width_ / timeline.makespan : 0;
  }

  std::string draw() {
    const double height = kTop + schedule_.ranks() * (kRow + kGap) + 40;
    out_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << number(kLeft + width_ + kRight)
         << "\" height=\"" << number(height) << "\" font-family=\"sans-serif\" font-size=\"12\">\n"
         << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
         << "<text x=\"20\" y=\"24\" font-weight=\"bold\">" << markup_text(schedule_.name) << ": "
         << schedule_.stages() << " stages, " << schedule_.micro_batches << " micro-batches, time "
         << number(timeline_.makespan) << ", waiting " << number(100 * timeline_.bubble())
         << " %</text>\n";
    legend();
    for (int rank = 0; rank < schedule_.ranks(); ++rank) row(rank);
    out_ << "</svg>\n";
    return std::move(out_).str();
  }

 private:
  void legend() {
    double x = 20;
    for (std::size_t k = 0; k < kDrawnKinds.size(); ++k) {
      out_ << "<rect x=\"" << number(x) << "\" y=\"36\" width=\"12\" height=\"12\" fill=\""
           << colour(static_cast<ActionKind>(k), 0) << "\" stroke=\"#333\"/><text x=\""
           << number(x + 17) << "\" y=\"46\">" << kDrawnKinds.at(k).name << "</text>\n";
      x += 120;
    }
    out_ << "<text x=\"" << number(kLeft + width_ + 12) << "\" y=\"" << number(kTop - 10)
         << "\" fill=\"#555\">holds at most</text>\n";
  }

  void row(int rank) {
    const double y = kTop + rank * (kRow + kGap);
    out_ << "<text x=\"" << kLeft - 8 << "\" y=\"" << number(y + kRow / 2 + 2)
         << "\" text-anchor=\"end\">rank " << rank << "</text>\n"
         << "<rect x=\"" << kLeft << "\" y=\"" << number(y) << "\" width=\"" << number(width_)
         << "\" height=\"" << kRow - kBeside << "\" fill=\"#f1f3f5\"/>\n"
         << "<text x=\"" << number(kLeft + width_ + 12) << "\" y=\"" << number(y + kRow / 2 + 2)
         << "\">" << number(timeline_.peak[rank]) << "</text>\n";
    const std::vector<int> stages = schedule_.stages_of(rank);
    for (std::size_t i = 0; i < schedule_.actions[rank].size(); ++i) {
      const PipelineAction& a = schedule_.actions[rank][i];
      const ActionSpan span = timeline_.spans[rank][i];
      const double x = kLeft + span.start * scale_, width = (span.end - span.start) * scale_;
      if (is_compute(a.kind)) {
        const auto chunk = std::find(stages.begin(), stages.end(), a.stage) - stages.begin();
        box(a, x, y, width, static_cast<int>(chunk));
      } else if (width > 0) {
        out_ << "<rect x=\"" << number(x) << "\" y=\"" << number(y + kRow - kBeside + 1)
             << "\" width=\"" << number(width) << "\" height=\"" << kBeside - 1
             << "\" fill=\"#868e96\"><title>" << a << "</title></rect>\n";
      }
    }
  }

  void box(const PipelineAction& a, double x, double y, double width, int chunk) {
    out_ << "<rect x=\"" << number(x) << "\" y=\"" << number(y) << "\" width=\"" << number(width)
         << "\" height=\"" << kRow - kBeside << "\" fill=\"" << colour(a.kind, chunk)
         << "\" stroke=\"#333\" stroke-width=\"0.5\"><title>" << a << "</title></rect>\n";
    const std::string text = std::to_string(a.micro_batch);
    if (width < 7.0 * static_cast<double>(text.size()) + 2) return;
    out_ << "<text x=\"" << number(x + width / 2) << "\" y=\"" << number(y + kRow / 2 + 2)
         << "\" font-size=\"11\" text-anchor=\"middle\">" << text << "</text>\n";
  }

  const PipelineSchedule& schedule_;
  const Timeline& timeline_;
  double width_, scale_;
  TextStream out_;
};

}  // namespace

std::string visualize_schedule(const PipelineSchedule& schedule, const Timeline& timeline) {
  check_spans(schedule, timeline);
  return Picture(schedule, timeline).draw();
}

}  // namespace tessera
