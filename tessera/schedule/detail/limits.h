#pragma once
// How large a schedule may be: what is above is refused before memory is taken for it.

namespace tessera::detail {

inline constexpr int kMostStages = 1 << 20;
/// Stages times micro-batches.
inline constexpr int kMostCells = 1 << 22;
/// Stages that a bound is computed for: its time grows with their square.
inline constexpr int kMostBoundStages = 1 << 12;
/// What a list of faults is cut after.
inline constexpr int kMostFaults = 1000;

}  // namespace tessera::detail
