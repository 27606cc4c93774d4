// A checkpoint's manifest. Its checksum is made to fit, or nothing behind it would ever be read.

#include "tessera/checkpoint/storage/detail/manifest.h"
#include "fuzz.h"
#include "tessera/files/internal/checksum.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string empty = to_json(Manifest{});
  // {"checksum":"<16 digits>", ... {<body>}\n
  const auto digits = empty.find_first_of("0123456789abcdef", empty.find(':'));
  const auto body = empty.find('{', 1);
  std::string text = empty.substr(0, body);
  const std::string_view fuzzed = fuzz::text_of(data, size);
  text.replace(digits, 16, to_hex(Checksum().add(fuzzed).value()));
  text.append(fuzzed).append("}\n");
  return fuzz::parses([&] {
    const Manifest manifest = parse_manifest(text, "fuzz");
    fuzz::must(parse_manifest(to_json(manifest), "fuzz") == manifest,
               "what was written is read back");
  });
}
