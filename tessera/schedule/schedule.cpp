#include "tessera/schedule/schedule.h"

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/schedule/detail/positions.h"

namespace tessera {
namespace {

void check_shape(int ranks, int chunks) {
  if (ranks < 1 || chunks < 1 || ranks > detail::kMostStages / chunks) {
    throw InvalidArgument(ranks, " ranks with ", chunks, " stages each: both must be at ",
                          "least 1, and all stages at most ", detail::kMostStages);
  }
}

}  // namespace

std::vector<int> PipelineSchedule::stages_of(int rank) const {
  std::vector<int> mine;
  for (int s = 0; s < stages(); ++s)
    if (placement[s] == rank) mine.push_back(s);
  return mine;
}

std::vector<int> loop_placement(int ranks, int chunks) {
  check_shape(ranks, chunks);
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
  const bool activation =
      action.kind == ActionKind::send_activation || action.kind == ActionKind::receive_activation;
  // The stage that the message goes to, and the one at the other end.
  const bool onwards =
      action.kind == ActionKind::send_activation || action.kind == ActionKind::receive_gradient;
  const int other = onwards ? action.stage + 1 : action.stage - 1;
  const bool sends =
      action.kind == ActionKind::send_activation || action.kind == ActionKind::send_gradient;
  const int target = sends ? other : action.stage;
  if (!is_message(action.kind) || action.stage < 0 || action.stage >= stages || other < 0 ||
      other >= stages || action.micro_batch < 0 || action.micro_batch >= schedule.micro_batches ||
      action.micro_batch >= detail::kMostCells / stages) {
    throw InvalidArgument(action, " is no message between two stages of ", stages, " for one of ",
                          schedule.micro_batches, " micro-batches");
  }
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

}  // namespace tessera
