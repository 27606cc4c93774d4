#pragma once
// Windowed operators on boxes: which rank owns which outputs, and how an operator that knows
// nothing of ranks is called on a box of its input so that it computes given outputs, or the
// gradients of given inputs.
//
//   7 rows in shards of {3, 0, 4}, kernel 3, stride 2, padding 1 -> 4 outputs, whose windows are
//   centred at rows 0, 2, 4, 6: owned {2, 0, 2}.
//   Rank 2's outputs [2, 4) read rows [3, 7) and one row of zeros: forward_call -> inputs [3, 8),
//     no padding.
//   Rank 2's rows [3, 7) are read by outputs [1, 4), and the window on [3, 7) with padding 2
//     computes [1, 4): backward_call.

#include <optional>

#include "tessera/partition/halo.h"

namespace tessera {

/// Shards the outputs of a window like its inputs: output o belongs to the shard that holds the
/// input at the centre of its window, o * stride - padding + dilation * (kernel - 1) / 2, clamped
/// to the array. `outputs`: their number. So a window of odd kernel, stride 1 and "same" padding
/// keeps the sizes.
Partition output_partition(const Partition& inputs, const Window& window, std::int64_t outputs);
/// Shards the outputs of a transposed window, as output_partition() does: output o belongs to the
/// shard that holds the input whose window is centred at o, or the one before.
Partition transposed_output_partition(const Partition& inputs, const Window& window,
                                      std::int64_t outputs);
/// Shards the outputs of a change of resolution, as output_partition() does: output o belongs to
/// the shard that holds the input at its centre, floor((2 o + 1) * extent / (2 * outputs)). So at
/// twice the resolution shards are twice as large, and inputs {3, 0, 4} give 14 outputs {6, 0, 8}.
Partition resampled_partition(const Partition& inputs, std::int64_t outputs);

/// A call of an operator on a box: its inputs (those beyond the array are zeros in memory), the
/// symmetric padding to give it, and the outputs of the array that it then computes.
struct BoxCall {
  Interval inputs;
  std::int64_t padding = 0;
  Interval outputs;
  /// The output padding to give to a transposed window.
  std::int64_t output_padding = 0;
  bool operator==(const BoxCall&) const = default;
};

/// The call that computes at least `outputs` (not empty), all of them correctly; for a plain window
/// exactly these. For a transposed window, inputs outside of transposed_inputs(outputs) may hold
/// anything.
BoxCall forward_call(const Window& window, Interval outputs, bool transposed);
/// The call for gradients: the operator on exactly `inputs` (not empty) computes `outputs`, which
/// include all that depend on them. The gradient of the box of outputs, zeros beyond the array,
/// then gives the complete gradient of `inputs`, and their contribution to the weight's.
BoxCall backward_call(const Window& window, Interval inputs, bool transposed);
/// The call on `inputs` alone that computes exactly `outputs`, those that need no other inputs
/// correctly; nullopt if there is none.
std::optional<BoxCall> aligned_call(const Window& window, Interval inputs, Interval outputs,
                                    bool transposed);
/// Those of `outputs` that read no inputs of the array other than `held`.
Interval interior(const Window& window, Interval held, Interval outputs, std::int64_t extent,
                  bool transposed);

}  // namespace tessera
