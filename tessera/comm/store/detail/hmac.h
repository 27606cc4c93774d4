#pragma once
// HMAC-SHA256 (RFC 2104 over FIPS 180-4): how the two ends of a connection to the job's store prove
// that they know the job's secret without sending it. Written here because the core needs nothing
// but the standard library and libtorch, which offers no hash for this; one short message per
// connection, so it is made to be read, not to be fast.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::detail {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view message);
/// The 32 bytes that prove knowledge of `key` over `message`.
std::string hmac_sha256(std::string_view key, std::string_view message);
/// Compares in a time that does not depend on where the two differ.
bool same_proof(std::string_view a, std::string_view b);

}  // namespace tessera::detail
