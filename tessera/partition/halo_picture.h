#pragma once
// Halo plans for people: as text, and as a drawing.

#include <functional>
#include <string>
#include <vector>

#include "tessera/partition/halo.h"

namespace tessera {

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
