#include "tessera/config/rank_file.h"
#include "fuzz.h"
#include "tessera/config/topology_file.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Topology topology = parse_hosts("3,2");
  return fuzz::parses([&] {
    const auto slots = parse_rank_file(std::string(fuzz::text_of(data, size)), topology);
    const auto text = open_mpi_rank_file(topology, slots);
    fuzz::must(parse_rank_file(text, topology) == slots, "what was written is read back");
  });
}
