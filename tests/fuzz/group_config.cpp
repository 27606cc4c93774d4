// Trees of process groups: an even first byte means JSON, an odd one YAML.

#include "fuzz.h"
#include "tessera/config/group_config_file.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto format = data[0] % 2 ? FileFormat::yaml : FileFormat::json;
  return fuzz::parses([&] {
    const std::string text(fuzz::text_of(data + 1, size - 1));
    const ProcessGroupConfig config = parse_group_config(text, format);
    const std::string written = format_group_config(config, format);
    fuzz::must(format_group_config(parse_group_config(written, format), format) == written,
               "what was written is read back");
  });
}
