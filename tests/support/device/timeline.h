#pragma once
// What the stand-in devices are given, as an order: which tasks are over before which begin, by
// streams and events alone, whatever order of the streams is drawn.
//
//   const Timeline timeline;
//   step();
//   for (const Timeline::Task& t : timeline.tasks(device)) ...

#include <string>
#include <string_view>
#include <vector>

#include "engine.h"

namespace tessera::test::stand_in {

/// Notes what is given to all devices while it lives; there is one at a time.
class Timeline {
 public:
  struct Task : Given {
    /// True if it is over before the other begins.
    bool precedes(const Task& other) const {
      const auto own = static_cast<std::size_t>(number_of(device, stream));
      return clock[own] <= other.clock[own];
    }
    bool may_overlap(const Task& other) const { return !precedes(other) && !other.precedes(*this); }
    /// True for an operator or a copy, each a launch on a GPU; false for messages and events.
    bool is_kernel() const {
      return what.find("::") != std::string::npos || what == "copy_" || what == "item";
    }
    bool is(std::string_view name) const { return what.find(name) != std::string::npos; }
  };
  using Tasks = std::vector<Task>;

  Timeline() { note(&noted_); }
  ~Timeline() { note(nullptr); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// The tasks of a device, in the order in which they were given.
  Tasks tasks(int device) const {
    const std::lock_guard lock(Engine::get().mutex);
    Tasks all;
    for (const Given& given : noted_)
      if (given.device == device) all.push_back({given});
    return all;
  }

 private:
  static void note(std::vector<Given>* to) {
    const std::lock_guard lock(Engine::get().mutex);
    Engine::get().noted = to;
  }
  std::vector<Given> noted_;
};

}  // namespace tessera::test::stand_in
