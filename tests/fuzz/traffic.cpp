// Traffic of a step: the first byte modulo 2 says JSON or YAML.

#include "fuzz.h"
#include "tessera/config/traffic_file.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  return fuzz::parses([&] {
    const auto format = data[0] % 2 == 1 ? FileFormat::yaml : FileFormat::json;
    const auto step = parse_traffic(std::string(fuzz::text_of(data + 1, size - 1)), format);
    fuzz::must(parse_traffic(format_traffic(step, format), format) == step,
               "what was written is read back");
  });
}
