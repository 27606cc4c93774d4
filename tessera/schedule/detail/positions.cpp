#include "tessera/schedule/detail/positions.h"

#include <algorithm>

#include "tessera/base/text.h"

namespace tessera::detail {

std::string unknown_id(const PipelineSchedule& schedule, const PipelineAction& action) {
  if (action.stage < 0 || action.stage >= schedule.stages())
    return concat("there are stages 0 to ", schedule.stages() - 1);
  if (!has_micro_batch(action.kind)) {
    return action.micro_batch == -1
               ? ""
               : concat("such an action has no micro-batch, and this one has ", action.micro_batch);
  }
  if (action.micro_batch < 0 || action.micro_batch >= schedule.micro_batches)
    return concat("there are micro-batches 0 to ", schedule.micro_batches - 1);
  return "";
}

bool trains(const PipelineSchedule& schedule) {
  return std::ranges::any_of(schedule.actions, [](const auto& row) {
    return std::ranges::any_of(row, [](const PipelineAction& a) {
      return is_compute(a.kind) && a.kind != ActionKind::forward;
    });
  });
}

bool known(const PipelineSchedule& schedule, const PipelineAction& action, int rank) {
  return static_cast<std::size_t>(action.kind) < kKinds && unknown_id(schedule, action).empty() &&
         schedule.placement[action.stage] == rank;
}

PipelineAction other_end(const PipelineAction& message) {
  const bool activation = message.kind <= ActionKind::receive_activation;
  const bool sends =
      message.kind == ActionKind::send_activation || message.kind == ActionKind::send_gradient;
  // Each receive comes behind its send among the kinds.
  const auto kind = static_cast<ActionKind>(static_cast<int>(message.kind) + (sends ? 1 : -1));
  return {kind, message.stage + (sends == activation ? 1 : -1), message.micro_batch};
}

std::string no_edge(const PipelineSchedule& schedule, const PipelineAction& action) {
  const int other = other_end(action).stage;
  if (other < 0) return "there is no stage before the first";
  if (other >= schedule.stages()) return "there is no stage behind the last";
  if (schedule.placement[other] == schedule.placement[action.stage])
    return concat("stage ", other, " is on the same rank: nothing is sent between them");
  return "";
}

Positions::Positions(const PipelineSchedule& schedule)
    : micro_batches_(schedule.micro_batches), reduced_(schedule.stages(), -1) {
  for (auto& table : at_) table.assign(micro_batches_ * schedule.stages(), -1);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto& row = schedule.actions[rank];
    for (int i = 0; i < static_cast<int>(row.size()); ++i) {
      const PipelineAction& a = row[i];
      if (!known(schedule, a, rank)) continue;
      if (is_message(a.kind) && !no_edge(schedule, a).empty()) continue;
      int* place = nullptr;
      if (has_micro_batch(a.kind))
        place = &at_[static_cast<std::size_t>(a.kind)][index(a.stage, a.micro_batch)];
      else if (a.kind == ActionKind::reduce_gradient)
        place = &reduced_[a.stage];
      if (place && *place < 0) *place = i;
    }
  }
}

int Positions::input_gradient(int stage, int micro_batch) const {
  const int whole = of(ActionKind::backward, stage, micro_batch);
  const int input = of(ActionKind::input_gradient, stage, micro_batch);
  if (whole < 0 || input < 0) return std::max(whole, input);
  return std::min(whole, input);
}

}  // namespace tessera::detail
