// The header's text, and the number of bytes of data, which its first line states.

#include <charconv>

#include "fuzz.h"
#include "tessera/files/internal/safetensors.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fuzz::parses([&] {
    auto text = fuzz::text_of(data, size);
    std::uint64_t bytes = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
    if (error != std::errc() || end == text.data() + text.size()) return;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
    const SafetensorsHeader header = parse_safetensors_header(text, bytes, "fuzz");
    std::uint64_t sum = 0;
    for (const auto& tensor : header.tensors) {
      fuzz::must(safetensors_bytes(tensor) == tensor.bytes(), "a shape fits its bytes");
      sum += tensor.bytes();
    }
    fuzz::must(sum == bytes, "the tensors cover the data");
    auto again = header.tensors;
    write_safetensors_header(again, header.metadata);
  });
}
