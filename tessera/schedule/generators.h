#pragma once
// The schedules that the field knows. Each works for any number of micro-batches, fewer than the
// stages too, and comes as compute alone; lower() adds messages, gathers and reductions.
//
//   schedule_1f1b(4, 8)            4 stages on 4 ranks, 8 micro-batches
//   schedule_interleaved(4, 2, 8)  8 stages on 4 ranks, in a loop
//
// All throw InvalidArgument for numbers below 1, and where stages times micro-batches pass 4 Mi.

#include "tessera/schedule/schedule.h"

namespace tessera {

/// All forwards, then all backwards (Huang et al. 2019). Any placement: each rank does its stages
/// one after the other. Holds every micro-batch at once.
PipelineSchedule schedule_gpipe(const std::vector<int>& placement, int micro_batches);
PipelineSchedule schedule_gpipe(int ranks, int micro_batches);

/// One forward, one backward in turn (PipeDream, Narayanan et al. 2019, with a flush at the end):
/// rank r holds at most p - r micro-batches.
PipelineSchedule schedule_1f1b(int ranks, int micro_batches);

/// 1F1B with several stages a rank, in a loop (Narayanan et al. 2021): a bubble `chunks` times
/// shorter, with more messages and memory. Micro-batches go in groups of p to
/// 2 p - 1, or in one smaller group.
PipelineSchedule schedule_interleaved(int ranks, int chunks, int micro_batches);

/// Zero bubble H1 (Qi et al. 2023): 1F1B with the backward split, and weight gradients put off so
/// far that no rank holds more than 1F1B's first. Rank r does them r micro-batches late.
PipelineSchedule schedule_zero_bubble_h1(int ranks, int micro_batches);

/// Zero bubble V (Qi et al. 2024): two stages a rank, there and back; where F, I and W take the
/// same time only the first rank's way to the last is waited for, with 1F1B's memory: 2 p of its
/// chunks.
PipelineSchedule schedule_zero_bubble_v(int ranks, int micro_batches);

}  // namespace tessera
