#pragma once
// The tags of MPI messages. What a message is, its place in the order, its dtype and its size, is
// in its tag, so that a message never matches a receive that it does not fit: Open MPI 4.1 writes a
// message that is longer than the receive, and than 4 KiB, past the end of the receive's memory.

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "tessera/base/hash.h"

namespace tessera::detail {

/// Divides the tags 0 to `largest` (MPI_TAG_UB, at least 32767) in two ways, for two communicators:
/// one has the messages that the backend numbers itself, one those to which a program gives a tag.
/// With Open MPI, 2^31 - 1: 18 bits of a hash of the size for the former, 12 for the latter.
class MpiTags {
 public:
  explicit MpiTags(int largest = 32767) {
    const int bits = std::bit_width(static_cast<unsigned>(largest) + 1U) - 1;
    number_bits_ = bits >= 24 ? 6 : 2;
    hash_bits_ = bits - 1 - number_bits_ - kDtypeBits;
    user_hash_bits_ = std::clamp(bits - 16, 0, 12);
    user_bits_ = bits - user_hash_bits_;
  }

  /// The tag of message `number` between two ranks in one direction, or, with `of_call`, of each
  /// message of collective call `number`.
  int numbered(bool of_call, std::uint64_t number, c10::ScalarType dtype,
               std::int64_t elements) const {
    auto tag = static_cast<std::uint64_t>(of_call);
    tag = tag << number_bits_ | (number & low(number_bits_));
    tag = tag << kDtypeBits | (static_cast<std::uint64_t>(dtype) & low(kDtypeBits));
    return static_cast<int>(tag << hash_bits_ | hash(elements, hash_bits_));
  }
  /// True if the two tags are of one message, which its two ends describe differently.
  bool numbered_differ(int a, int b) const {
    const int place = hash_bits_ + kDtypeBits;
    return a != b && a >> place == b >> place;
  }
  c10::ScalarType dtype_of(int numbered) const {
    return static_cast<c10::ScalarType>(static_cast<std::uint64_t>(numbered >> hash_bits_) &
                                        low(kDtypeBits));
  }

  /// Tags that a program may give: 0 to users() - 1.
  int users() const { return user_bits_ >= 31 ? 0x7fffffff : 1 << user_bits_; }
  /// The tag of a message of `bytes` to which the program gave `tag`.
  int users(int tag, std::int64_t bytes) const {
    return tag << user_hash_bits_ | static_cast<int>(hash(bytes, user_hash_bits_));
  }
  bool users_differ(int a, int b) const {
    return a != b && a >> user_hash_bits_ == b >> user_hash_bits_;
  }

 private:
  static constexpr int kDtypeBits = 6;

  static std::uint64_t low(int bits) { return (std::uint64_t{1} << bits) - 1; }
  static std::uint64_t hash(std::int64_t size, int bits) {
    return Hash().number(static_cast<std::uint64_t>(size)).value() & low(bits);
  }

  int number_bits_, hash_bits_, user_hash_bits_, user_bits_;
};

}  // namespace tessera::detail
