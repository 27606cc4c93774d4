// The small languages of `tessera plan`: the first byte modulo 4 chooses one.

#include "fuzz.h"
#include "tessera/config/internal/plan_request.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  return fuzz::parses([&] {
    const std::string text(fuzz::text_of(data + 1, size - 1));
    switch (data[0] % 4) {
      case 0:
        return void(parse_axes(text, "mesh"));
      case 1:
        return void(parse_traffic(text));
      case 2:
        return void(parse_names(text, "groups"));
      default:
        return void(parse_ranks(text, "ranks"));
    }
  });
}
