#include "tessera/files/internal/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ull, kPrime2 = 0xC2B2AE3D27D4EB4Full,
                        kPrime3 = 0x165667B19E3779F9ull, kPrime4 = 0x85EBCA77C2B2AE63ull,
                        kPrime5 = 0x27D4EB2F165667C5ull;

// Little-endian on every machine.
template <class T>
std::uint64_t little(const unsigned char* at) {
  if constexpr (std::endian::native == std::endian::little) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
  } else {
    std::uint64_t value = 0;
    for (std::size_t i = sizeof(T); i-- > 0;) value = value << 8 | at[i];
    return value;
  }
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

std::uint64_t merged(std::uint64_t sum, std::uint64_t lane) {
  return (sum ^ round_of(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace

Checksum::Checksum() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1} {}

Checksum& Checksum::add(const void* data, std::size_t bytes) {
  if (bytes == 0) return *this;
  const auto* at = static_cast<const unsigned char*>(data);
  const std::size_t held = total_ % 32;
  total_ += bytes;
  // Copies, so that the compiler keeps the lanes in registers.
  std::uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
  const auto stripe = [&](const unsigned char* p) {
    a = round_of(a, little<std::uint64_t>(p));
    b = round_of(b, little<std::uint64_t>(p + 8));
    c = round_of(c, little<std::uint64_t>(p + 16));
    d = round_of(d, little<std::uint64_t>(p + 24));
  };
  if (held > 0) {
    const std::size_t taken = std::min(bytes, 32 - held);
    std::memcpy(rest_.data() + held, at, taken);
    at += taken;
    bytes -= taken;
    if (held + taken == 32) stripe(rest_.data());
  }
  for (; bytes >= 32; at += 32, bytes -= 32) stripe(at);
  if (bytes > 0) std::memcpy(rest_.data(), at, bytes);
  lanes_ = {a, b, c, d};
  return *this;
}

std::uint64_t Checksum::value() const {
  std::uint64_t sum = kPrime5;
  if (total_ >= 32) {
    sum = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
          std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) sum = merged(sum, lane);
  }
  sum += total_;
  const unsigned char* at = rest_.data();
  std::size_t left = total_ % 32;
  for (; left >= 8; at += 8, left -= 8)
    sum = std::rotl(sum ^ round_of(0, little<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    sum = std::rotl(sum ^ little<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
    left -= 4;
  }
  for (; left > 0; ++at, --left) sum = std::rotl(sum ^ *at * kPrime5, 11) * kPrime1;
  sum = (sum ^ sum >> 33) * kPrime2;
  sum = (sum ^ sum >> 29) * kPrime3;
  return sum ^ sum >> 32;
}

std::string to_hex(std::uint64_t value) {
  std::string text(16, '0');
  for (std::size_t i = 16; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

std::uint64_t from_hex(std::string_view text) {
  std::uint64_t value = 0;
  bool right = text.size() == 16;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9', letter = c >= 'a' && c <= 'f';
    right = right && (digit || letter);
    value = value << 4 | static_cast<std::uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  if (!right) throw InvalidArgument("'", text, "' is not a checksum of sixteen hexadecimal digits");
  return value;
}

}  // namespace tessera
