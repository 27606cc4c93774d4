#pragma once
// The wheel's libtorch contains Gloo but not its headers. These files declare the types that
// ProcessGroupGloo.hpp mentions, and no more: they define the layout of no Gloo object, objects are
// only pointed at, and calls go to functions that libtorch exports.

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
