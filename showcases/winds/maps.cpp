#include "maps.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "image.h"
#include "tessera/base/text.h"
#include "tessera/files/page.h"

namespace winds {

namespace {

Colour colour_at(const ColourScale& scale, double position) {
  const double place = std::clamp(position, 0.0, 1.0) * static_cast<double>(scale.size() - 1);
  const auto low = std::min(static_cast<std::size_t>(place), scale.size() - 2);
  const double part = place - static_cast<double>(low);
  Colour colour;
  for (std::size_t c = 0; c < 3; ++c)
    colour[c] = static_cast<std::uint8_t>(
        std::lround((1 - part) * scale[low][c] + part * scale[low + 1][c]));
  return colour;
}

std::string bitmap(const at::Tensor& field, const MapOptions& options) {
  at::Tensor colours = at::empty({256, 3}, at::kByte);
  for (int i = 0; i < 256; ++i) {
    const Colour c = colour_at(*options.colours, i / 255.0);
    std::ranges::copy(c, colours.mutable_data_ptr<std::uint8_t>() + 3 * i);
  }
  // Zeros alone have a limit of zero.
  const at::Tensor level =
      (((field.flip(0).to(at::kDouble) / options.limit).nan_to_num(0) + 1) / 2 * 255)
          .round()
          .clamp(0, 255)
          .to(at::kLong);
  return pictures::image_uri(
      colours.index_select(0, level.flatten()).view({field.size(0), field.size(1), 3}));
}

std::string longitude_name(double east) {
  const double turned = std::fmod(east + 540, 360) - 180;
  if (turned == 0) return "0°";
  if (std::abs(turned) == 180) return "180°";
  return tessera::concat(std::abs(turned), "°", turned < 0 ? "W" : "E");
}

std::string latitude_name(double north) {
  return north == 0 ? "0°" : tessera::concat(std::abs(north), "°", north < 0 ? "S" : "N");
}

}  // namespace

const ColourScale& blue_red() {
  static const ColourScale scale{{20, 44, 96},    {38, 101, 168},  {106, 167, 211},
                                 {189, 217, 236}, {247, 247, 245}, {250, 205, 176},
                                 {233, 132, 100}, {187, 48, 56},   {98, 10, 38}};
  return scale;
}

const ColourScale& purple_green() {
  static const ColourScale scale{{58, 18, 84},    {112, 62, 145},  {160, 124, 186},
                                 {214, 196, 226}, {247, 247, 246}, {200, 229, 195},
                                 {126, 190, 127}, {42, 132, 74},   {6, 66, 34}};
  return scale;
}

std::string map_svg(const at::Tensor& field, const at::Tensor& latitude,
                    const at::Tensor& longitude, const MapOptions& options) {
  // User units: one a degree.
  constexpr double scale = 1, left = 26, top = 16, w = 360 * scale, h = 180 * scale;
  const double west = longitude[0].item<double>(), south = latitude[0].item<double>();
  const double step_x = longitude[1].item<double>() - west,
               step_y = latitude[1].item<double>() - south;
  const double north = latitude[-1].item<double>();
  // A cell reaches half a step to each side of its point; the poles' cells are cut by the frame.
  const auto px = [&](double east) { return left + (east - (west - step_x / 2)) * scale; };
  const auto py = [&](double lat) { return top + (north - lat) * scale; };
  std::ostringstream out;
  out << "<svg class=map viewBox='0 0 " << left + w + 2 << ' ' << top + h + 18
      << "' role=img><title>" << options.title << "</title>";
  out << "<text class=maptitle x=" << left << " y=11>" << options.title << "</text>";
  out << "<svg x=" << left << " y=" << top << " width=" << w << " height=" << h << " viewBox='0 0 "
      << w << ' ' << h << "' preserveAspectRatio=none>";
  out << "<image x=0 y=" << -step_y / 2 << " width=" << w << " height=" << h + step_y
      << " preserveAspectRatio=none href='" << bitmap(field, options) << "' /></svg>";
  for (const Band& band : options.bands)
    out << "<rect x=" << left << " y=" << py(band.north) << " width=" << w
        << " height=" << py(band.south) - py(band.north) << " fill='" << band.colour
        << "' fill-opacity=.45 stroke=#fff stroke-width=1.2 /><text class=owner text-anchor=middle "
           "x="
        << left + w / 2 << " y=" << (py(band.north) + py(band.south)) / 2 + 4 << '>' << band.label
        << "</text>";
  for (double lat = -60; lat <= 60; lat += 30)
    out << "<line class=graticule x1=" << left << " x2=" << left + w << " y1=" << py(lat)
        << " y2=" << py(lat) << " /><text class=maptick text-anchor=end x=" << left - 3
        << " y=" << py(lat) + 3 << '>' << latitude_name(lat) << "</text>";
  for (double east = std::ceil(west / 60) * 60; east < west + 360; east += 60)
    out << "<line class=graticule y1=" << top << " y2=" << top + h << " x1=" << px(east)
        << " x2=" << px(east) << " /><text class=maptick text-anchor=middle x=" << px(east)
        << " y=" << top + h + 11 << '>' << longitude_name(east) << "</text>";
  out << "<rect class=frame x=" << left << " y=" << top << " width=" << w << " height=" << h
      << " /></svg>";
  return out.str();
}

std::string colour_bar(const MapOptions& options, const std::string& unit) {
  std::ostringstream out;
  out << "<svg class=bar viewBox='0 0 300 34' role=img><defs><linearGradient id='g"
      << options.colours << "'>";
  for (std::size_t i = 0; i < options.colours->size(); ++i) {
    const Colour& c = (*options.colours)[i];
    out << "<stop offset='" << 100 * i / (options.colours->size() - 1) << "%' stop-color='rgb("
        << +c[0] << ',' << +c[1] << ',' << +c[2] << ")' />";
  }
  out << "</linearGradient></defs><rect x=20 y=2 width=240 height=11 fill='url(#g"
      << options.colours << ")' class=frame style='fill:url(#g" << options.colours << ")' />";
  for (const double tick : tessera::round_ticks(-options.limit, options.limit, 6))
    if (std::abs(tick) <= options.limit)
      out << "<text class=maptick text-anchor=middle x=" << 140 + 120 * tick / options.limit
          << " y=26>"
          << (tick > 0   ? "+"
              : tick < 0 ? "−"
                         : "")
          << std::abs(tick) << "</text>";
  out << "<text class=maptick x=268 y=12>" << unit << "</text></svg>";
  return out.str();
}

}  // namespace winds
