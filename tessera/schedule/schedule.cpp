#include "tessera/schedule/schedule.h"

#include <algorithm>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/schedule/detail/positions.h"
#include "tessera/schedule/detail/text.h"

namespace tessera {

std::vector<int> PipelineSchedule::stages_of(int rank) const {
  return numbers_below(stages(), [&](int s) { return placement[s] == rank; });
}

std::vector<int> loop_placement(int ranks, int chunks) {
  if (ranks < 1 || chunks < 1 || ranks > detail::kMostStages / chunks) {
    throw InvalidArgument(ranks, " ranks with ", chunks, " stages each: both must be at ",
                          "least 1, and all stages at most ", detail::kMostStages);
  }
  std::vector<int> placement(static_cast<std::size_t>(ranks) * chunks);
  for (std::size_t s = 0; s < placement.size(); ++s) placement[s] = static_cast<int>(s) % ranks;
  return placement;
}

std::vector<int> v_placement(int ranks, int chunks) {
  std::vector<int> placement = loop_placement(ranks, chunks);
  for (int chunk = 1; chunk < chunks; chunk += 2) {
    std::reverse(placement.begin() + static_cast<std::ptrdiff_t>(chunk) * ranks,
                 placement.begin() + static_cast<std::ptrdiff_t>(chunk + 1) * ranks);
  }
  return placement;
}

int ranks_of(const std::vector<int>& placement) {
  const auto stages =
      static_cast<int>(std::min<std::size_t>(placement.size(), detail::kMostStages));
  if (placement.empty() || placement.size() > static_cast<std::size_t>(detail::kMostStages)) {
    throw InvalidArgument("a placement of ", placement.size(), " stages; there must be 1 to ",
                          detail::kMostStages);
  }
  std::vector<bool> holds(placement.size());
  int ranks = 0;
  for (int s = 0; s < stages; ++s) {
    const int rank = placement[s];
    if (rank < 0 || rank >= stages) {
      throw InvalidArgument("stage ", s, " is placed on rank ", rank, "; with ", stages,
                            " stages, and one at least on each rank, ranks are 0 to ", stages - 1);
    }
    holds[rank] = true;
    ranks = std::max(ranks, rank + 1);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (!holds[rank]) {
      throw InvalidArgument("rank ", rank, " of ", ranks, " holds no stage; the placement ",
                            list(placement), " must name it, or be numbered without it");
    }
  }
  return ranks;
}

PipelineMessage message_of(const PipelineSchedule& schedule, const PipelineAction& action) {
  const int stages = schedule.stages();
  const int other = detail::other_end(action).stage;
  if (!is_message(action.kind) || action.stage < 0 || action.stage >= stages || other < 0 ||
      other >= stages || action.micro_batch < 0 || action.micro_batch >= schedule.micro_batches ||
      action.micro_batch >= detail::kMostCells / stages) {
    throw InvalidArgument(action, " is no message between two stages of ", stages, " for one of ",
                          schedule.micro_batches, " micro-batches");
  }
  // An activation goes to the later stage, a gradient to the earlier one.
  const bool activation = action.kind <= ActionKind::receive_activation;
  const int target = activation ? std::max(action.stage, other) : std::min(action.stage, other);
  // Counted by micro-batch, receiving stage and direction; kMostCells keeps it an int.
  const int tag = (action.micro_batch * stages + target) * 2 + (activation ? 0 : 1);
  return {schedule.placement[other], tag};
}

std::string to_string(const PipelineSchedule& schedule) {
  TextStream out;
  out << (schedule.name.empty() ? "schedule" : schedule.name) << ": " << schedule.stages()
      << " stages on " << schedule.ranks() << " ranks, " << schedule.micro_batches
      << " micro-batches\n";
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    out << "rank " << rank << ':';
    for (const PipelineAction& action : schedule.actions[rank]) out << ' ' << action;
    out << '\n';
  }
  return std::move(out).str();
}

namespace {

bool plain(char c) {
  return static_cast<unsigned char>(c) >= 32 && c != 127 && c != ',' && c != '"';
}

// Lines of a text, without their ends.
class Lines {
 public:
  Lines(std::string_view text, const CsvLimits& limits) : text_(text), limits_(limits) {
    if (text.size() > limits.bytes) {
      throw InvalidArgument("a schedule of ", text.size(), " bytes; at most ", limits.bytes,
                            " are read (CsvLimits::bytes)");
    }
  }

  bool done() const { return at_ >= text_.size(); }
  int number() const { return number_; }

