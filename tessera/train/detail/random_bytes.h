#pragma once
// The state of libtorch's random generators of this rank as bytes.

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace tessera::detail {

/// Of the CPU's default generator, and of the device's if it has another.
std::string random_bytes(c10::Device device);
/// Throws ConfigurationError for other bytes. A device's part is left out where there is no such
/// device now.
void set_random_bytes(const std::string& bytes, c10::Device device);
/// The same generators from `seed` on.
void seed_generators(std::uint64_t seed, c10::Device device);

}  // namespace tessera::detail
