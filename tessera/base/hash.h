#pragma once
// A stable 64-bit hash: the same on every rank, compiler and platform, unlike std::hash.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

/// FNV-1a (Fowler, Noll, Vo) over bytes, followed by the 64-bit finaliser of MurmurHash3 (Appleby)
/// so that all bits of the result are usable.
class Hash {
 public:
  Hash& bytes(const void* data, std::size_t size);
  /// Adds the length first, so that ("ab", "c") differs from ("a", "bc").
  Hash& text(std::string_view s);
  /// Eight bytes, least significant first.
  Hash& number(std::uint64_t value);
  std::uint64_t value() const;

 private:
  std::uint64_t state_ = 0xcbf29ce484222325ull;
};

}  // namespace tessera
