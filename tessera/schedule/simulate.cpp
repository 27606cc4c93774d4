#include "tessera/schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/base/text.h"
#include "tessera/schedule/detail/positions.h"
#include "tessera/schedule/validate.h"

namespace tessera {
namespace {

constexpr double kUnknown = -1;

// Values on their way, by receiving stage and micro-batch.
struct Values {
  explicit Values(std::size_t cells) : sent(cells, kUnknown), posted(cells, kUnknown) {}
  // When each has come to the rank that uses it, if it was sent; and when that rank asked for it.
  std::vector<double> sent, posted;
};

class Simulation {
 public:
  Simulation(const PipelineSchedule& schedule, const PipelineCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        activations_(cells()),
        gradients_(cells()),
        gathered_(schedule.stages(), 0.0),
        free_(schedule.ranks(), 0.0),
        beside_(schedule.ranks(), 0.0) {
    for (const auto& row : schedule.actions)
      for (const PipelineAction& action : row) lowered_ |= is_message(action.kind);
    timeline_.spans.resize(schedule.ranks());
    timeline_.order.resize(schedule.ranks());
    timeline_.busy.assign(schedule.ranks(), 0.0);
  }

  Timeline run() {
    // A valid schedule ends: some rank can always go on.
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank)
        while (advance(rank)) moved = true;
    }
    timeline_.peak = peak_memory(schedule_, costs_);
    return std::move(timeline_);
  }

 private:
  std::size_t cells() const {
    return static_cast<std::size_t>(schedule_.stages()) * schedule_.micro_batches;
  }
  std::size_t cell(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * schedule_.micro_batches + micro_batch;
  }

  // When the value that a compute action starts from is there; negative: not known yet.
  double input_of(const PipelineAction& a) const {
    const bool forward = a.kind == ActionKind::forward;
    const bool first = forward ? a.stage == 0 : a.stage == schedule_.stages() - 1;
    if (first || a.kind == ActionKind::weight_gradient) return 0;
    const Values& values = forward ? activations_ : gradients_;
    const int other = forward ? a.stage - 1 : a.stage + 1;
    const std::size_t at = cell(a.stage, a.micro_batch);
    if (!lowered_ || schedule_.placement[other] == schedule_.placement[a.stage])
      return values.sent[at];
    const bool known = values.sent[at] >= 0 && values.posted[at] >= 0;
    return known ? std::max(values.sent[at], values.posted[at]) : kUnknown;
  }

  // What the action makes or sends goes to the stage that uses it, between ranks by sends alone
  // where there are any.
  void deliver(const PipelineAction& a, double time) {
    const bool onwards = a.kind == ActionKind::forward || a.kind == ActionKind::send_activation;
    const int to = onwards ? a.stage + 1 : a.stage - 1;
    if (to < 0 || to >= schedule_.stages()) return;
    const bool here = schedule_.placement[to] == schedule_.placement[a.stage];
    if (lowered_ && is_compute(a.kind) && !here) return;
    Values& values = onwards ? activations_ : gradients_;
    values.sent[cell(to, a.micro_batch)] = time + costs_.travel(a.stage, to, schedule_.placement);
  }

  bool advance(int rank) {
    auto& spans = timeline_.spans[rank];
    if (spans.size() == schedule_.actions[rank].size()) return false;
    const PipelineAction& a = schedule_.actions[rank][spans.size()];
    double start = free_[rank], end = start;
    if (is_compute(a.kind)) {
      const double input = input_of(a);
      if (input < 0) return false;
      start = std::max({start, input, gathered_[a.stage]});
      end = start + costs_.time(a);
      free_[rank] = end;
      timeline_.busy[rank] += end - start;
      if (a.kind != ActionKind::weight_gradient) deliver(a, end);
    } else if (a.kind == ActionKind::send_activation || a.kind == ActionKind::send_gradient) {
      deliver(a, end);
    } else if (is_message(a.kind)) {
      Values& values = a.kind == ActionKind::receive_activation ? activations_ : gradients_;
      values.posted[cell(a.stage, a.micro_batch)] = start;
    } else if (a.kind != ActionKind::release) {
      start = std::max(start, beside_[rank]);
      const bool gather = a.kind == ActionKind::gather;
      end = start + (gather ? costs_.stages[a.stage].gather : costs_.stages[a.stage].reduce);
      beside_[rank] = end;
      if (gather) gathered_[a.stage] = end;
    }
    timeline_.makespan = std::max(timeline_.makespan, end);
    spans.push_back({start, end});
    timeline_.order[rank].push_back(count_++);
    return true;
  }

  const PipelineSchedule& schedule_;
  const PipelineCosts& costs_;
  bool lowered_ = false;
  Values activations_, gradients_;
  std::vector<double> gathered_;
  // When the rank has computed what came before, and when its gathers and reductions are done.
  std::vector<double> free_, beside_;
  int count_ = 0;
  Timeline timeline_;
};

}  // namespace

double Timeline::work() const { return busy.empty() ? 0.0 : *std::ranges::max_element(busy); }

double Timeline::bubble() const {
  const double all = makespan * static_cast<double>(busy.size());
  return all > 0 ? 1 - std::accumulate(busy.begin(), busy.end(), 0.0) / all : 0.0;
}

Timeline simulate(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  // Schedules for evaluation have times too.
  check(schedule, {.backward = detail::trains(schedule), .sends = SendMode::buffered});
  costs.check(schedule.stages(), schedule.micro_batches);
  return Simulation(schedule, costs).run();
}

std::string timeline_text(const PipelineSchedule& schedule, const Timeline& timeline, double unit,
                          int columns) {
  if (!std::isfinite(unit) || unit <= 0 || columns < 1) {
    throw InvalidArgument("a letter for each ", unit, " of time in ", columns,
                          " columns; both must be above 0");
  }
  if (timeline.spans.size() != schedule.actions.size())
    throw InvalidArgument("a timeline of another schedule: the numbers of ranks differ");
  const double length = std::ceil(timeline.makespan / unit - 1e-9);
  const bool cut = length > columns;
  const auto width = static_cast<std::size_t>(cut ? columns : length);
  const auto column = [&](double time) {
    return static_cast<std::size_t>(std::min(std::round(time / unit), static_cast<double>(width)));
  };
  std::string text;
  for (std::size_t rank = 0; rank < timeline.spans.size(); ++rank) {
    if (timeline.spans[rank].size() != schedule.actions[rank].size()) {
      throw InvalidArgument("a timeline of another schedule: rank ", rank, " has ",
                            schedule.actions[rank].size(), " actions, the timeline ",
                            timeline.spans[rank].size());
    }
    std::string line(width, '.');
    for (std::size_t i = 0; i < timeline.spans[rank].size(); ++i) {
      const PipelineAction& a = schedule.actions[rank][i];
      if (!is_compute(a.kind)) continue;
      char letter = letters_of(a.kind)[0];
      if (a.micro_batch % 2 != 0) letter = static_cast<char>(letter - 'A' + 'a');
      const std::size_t end = column(timeline.spans[rank][i].end);
      for (std::size_t at = column(timeline.spans[rank][i].start); at < end; ++at)
        line[at] = letter;
    }
    text += concat("rank ", rank, ": ", line, cut ? "...\n" : "\n");
  }
  return text;
}

}  // namespace tessera
