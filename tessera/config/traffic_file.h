#pragma once
// The traffic of a step in a JSON or YAML file, as mean_traffic() (tessera/comm/job/mesh_traffic.h)
// traces it:
//
//   mesh: {data: 2, model: 4}          # outermost axis first
//   traffic:                           # per step; bytes of the buffer that a call works on
//     - {axes: [model], collective: all_reduce, bytes: 64e6, calls: 96}
//     - {axes: [data, model], collective: all_reduce, bytes: 8, calls: 1}

#include <string>

#include "tessera/config/errors.h"
#include "tessera/mesh/mapping/mesh_traffic.h"

namespace tessera {

/// Reads traffic; the format follows from the ending .json, .yaml or .yml. Throws ConfigFileError
/// for a file that cannot be read, and for one with anything but the fields above: unknown axes and
/// collectives, axes that an entry names twice, and numbers that are negative or not finite, or
/// whose product is not.
MeshTraffic read_traffic(const std::string& path);
MeshTraffic parse_traffic(const std::string& text, FileFormat format,
                          const std::string& source = "traffic");
/// Writes traffic; reading it back gives an equal one. Throws GroupConfigError as check_traffic(),
/// ConfigFileError if the file cannot be written.
std::string format_traffic(const MeshTraffic& traffic, FileFormat format);
void write_traffic(const MeshTraffic& traffic, const std::string& path);

}  // namespace tessera
