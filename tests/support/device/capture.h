#pragma once
// Graph: what a stream of the stand-in device is given is recorded instead of done, and done as
// often as wanted, as CUDA graphs are. Meanwhile the host may not wait for the device, no other
// stream may wait for this one, and memory comes from a pool that is the graph's.
//
//   Graph graph(device);
//   y = f(x);                          // recorded: y holds nothing yet
//   graph.end();
//   x.copy_(other); graph.replay();    // y holds f(other)

#include <c10/util/Exception.h>

#include "engine.h"

namespace tessera::test::stand_in {

class Graph {
 public:
  /// Records what the current stream of the device is given, by any thread.
  explicit Graph(int device) : capture_(std::make_shared<Capture>()) {
    capture_->device = device;
    capture_->stream = current_stream(device);
    const std::lock_guard lock(Engine::get().mutex);
    Engine::get().devices[device].capture = capture_;
  }
  ~Graph() { end(); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void end() {
    const std::lock_guard lock(Engine::get().mutex);
    auto& current = Engine::get().devices[capture_->device].capture;
    if (current == capture_) current = nullptr;
  }
  /// Gives what was recorded to the current stream of the device.
  void replay() const {
    const std::lock_guard lock(Engine::get().mutex);
    for (const Capture::Task& task : capture_->tasks)
      Engine::get().post(capture_->device, current_stream(capture_->device), task.what, task.uses,
                         task.step);
  }
  std::size_t tasks() const { return capture_->tasks.size(); }

 private:
  const std::shared_ptr<Capture> capture_;
};

}  // namespace tessera::test::stand_in
