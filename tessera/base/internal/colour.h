#pragma once
// Distinguishable colours for pictures: numbered_colour(0, 55, 60) -> "hsl(205,55%,60%)".

#include <cmath>
#include <string>

#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

/// The colour of a number, with saturation and lightness in percent. Neighbouring numbers get very
/// different colours: the hue advances by the golden angle.
inline std::string numbered_colour(int number, int saturation, int lightness) {
  const double hue = std::fmod(205.0 + number * 137.50776, 360.0);
  return concat("hsl(", fixed(hue, 0), ",", saturation, "%,", lightness, "%)");
}

}  // namespace tessera
