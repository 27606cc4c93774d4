#pragma once
// The triangles of a mesh that gmsh made, as finite volumes: areas, centres, and the faces between.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace pillar {

/// A face and the cells on either side; `normal` points from left to right and is as long as it.
struct Face {
  std::int64_t left = 0;
  /// -1: a wall.
  std::int64_t right = -1;
  std::array<double, 2> normal{};
};

struct Cells {
  std::vector<std::array<double, 2>> centre;
  std::vector<double> area;
  std::vector<Face> faces;
  /// In both directions between the cells on either side of each face.
  std::vector<std::int64_t> source, target;

  std::int64_t size() const { return static_cast<std::int64_t>(area.size()); }
};

/// Reads the triangles of a file in gmsh's text format 2.2 (gmsh -format msh22). Throws
/// std::runtime_error for a file that is none, with its name.
Cells read_cells(const std::string& file);

}  // namespace pillar
