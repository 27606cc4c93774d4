#include "plan_grid.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tessera/base/text.h"

namespace tessera::app {

Grid lay_out(const std::vector<int>& devices, const std::vector<int>& rack_of,
             const std::vector<std::string>& rack_names, int width, int height, bool tight) {
  Grid best;
  const int most = *std::ranges::max_element(devices);
  for (int cell : {46, 40, 34, 28, 22, 17, 15, 13, 10, 8, 6, 5, 4, 3, 2, 1}) {
    Grid grid;
    grid.cell = cell;
    grid.pad = cell >= 13 ? 5 : cell >= 5 ? 2 : 1;
    grid.title = cell >= 22 ? 18 : 0;
    grid.gap = cell >= 13 ? 10 : cell >= 5 ? 5 : 2;
    if (tight) {
      grid.pad = 1;
      grid.gap = 3;
      grid.title = 0;
    }
    grid.host_columns = devices.size() == 1
                            ? std::min(most, std::max(1, (width - 2 * grid.pad) / cell))
                        : most <= 4 ? most
                                    : static_cast<int>(std::ceil(std::sqrt(2.0 * most)));
    if (devices.size() == 1 && most > 8)
      grid.host_columns =
          std::min(grid.host_columns,
                   std::max(8, 1 << static_cast<int>(std::ceil(std::log2(std::sqrt(2.0 * most))))));
    grid.host_rows = (most + grid.host_columns - 1) / grid.host_columns;
    grid.per_row = std::max(1, (width + grid.gap) / (grid.host_width() + grid.gap));
    const bool racks = rack_names.size() > 1;
    int most_in_rack = 0;
    for (std::size_t r = 0; r < rack_names.size(); ++r)
      most_in_rack = std::max(most_in_rack,
                              static_cast<int>(std::ranges::count(rack_of, static_cast<int>(r))));
    if (tight) {  // strides over the hosts are mostly powers of two: they make columns
      int even = 1;
      while (2 * even <= grid.per_row && even < most_in_rack) even *= 2;
      grid.per_row = even;
    } else {
      // Full rows where a number that divides the hosts is near, even ones where not.
      int even = grid.per_row;
      while (even > 1 && most_in_rack % even) --even;
      const int lines = (most_in_rack + grid.per_row - 1) / grid.per_row;
      grid.per_row = 2 * even > grid.per_row ? even : (most_in_rack + lines - 1) / lines;
    }
    grid.rack_title = racks ? 16 : 0;
    int y = 0, used = 0;
    grid.host_at.assign(devices.size(), {0, 0});
    for (std::size_t r = 0; r < rack_names.size(); ++r) {
      const int top = y;
      y += grid.rack_title;
      int column = 0;
      for (std::size_t h = 0; h < devices.size(); ++h) {
        if (rack_of[h] != static_cast<int>(r)) continue;
        if (column == grid.per_row) {
          column = 0;
          y += grid.host_height() + grid.gap;
        }
        grid.host_at[h] = {column * (grid.host_width() + grid.gap), y};
        used = std::max(used, grid.host_at[h][0] + grid.host_width());
        ++column;
      }
      y += grid.host_height() + grid.gap;
      if (racks) grid.racks.push_back({rack_names[r], top, y - top - grid.gap});
    }
    grid.width = used;
    grid.height = y - grid.gap;
    best = grid;
    if (grid.height <= height && grid.width <= width) break;
  }
  return best;
}

}  // namespace tessera::app
