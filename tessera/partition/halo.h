#pragma once
// Halo plans from output ownership: what a rank must receive so that it can compute the outputs
// that it owns.
//
// Neighbours have no special role here. The outputs that a rank owns need an interval of inputs
// (exact arithmetic in kernel, stride, padding and dilation); that interval, resolved at the
// array's edges, is intersected with the shards of all owners. Shards thinner than the halo, empty
// shards, strides, even kernels and corners are the same code path. (Intersecting boxes with all
// owners is the method of block-structured AMR codes such as AMReX.)
//
//   7 rows in shards of {3, 0, 4}, kernel 3, padding 1, outputs owned likewise: rank 0 owns
//   outputs [0, 3) and needs inputs [-1, 4); row -1 is padding, row 3 comes from rank 2.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/partition/sharding.h"

namespace tessera {

/// One dim of a windowed operator: output o reads the inputs o * stride - padding + k * dilation
/// for k from 0 to kernel - 1.
struct Window {
  std::int64_t kernel = 1;
  std::int64_t stride = 1;
  /// Padding before the first input. The padding after the last follows from the number of outputs.
  std::int64_t padding = 0;
  std::int64_t dilation = 1;
  bool operator==(const Window&) const = default;

  /// Throws InvalidArgument for kernel, stride or dilation below 1, and for what exceeds 2^31 - 1.
  void check() const;
  /// The inputs that `outputs` read, as the smallest interval that contains them; it may reach
  /// below 0 and beyond the extent. Empty for no outputs.
  Interval inputs(Interval outputs) const;
  /// The transpose of inputs(): inputs i that contribute to an output of `outputs` in o = i *
  /// stride - padding + k * dilation. May be empty where the stride exceeds the kernel.
  Interval transposed_inputs(Interval outputs) const;
  /// Number of outputs of `extent` inputs with `padding_after` behind the last: floor((extent +
  /// padding + padding_after - dilation * (kernel - 1) - 1) / stride) + 1, or 0 if the window does
  /// not fit.
  std::int64_t outputs(std::int64_t extent, std::int64_t padding_after) const;
};

/// The values beyond the edges of an array.
enum class Edge : unsigned char {
  /// None: the operator pads.
  zero,
  /// The array repeated.
  circular,
  /// Mirrored at the first and last element, which are not repeated.
  reflect,
  /// The first or last element.
  replicate,
};

/// A run of virtual indices and where their values are: virtual index target.begin + j has the
/// value of index source + j * step (step 1, -1, or 0).
struct Segment {
  Interval target;
  std::int64_t source;
  int step;
  Interval sources() const;
  bool operator==(const Segment&) const = default;
};

/// Covers `needed` with segments, ascending; indices beyond a zero edge have none. An array without
/// elements has no segments; any extent above 0 and any distance from the edges is legal (circular
/// and reflect repeat).
std::vector<Segment> resolve(Interval needed, std::int64_t extent, Edge edge);

/// A box of values that is copied. `target` is in the receiver's virtual indices; in dim d, target
/// index t takes source index source[d].begin + (t - target[d].begin) for step 1, source[d].end - 1
/// - (t - target[d].begin) for step -1, source[d].begin for step 0.
struct HaloPiece {
  /// The peer; for a local copy, this rank.
  int rank;
  Box source;
  Box target;
  std::vector<int> step;
  bool operator==(const HaloPiece&) const = default;
};

/// What one rank sends, receives and copies. Pieces of one peer are in the same order on both
/// sides.
struct HaloPlan {
  /// The virtual box that this rank assembles.
  Box needed;
  std::vector<HaloPiece> sends, receives, copies;
  /// Number of elements sent, and received: volumes of the source boxes.
  std::int64_t sent() const;
  std::int64_t received() const;
};

/// The plan of the rank at `position`. `needed(position)` is the virtual box that each position of
/// the mesh needs (empty boxes need nothing); it must be the same function on all ranks. Where
/// several ranks hold the same box, the one of the receiver's own replica sends. Time grows with
/// the number of positions, not of elements.
HaloPlan halo_plan(const Sharding& input, const std::vector<Edge>& edges,
                   const std::function<Box(int)>& needed, int position);

/// The plan as text, one line per piece: "receives from 2: [3, 4) as [3, 4)"; boxes are in global
/// indices, mirrored dims marked with ~, repeated edge values with =.
std::string to_string(const HaloPlan& plan);

/// The plan of every position, drawn on two dims of the field, one panel per position: who owns
/// what (one colour per position), what the position needs (outlined), what it receives (in the
/// sender's colour) and from whom, what it mirrors or wraps from its own shard (hatched). Other
/// dims are left out. Self-contained SVG; at most `panels` panels. Throws InvalidArgument for dims
/// out of range.
std::string visualize_halo(const Sharding& input, const std::vector<Edge>& edges,
                           const std::function<Box(int)>& needed, int rows, int columns,
                           int panels = 16);
/// Draws the first two dims that are sharded; if there is only one, that and the last other dim.
std::string visualize_halo(const Sharding& input, const std::vector<Edge>& edges,
                           const std::function<Box(int)>& needed);

}  // namespace tessera
