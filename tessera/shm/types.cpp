#include "tessera/shm/types.h"

namespace tessera::shm {

std::size_t size_of(Element element) {
  switch (element) {
    case Element::boolean:
    case Element::int8:
    case Element::uint8:
      return 1;
    case Element::int16:
    case Element::uint16:
    case Element::half:
    case Element::bfloat16:
      return 2;
    case Element::int32:
    case Element::uint32:
    case Element::float32:
      return 4;
    case Element::int64:
    case Element::uint64:
    case Element::float64:
    case Element::complex64:
      return 8;
    case Element::complex128:
      return 16;
  }
  throw InvalidArgument("shm: no such element type");
}

const char* to_string(Element element) {
  static constexpr const char* kNames[] = {
      "bool",   "int8", "uint8",    "int16",   "uint16",  "int32",     "uint32",    "int64",
      "uint64", "half", "bfloat16", "float32", "float64", "complex64", "complex128"};
  const auto i = static_cast<std::size_t>(element);
  return i < std::size(kNames) ? kNames[i] : "?";
}

const char* to_string(Reduction::Kind kind) {
  static constexpr const char* kNames[] = {"sum",           "product", "min", "max", "average",
                                           "premultiplied", "and",     "or",  "xor"};
  const auto i = static_cast<std::size_t>(kind);
  return i < std::size(kNames) ? kNames[i] : "?";
}

const char* to_string(Cause cause) {
  static constexpr const char* kNames[] = {"other host",    "other user",     "no memory",
                                           "not permitted", "too many ranks", "disagreement",
                                           "absent"};
  const auto i = static_cast<std::size_t>(cause);
  return i < std::size(kNames) ? kNames[i] : "?";
}

const char* to_string(Stores stores) {
  static constexpr const char* kNames[] = {"written through the cache",
                                           "written through the cache, lines are handed over",
                                           "written past the cache"};
  const auto i = static_cast<std::size_t>(stores);
  return i < std::size(kNames) ? kNames[i] : "?";
}

bool reduces(Element element, Reduction::Kind kind) {
  const bool integer = element <= Element::uint64;
  const bool complex = element >= Element::complex64;
  switch (kind) {
    case Reduction::Kind::sum:
    case Reduction::Kind::product:
      return true;
    case Reduction::Kind::min:
    case Reduction::Kind::max:
      return !complex;
    case Reduction::Kind::average:
    case Reduction::Kind::premultiplied:
      return !integer;
    case Reduction::Kind::bit_and:
    case Reduction::Kind::bit_or:
    case Reduction::Kind::bit_xor:
      return integer;
  }
  return false;
}

}  // namespace tessera::shm
