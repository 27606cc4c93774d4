#pragma once
// The entry points of libtessera_nccl.so, found by name.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

using NcclMake = std::shared_ptr<Transport> (*)(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size,
                                                std::chrono::milliseconds timeout,
                                                c10::Device device);
using NcclVersion = std::string (*)();
/// Says why the part does not fit the libraries that it was loaded with; empty if it does.
using NcclProblem = std::string (*)();

inline constexpr const char* kNcclMake = "tessera_nccl_make";
inline constexpr const char* kNcclVersion = "tessera_nccl_version";
inline constexpr const char* kNcclProblem = "tessera_nccl_problem";

}  // namespace tessera::detail
