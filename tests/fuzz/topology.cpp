// Topologies: the first byte modulo 4 says JSON, YAML, Slurm's topology.conf, or a count of hosts.

#include <cstdlib>

#include "fuzz.h"
#include "tessera/config/topology_file.h"
#include "tessera/mesh/mesh.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  return fuzz::parses([&] {
    const std::string text(fuzz::text_of(data + 1, size - 1));
    const int kind = data[0] % 4;
    if (kind == 2) {
      with_slurm_switches(parse_topology("{\"hosts\": [{\"name\": \"n0\", \"devices\": 1}, "
                                         "{\"name\": \"n1\", \"devices\": 1}]}",
                                         FileFormat::json),
                          text);
    } else if (kind == 3) {
      // Millions of hosts are right, and take longer in this build than an input may.
      const long hosts = std::strtol(text.c_str(), nullptr, 10);
      if (hosts <= 100000 || hosts > kMostRanks) parse_hosts(text);
    } else {
      const auto format = kind == 1 ? FileFormat::yaml : FileFormat::json;
      const std::string written = format_topology(parse_topology(text, format), format);
      fuzz::must(format_topology(parse_topology(written, format), format) == written,
                 "what was written is read back");
    }
  });
}
