#include "cells.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <stdexcept>
#include <utility>

namespace pillar {
namespace {

using Point = std::array<double, 2>;
using Triangle = std::array<std::int64_t, 3>;

struct File {
  std::map<std::int64_t, Point> nodes;
  std::vector<Triangle> triangles;
};

[[noreturn]] void refuse(const std::string& file, const std::string& why) {
  throw std::runtime_error("'" + file + "' is no mesh of gmsh's text format 2.2: " + why);
}

File read_file(const std::string& name) {
  std::ifstream in(name);
  if (!in) throw std::runtime_error("'" + name + "' cannot be read");
  File file;
  std::string section;
  std::int64_t count = 0;
  while (in >> section) {
    if (section == "$MeshFormat") {
      std::string version;
      if (!(in >> version) || version != "2.2") refuse(name, "its version is " + version);
    } else if (section == "$Nodes") {
      for (in >> count; in && count > 0; --count) {
        std::int64_t id = 0;
        Point at{};
        double z = 0;
        in >> id >> at[0] >> at[1] >> z;
        file.nodes[id] = at;
      }
    } else if (section == "$Elements") {
      for (in >> count; in && count > 0; --count) {
        std::int64_t id = 0, kind = 0, tags = 0, tag = 0;
        for (in >> id >> kind >> tags; in && tags > 0; --tags) in >> tag;
        if (kind != 2)
          refuse(name, "an element is no triangle; give the surface alone as physical");
        Triangle& t = file.triangles.emplace_back();
        in >> t[0] >> t[1] >> t[2];
      }
    }
    if (!in) refuse(name, "it ends in " + section);
  }
  if (file.triangles.empty()) refuse(name, "it has no triangle");
  return file;
}

double cross(const Point& a, const Point& b, const Point& c) {
  return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]);
}

}  // namespace

Cells read_cells(const std::string& file) {
  const File read = read_file(file);
  Cells cells;
  std::map<std::array<std::int64_t, 2>, std::size_t> face_of;  // by its nodes
  for (const Triangle& given : read.triangles) {
    std::array<Point, 3> p{};
    for (int i = 0; i < 3; ++i) {
      const auto node = read.nodes.find(given[i]);
      if (node == read.nodes.end()) refuse(file, "a triangle has node " + std::to_string(given[i]));
      p[i] = node->second;
    }
    const double twice = cross(p[0], p[1], p[2]);
    if (twice == 0) refuse(file, "a triangle has no area");
    const std::int64_t cell = cells.size();
    cells.area.push_back(std::abs(twice) / 2);
    cells.centre.push_back({(p[0][0] + p[1][0] + p[2][0]) / 3, (p[0][1] + p[1][1] + p[2][1]) / 3});
    for (int i = 0; i < 3; ++i) {
      const int j = (i + 1) % 3;
      const auto [face, first] = face_of.try_emplace(
          {std::min(given[i], given[j]), std::max(given[i], given[j])}, cells.faces.size());
      if (first) {
        const double outwards = twice > 0 ? 1 : -1;
        cells.faces.push_back(
            {cell, -1, {outwards * (p[j][1] - p[i][1]), outwards * (p[i][0] - p[j][0])}});
      } else if (Face& known = cells.faces[face->second]; known.right < 0) {
        known.right = cell;
      } else {
        refuse(file, "three triangles meet at a face");
      }
    }
  }
  for (const Face& face : cells.faces) {
    if (face.right < 0) continue;
    for (const auto& [from, to] :
         {std::pair(face.left, face.right), std::pair(face.right, face.left)}) {
      cells.source.push_back(from);
      cells.target.push_back(to);
    }
  }
  return cells;
}

}  // namespace pillar
