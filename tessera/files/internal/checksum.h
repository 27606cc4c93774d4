#pragma once
// Checksum: 64 bits over a stream of bytes, fast enough to be computed beside a memory copy.
//
//   Checksum sum;
//   sum.add(data, 100);
//   sum.add(data + 100, 28);   // the same as add(data, 128)
//   sum.value();
//
// It is XXH64 with seed 0 (Y. Collet, https://github.com/Cyan4973/xxHash, "XXH64 algorithm
// description"), written from that description, so that other programs can check the files. It
// detects accidents, not forgeries.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

class Checksum {
 public:
  Checksum();
  Checksum& add(const void* data, std::size_t bytes);
  Checksum& add(std::string_view text) { return add(text.data(), text.size()); }
  /// The checksum of everything added so far; more may be added afterwards.
  std::uint64_t value() const;

 private:
  std::array<std::uint64_t, 4> lanes_;
  std::array<unsigned char, 32> rest_{};
  std::uint64_t total_ = 0;
};

/// A checksum as sixteen hexadecimal digits, and back. from_hex throws InvalidArgument for any
/// other text.
std::string to_hex(std::uint64_t value);
std::uint64_t from_hex(std::string_view text);

}  // namespace tessera
