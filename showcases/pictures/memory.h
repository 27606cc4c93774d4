#pragma once
// Memory of this process: what tensors took at most, and what the system gave at most.

#include <cstdint>
#include <functional>

namespace pictures {

/// The most bytes that libtorch's allocator had out at once, of what this thread asked for during
/// `call`.
std::int64_t peak_tensor_bytes(const std::function<void()>& call);

/// The most memory this process has had resident, libraries included; 0 where the system does not
/// say.
std::int64_t peak_resident_bytes();

}  // namespace pictures
