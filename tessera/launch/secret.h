#pragma once
// The secret of a job: what its processes know and other users of the same hosts and network do
// not. A rank must prove that it knows the secret before the job's store listens to it.

#include <string>
#include <string_view>

namespace tessera {

/// In the place of a secret: nobody is asked for one, and every process that reaches the port of
/// the store may join the job.
inline constexpr std::string_view kNoSecret = "none";

/// 128 random bits from the system, as 32 hexadecimal digits. Throws Error where the system gives
/// none.
std::string new_secret();

}  // namespace tessera
