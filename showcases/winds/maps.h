#pragma once
// Maps as inline SVG: the field as a bitmap of one pixel a grid cell, which the browser smooths,
// with axes and a colour bar.

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace winds {

using Colour = std::array<std::uint8_t, 3>;

/// From the lowest value over the middle to the highest, evenly spaced; between them linear in
/// sRGB.
using ColourScale = std::vector<Colour>;

/// For winds: blue, white, red.
const ColourScale& blue_red();
/// For differences: purple, white, green.
const ColourScale& purple_green();

/// A strip of latitudes in a colour, over the map.
struct Band {
  double south = 0, north = 0;
  std::string colour, label;
};

struct MapOptions {
  const ColourScale* colours = nullptr;
  /// Colours span [-limit, limit]; what is beyond has the end's colour.
  double limit = 1;
  std::string title;
  std::vector<Band> bands = {};
};

/// `field`: [lat, lon], south to north, evenly spaced, on a whole circle of longitudes.
std::string map_svg(const at::Tensor& field, const at::Tensor& latitude,
                    const at::Tensor& longitude, const MapOptions& options);

/// The colour bar of maps with these options.
std::string colour_bar(const MapOptions& options, const std::string& unit);

}  // namespace winds
