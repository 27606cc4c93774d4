#pragma once
// The secret of a job: its processes know it, and other users of the same hosts and network do not.
// A rank must prove that it knows the secret before the job's store serves it.

#include <string>
#include <string_view>

namespace tessera {

/// This text in place of a secret says that none is asked for: every process that reaches the port
/// of the store may join the job.
inline constexpr std::string_view kNoSecret = "none";

/// 128 random bits from the system, as 32 hexadecimal digits. Throws Error if the system gives
/// none.
std::string new_secret();

}  // namespace tessera
