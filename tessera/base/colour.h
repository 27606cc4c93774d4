#pragma once
// Colours of pictures that are told apart: numbered_colour(0, 55, 60) -> "hsl(205,55%,60%)".

#include <cmath>
#include <string>

#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

/// The colour of a number, saturation and lightness in percent. Numbers that are near differ much:
/// the hue goes round by the golden angle.
inline std::string numbered_colour(int number, int saturation, int lightness) {
  const double hue = std::fmod(205.0 + number * 137.50776, 360.0);
  return concat("hsl(", fixed(hue, 0), ",", saturation, "%,", lightness, "%)");
}

}  // namespace tessera
