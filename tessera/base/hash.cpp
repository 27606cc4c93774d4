#include "tessera/base/hash.h"

namespace tessera {

Hash& Hash::bytes(const void* data, std::size_t size) {
  const auto* byte = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ byte[i]) * 0x100000001b3ull;
  return *this;
}

Hash& Hash::text(std::string_view s) {
  number(s.size());
  return bytes(s.data(), s.size());
}

Hash& Hash::number(std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8)
    state_ = (state_ ^ ((value >> shift) & 0xff)) * 0x100000001b3ull;
  return *this;
}

std::uint64_t Hash::value() const {
  std::uint64_t h = state_;
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdull;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return h ^ (h >> 33);
}

}  // namespace tessera
