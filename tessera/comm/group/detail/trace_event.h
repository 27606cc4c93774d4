#pragma once
// Hands a finished call to a trace.

#include <chrono>
#include <cstdint>

namespace tessera {
class CommTrace;
}

namespace tessera::detail {

class RequestState;

/// Adds the call, which ends now, to the trace.
void record(CommTrace& trace, const RequestState& call, std::chrono::steady_clock::time_point begin,
            std::int64_t bytes);

}  // namespace tessera::detail
