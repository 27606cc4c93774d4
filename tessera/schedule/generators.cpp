#include "tessera/schedule/generators.h"

#include <algorithm>

#include "tessera/schedule/detail/positions.h"

namespace tessera {
namespace {

// An empty schedule for `micro_batches`.
PipelineSchedule begin(const std::string& name, std::vector<int> placement, int micro_batches) {
  const int ranks = ranks_of(placement);
  const int most = detail::kMostCells / static_cast<int>(placement.size());
  if (micro_batches < 1 || micro_batches > most) {
    throw InvalidArgument(micro_batches, " micro-batches of ", placement.size(),
                          " stages; there must be 1 to ", most);
  }
  return {name, std::move(placement), micro_batches,
          std::vector<std::vector<PipelineAction>>(ranks)};
}

// Adds an action to the row of its rank. A schedule may be made for more micro-batches than there
// are, of which those that there are not are left out: a micro-batch needs nothing of another, so
// that what is left is as valid as before.
void add(PipelineSchedule& schedule, ActionKind kind, int stage, int micro_batch) {
  if (micro_batch < schedule.micro_batches)
    schedule.actions[schedule.placement[stage]].push_back({kind, stage, micro_batch});
}

}  // namespace

PipelineSchedule schedule_gpipe(const std::vector<int>& placement, int micro_batches) {
  PipelineSchedule schedule = begin("GPipe", placement, micro_batches);
  const int stages = schedule.stages();
  for (int s = 0; s < stages; ++s)
    for (int k = 0; k < micro_batches; ++k) add(schedule, ActionKind::forward, s, k);
  for (int s = stages - 1; s >= 0; --s)
    for (int k = 0; k < micro_batches; ++k) add(schedule, ActionKind::backward, s, k);
  return schedule;
}

PipelineSchedule schedule_gpipe(int ranks, int micro_batches) {
  return schedule_gpipe(loop_placement(ranks), micro_batches);
}

PipelineSchedule schedule_1f1b(int ranks, int micro_batches) {
  PipelineSchedule schedule = begin("1F1B", loop_placement(ranks), micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    // Forwards are ahead of backwards by what fits between here and the last rank.
    const int ahead = std::min(ranks - 1 - rank, micro_batches);
    for (int i = 0; i < micro_batches + ahead; ++i) {
      add(schedule, ActionKind::forward, rank, i);
      if (i >= ahead) add(schedule, ActionKind::backward, rank, i - ahead);
    }
  }
  return schedule;
}

PipelineSchedule schedule_interleaved(int ranks, int chunks, int micro_batches) {
  PipelineSchedule schedule =
      begin("interleaved 1F1B", loop_placement(ranks, chunks), micro_batches);
  if (chunks == 1) schedule.actions = schedule_1f1b(ranks, micro_batches).actions;
  if (chunks == 1) return schedule;
  // Groups of at least p, so that the first stage of a rank's next chunk finds its input there;
  // they differ by one at most.
  const int groups = std::max(1, micro_batches / ranks);
  std::vector<int> begins(1, 0);
  for (int g = 0; g < groups; ++g)
    begins.push_back(begins.back() + micro_batches / groups + (g < micro_batches % groups ? 1 : 0));
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<PipelineAction> forwards, backwards;
    for (int g = 0; g < groups; ++g) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int k = begins[g]; k < begins[g + 1]; ++k) {
          forwards.push_back({ActionKind::forward, chunk * ranks + rank, k});
          backwards.push_back({ActionKind::backward, (chunks - 1 - chunk) * ranks + rank, k});
        }
      }
    }
    // The first group must have gone round (chunks - 1) times, to the last rank, and its gradient
    // back.
    const int all = static_cast<int>(forwards.size());
    const int ahead = std::min((chunks - 1) * begins[1] + 2 * (ranks - 1 - rank), all);
    for (int i = 0; i < all + ahead; ++i) {
      if (i < all) schedule.actions[rank].push_back(forwards[i]);
      if (i >= ahead) schedule.actions[rank].push_back(backwards[i - ahead]);
    }
  }
  return schedule;
}

PipelineSchedule schedule_zero_bubble_h1(int ranks, int micro_batches) {
  PipelineSchedule schedule = begin("zero bubble H1", loop_placement(ranks), micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    const int ahead = std::min(ranks - 1 - rank, micro_batches);
    // Weight gradients follow `rank` micro-batches behind while there are forwards, which keeps p
    // micro-batches, and then fill the time until the next gradient comes.
    int weights = 0;
    for (int i = 0; i < micro_batches + ahead; ++i) {
      add(schedule, ActionKind::forward, rank, i);
      if (i < ahead) continue;
      const int k = i - ahead;
      add(schedule, ActionKind::input_gradient, rank, k);
      if (k >= rank || i + 1 >= micro_batches)
        add(schedule, ActionKind::weight_gradient, rank, weights++);
    }
    for (; weights < micro_batches; ++weights)
      add(schedule, ActionKind::weight_gradient, rank, weights);
  }
  return schedule;
}

PipelineSchedule schedule_zero_bubble_v(int ranks, int micro_batches) {
  PipelineSchedule schedule = begin("zero bubble V", v_placement(ranks), micro_batches);
  // Made for at least as many as fill the V.
  const int all = std::max(micro_batches, 2 * ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const int there = rank, back = 2 * ranks - 1 - rank;
    int f0 = 0, f1 = 0, i0 = 0, i1 = 0, w0 = 0, w1 = 0;
    const auto backward = [&](int stage, int& inputs, int& weights) {
      add(schedule, ActionKind::input_gradient, stage, inputs++);
      add(schedule, ActionKind::weight_gradient, stage, weights++);
    };
    // Until the first micro-batch is back at this rank.
    while (f0 < 2 * (ranks - rank) - 1) add(schedule, ActionKind::forward, there, f0++);
    for (int n = 0; n < rank; ++n) {
      add(schedule, ActionKind::forward, back, f1++);
      add(schedule, ActionKind::forward, there, f0++);
    }
    // Until its gradient is back too.
    for (int n = 0; n < ranks - rank; ++n) {
      add(schedule, ActionKind::forward, back, f1++);
      backward(back, i1, w1);
    }
    while (f0 < all || f1 < all) {
      if (f0 < all) add(schedule, ActionKind::forward, there, f0++);
      backward(there, i0, w0);
      if (f1 < all) {
        add(schedule, ActionKind::forward, back, f1++);
        backward(back, i1, w1);
      }
    }
    // No forwards are left: gradients go first, the weights' fill what is waited.
    for (int n = 0; n < rank; ++n) {
      if (i0 < all) add(schedule, ActionKind::input_gradient, there, i0++);
      if (i1 < all) add(schedule, ActionKind::input_gradient, back, i1++);
    }
    while (i0 < all) backward(there, i0, w0);
    while (i1 < all) backward(back, i1, w1);
    while (w1 < all) add(schedule, ActionKind::weight_gradient, back, w1++);
    while (w0 < all) add(schedule, ActionKind::weight_gradient, there, w0++);
  }
  return schedule;
}

}  // namespace tessera