  std::string_view next() {
    ++number_;
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    std::string_view line = text_.substr(at_, end - at_);
    at_ = std::min(end + 1, text_.size());
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    return line;
  }

  // A line that must be there.
  std::string_view next(const std::string& expected) {
    if (done()) {
      throw ScheduleSyntaxError(number_ + 1, 1,
                                concat("expected ", expected, " instead of the end"));
    }
    return next();
  }

  // The line's actions.
  std::vector<PipelineAction> actions(std::string_view line, bool bubbles) {
    std::vector<PipelineAction> actions;
    if (line.empty()) return actions;
    std::size_t begin = 0;
    while (true) {
      const std::size_t end = std::min(line.find(',', begin), line.size());
      if (begin == end && !bubbles)
        fail(begin, concat("expected an action instead of ",
                           end == line.size() ? "the end after a comma" : "\",\""));
      if (begin != end) {
        if (++read_ > limits_.actions)
          fail(begin, concat("more than ", limits_.actions, " actions (CsvLimits::actions)"));
        const int column = static_cast<int>(begin) + 1;
        actions.push_back(parse_action(line.substr(begin, end - begin), number_, column));
      }
      if (end == line.size()) return actions;
      begin = end + 1;
    }
  }

  [[noreturn]] void fail(std::size_t at, const std::string& why) const {
    throw ScheduleSyntaxError(number_, static_cast<int>(at) + 1, why);
  }

  // Moves `at` behind a word of the header.
  void word(std::string_view line, std::size_t& at, std::string_view expected) const {
    if (line.substr(at, expected.size()) != expected)
      fail(at, concat("expected \"", expected, "\" instead of ", detail::found(line, at)));
    at += expected.size();
  }

 private:
  std::string_view text_;
  CsvLimits limits_;
  std::size_t at_ = 0, read_ = 0;
  int number_ = 0;
};

void read_rows(Lines& lines, PipelineSchedule& schedule, bool bubbles) {
  const int ranks = ranks_of(schedule.placement);
  schedule.actions.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    schedule.actions[rank] =
        lines.actions(lines.next(concat("the actions of rank ", rank, " of ", ranks)), bubbles);
  }
  if (!lines.done()) {
    lines.next();
    lines.fail(0, concat("expected the end: the placement has ", ranks, " ranks, one line each"));
  }
}

}  // namespace

std::string to_csv(const PipelineSchedule& schedule) {
  if (!std::ranges::all_of(schedule.name, plain)) {
    throw InvalidArgument(
        "the schedule's name has a comma, a quote or a control character, which CSV cannot hold "
        "here");
  }
  TextStream out;
  out << "schedule,1," << schedule.name << "\nmicro_batches," << schedule.micro_batches
      << "\nplacement";
  for (const int rank : schedule.placement) out << ',' << rank;
  out << '\n';
  for (const auto& row : schedule.actions) out << joined(row, ",") << '\n';
  return std::move(out).str();
}

PipelineSchedule schedule_from_csv(std::string_view text, const CsvLimits& limits) {
  Lines lines(text, limits);
  PipelineSchedule schedule;
  std::string_view line = lines.next("\"schedule,1,NAME\"");
  std::size_t at = 0;
  lines.word(line, at, "schedule,1,");
  schedule.name = line.substr(at);
  for (std::size_t i = at; i < line.size(); ++i)
    if (!plain(line[i]))
      lines.fail(i, concat("expected the end of the name instead of ", detail::found(line, i)));
  line = lines.next("\"micro_batches,NUMBER\"");
  lines.word(line, at = 0, "micro_batches,");
  schedule.micro_batches = detail::read_number(line, at, kLargestId + 1,
                                               "the number of micro-batches", lines.number(), 1);
  if (at < line.size())
    lines.fail(at, concat("expected the line's end instead of ", detail::found(line, at)));
  line = lines.next("\"placement,RANK,...\"");
  lines.word(line, at = 0, "placement,");
  while (true) {
    schedule.placement.push_back(
        detail::read_number(line, at, detail::kMostStages - 1, "a rank", lines.number(), 1));
    if (at == line.size()) break;
    lines.word(line, at, ",");
  }
  read_rows(lines, schedule, false);
  return schedule;
}

PipelineSchedule schedule_from_table(std::string_view text, std::vector<int> placement,
                                     int micro_batches, const CsvLimits& limits) {
  Lines lines(text, limits);
  PipelineSchedule schedule{"", std::move(placement), micro_batches, {}};
  read_rows(lines, schedule, true);
  return schedule;
}

}  // namespace tessera
