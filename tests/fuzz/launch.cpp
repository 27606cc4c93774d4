// Environments: one variable a line, "NAME=value"; the first line is the name of the host.

#include "tessera/launch/launch.h"
#include "fuzz.h"
#include "tessera/config/topology_file.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  auto text = fuzz::text_of(data, size);
  const auto line = [&] {
    const auto end = text.find('\n');
    const auto first = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    return first;
  };
  Environment environment;
  environment.hostname = line();
  while (!text.empty()) {
    const auto variable = line();
    const auto equal = variable.find('=');
    // It names a file, and any file may be named.
    if (equal == variable.npos || variable.starts_with("LSB_DJOB_RANKFILE")) continue;
    environment.variables.emplace(variable.substr(0, equal), variable.substr(equal + 1));
  }
  fuzz::parses([&] { topology_of(environment); });
  return fuzz::parses([&] {
    const Launch launch = detect_launch(environment);
    validate(launch);
    to_text(launch);
  });
}
