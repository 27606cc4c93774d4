#include "tessera/files/json.h"
#include "fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fuzz::parses([&] {
    const auto text = fuzz::text_of(data, size);
    const Json value = Json::parse(text);
    fuzz::must(is_utf8(text), "what is parsed is UTF-8");
    if (value.is(Json::Kind::number)) value.number();
    if (value.is(Json::Kind::object))
      for (const auto& [name, member] : value.members())
        fuzz::must(value.find(name) == &member, "a member is found by its name");
  });
}
