#pragma once
// The wheel's libtorch contains Gloo but not its headers. These name the types that
// ProcessGroupGloo.hpp mentions, and no more: no object of Gloo is laid out by them, they are only
// pointed at, and calls go to functions that libtorch exports.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gloo {
class Algorithm;
class Context;
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo
