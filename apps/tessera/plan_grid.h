#pragma once
// Where the hosts and devices of a machine stand in a picture of it.

#include <array>
#include <string>
#include <vector>

namespace tessera::app {

/// Where hosts and devices stand inside one panel.
struct Grid {
  int cell = 40;                        // pixels of a device
  int per_row = 1;                      // hosts
  int host_columns = 1, host_rows = 1;  // devices in a host
  int pad = 4, title = 0, gap = 8, rack_title = 0;
  int width = 0, height = 0;
  std::vector<std::array<int, 2>> host_at;  // corner of each host
  struct Rack {
    std::string name;
    int y = 0, height = 0;
  };
  std::vector<Rack> racks;

  int host_width() const { return host_columns * cell + 2 * pad; }
  int host_height() const { return host_rows * cell + 2 * pad + title; }
};

/// Hosts rack by rank of their switch; without hosts the whole world is one.
Grid lay_out(const std::vector<int>& devices, const std::vector<int>& rack_of,
             const std::vector<std::string>& rack_names, int width, int height, bool tight);

}  // namespace tessera::app
