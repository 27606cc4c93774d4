#pragma once
// HMAC-SHA256 (RFC 2104 over FIPS 180-4): how the two ends of a connection to the job's store prove
// that they know the job's secret without sending it. Implemented here because the core depends on
// the standard library and libtorch alone, which offer no such hash; it runs on one short message
// per connection and is written to be read, not to be fast.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::detail {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view message);
/// The 32 bytes that prove knowledge of `key` over `message`.
std::string hmac_sha256(std::string_view key, std::string_view message);
/// Compares two proofs in a time that does not depend on where they differ.
bool same_proof(std::string_view a, std::string_view b);

}  // namespace tessera::detail
