#include "tessera/schedule/simulate.h"

#include <algorithm>
#include <array>

#include "tessera/base/internal/svg.h"
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

std::string colour(ActionKind kind, int chunk) {
  return concat("hsl(", kDrawnKinds.at(static_cast<std::size_t>(kind)).hue, ",60%,",
                std::min(68 + 12 * chunk, 92), "%)");
}

class Picture {
 public:
  Picture(const PipelineSchedule& schedule, const Timeline& timeline)
      : schedule_(schedule),
        timeline_(timeline),
        width_(width_of(schedule, timeline)),
        scale_(timeline.makespan > 0 ? width_ / timeline.makespan : 0),
        svg_(kLeft + width_ + kRight, kTop + schedule.ranks() * (kRow + kGap) + 40, 12) {}

  std::string draw() {
    svg_.text(20, 24,
              concat(schedule_.name, ": ", schedule_.stages(), " stages, ", schedule_.micro_batches,
                     " micro-batches, time ", significant(timeline_.makespan, 6), ", waiting ",
                     significant(100 * timeline_.bubble(), 6), " %"),
              "font-weight=\"bold\"");
    legend();
    for (int rank = 0; rank < schedule_.ranks(); ++rank) row(rank);
    return svg_.finish();
  }

 private:
  static double width_of(const PipelineSchedule& schedule, const Timeline& timeline) {
    // The shortest action that takes time has room for a digit, but a long step stays a picture.
    double shortest = timeline.makespan;
    for (int r = 0; r < schedule.ranks(); ++r) {
      for (const ActionSpan& span : timeline.spans[r])
        if (span.end > span.start) shortest = std::min(shortest, span.end - span.start);
    }
    return std::clamp(shortest > 0 ? 16 * timeline.makespan / shortest : 0, 480.0, 4000.0);
  }

  void legend() {
    double x = 20;
    for (std::size_t k = 0; k < kDrawnKinds.size(); ++k, x += 120) {
      svg_.rect(x, 36, 12, 12,
                concat("fill=\"", colour(static_cast<ActionKind>(k), 0), "\" stroke=\"#333\""));
      svg_.text(x + 17, 46, kDrawnKinds.at(k).name);
    }
    svg_.text(kLeft + width_ + 12, kTop - 10, "holds at most", "fill=\"#555\"");
  }

  void row(int rank) {
    const double y = kTop + rank * (kRow + kGap), base = y + kRow / 2 + 2;
    svg_.text(kLeft - 8, base, concat("rank ", rank), "text-anchor=\"end\"");
    svg_.rect(kLeft, y, width_, kRow - kBeside, "fill=\"#f1f3f5\"");
    svg_.text(kLeft + width_ + 12, base, significant(timeline_.peak[rank], 6));
    const std::vector<int> stages = schedule_.stages_of(rank);
    for (std::size_t i = 0; i < schedule_.actions[rank].size(); ++i) {
      const PipelineAction& a = schedule_.actions[rank][i];
      const ActionSpan span = timeline_.spans[rank][i];
      const double x = kLeft + span.start * scale_, width = (span.end - span.start) * scale_;
      if (is_compute(a.kind)) {
        const auto chunk = std::ranges::find(stages, a.stage) - stages.begin();
        box(a, x, y, width, static_cast<int>(chunk));
      } else if (width > 0) {
        svg_.rect(x, y + kRow - kBeside + 1, width, kBeside - 1, "fill=\"#868e96\"", concat(a));
      }
    }
  }

  void box(const PipelineAction& a, double x, double y, double width, int chunk) {
    svg_.rect(x, y, width, kRow - kBeside,
              concat("fill=\"", colour(a.kind, chunk), "\" stroke=\"#333\" stroke-width=\"0.5\""),
              concat(a));
    const std::string text = std::to_string(a.micro_batch);
    if (width < 7.0 * static_cast<double>(text.size()) + 2) return;
    svg_.text(x + width / 2, y + kRow / 2 + 2, text, "font-size=\"11\" text-anchor=\"middle\"");
  }

  const PipelineSchedule& schedule_;
  const Timeline& timeline_;
  double width_, scale_;
  detail::Svg svg_;
};

}  // namespace

std::string visualize_schedule(const PipelineSchedule& schedule, const Timeline& timeline) {
  bool same = timeline.spans.size() == schedule.actions.size() &&
              timeline.peak.size() == schedule.actions.size();
  std::size_t actions = 0;
  for (std::size_t r = 0; same && r < schedule.actions.size(); ++r) {
    same = timeline.spans[r].size() == schedule.actions[r].size();
    actions += schedule.actions[r].size();
  }
  if (!same)
    throw InvalidArgument("a timeline of another schedule: ranks or actions differ in number");
  if (actions > kMostDrawn)
    throw InvalidArgument("a picture of ", actions, " actions; at most ", kMostDrawn, " are drawn");
  return Picture(schedule, timeline).draw();
}

}  // namespace tessera
