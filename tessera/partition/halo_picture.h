#pragma once
// Halo plans for people: as text, and drawn.

#include <functional>
#include <string>
#include <vector>

#include "tessera/partition/halo.h"

namespace tessera {

/// One line a piece: "receives from 2: [3, 4) as [3, 4)"; boxes in global indices, mirrored dims
/// marked with ~, stretched ones with =.
std::string to_string(const HaloPlan& plan);

/// The plan of every position, drawn on two dims of the field, one panel a position: who owns what
/// (a colour a position), what the position needs (outlined), what it receives (in the sender's
/// colour) and from whom, what it mirrors or wraps from its own part (hatched). Other dims are left
/// out. Self-contained SVG; at most `panels` panels. Throws InvalidArgument for dims out of range.
std::string visualize_halo(const Sharding& input, const std::vector<Edge>& edges,
                           const std::function<Box(int)>& needed, int rows, int columns,
                           int panels = 16);
/// On the first two dims that are sharded; one that is has the last other dim beside it.
std::string visualize_halo(const Sharding& input, const std::vector<Edge>& edges,
                           const std::function<Box(int)>& needed);

}  // namespace tessera
