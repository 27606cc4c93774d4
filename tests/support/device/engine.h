#pragma once
// The streams and the memory of the stand-in device: device.cpp has the tasks and their order,
// memory.cpp what they touch, operators.cpp what libtorch calls.

#include <c10/core/Allocator.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "device.h"

namespace tessera::test::stand_in {

constexpr int kStreams = 32, kPool = 8;
/// For each stream of each device the number of its last task that is known to be over.
using Clock = std::array<std::uint64_t, std::size_t{kDevices} * kStreams>;
inline int number_of(int device, c10::StreamId stream) {
  return device * kStreams + static_cast<int>(stream);
}
inline void join(Clock& to, const Clock& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

class Mark {
 public:
  int device = 0;
  Clock clock{};
  std::atomic<bool> done{false};
  bool captured = false;  // never done: it is of a Graph
};

/// A task as it was given to a stream. `clock`: what is over before it ends, itself included.
struct Given {
  std::string what;
  int device;
  c10::StreamId stream;
  Clock clock;
};

struct Access {
  const char *begin, *end;
  int stream;
  std::uint64_t time;
  bool writes;
  std::string what;
};

struct Block;
/// What a Graph records, and memory that only its tasks use.
struct Capture {
  struct Task {
    const char* what;
    std::vector<Use> uses;
    std::function<bool()> step;
  };
  int device = 0;
  c10::StreamId stream = 0;
  std::vector<Task> tasks;
  std::map<std::size_t, std::vector<Block*>> free;
};

struct Block {
  char* data = nullptr;
  std::size_t size = 0, asked = 0;
  int device = 0;
  c10::StreamId stream = 0;
  std::set<c10::StreamId> recorded;
  std::vector<Access> accesses;
  std::shared_ptr<Capture> capture;  // whose memory it is
};

/// One lock for all: tasks themselves run without it.
struct Engine {
  struct Task {
    std::function<bool()> step;
    MarkPtr mark;
    MarkPtr after;  // not begun before that
  };
  struct Device {
    std::array<std::deque<Task>, kStreams> queues;
    int urgent = 0;
    std::size_t waiting = 0;
    Clock host{};
    std::array<Clock, kStreams> clocks{};
    std::exception_ptr error;
    int next_pool = 0, next_group = 0;
    std::shared_ptr<Capture> capture;
    Capture* capture_of(c10::StreamId stream) const {
      return capture && capture->stream == stream ? capture.get() : nullptr;
    }
    std::condition_variable work;
    std::thread thread;
    std::mt19937_64 random{1};
    std::array<int, kStreams> order{};
    std::map<std::pair<c10::StreamId, std::size_t>, std::vector<Block*>> free;
    std::vector<std::pair<Block*, std::vector<MarkPtr>>> leaving;
  };
  std::mutex mutex;
  std::condition_variable over;
  std::array<Device, kDevices> devices;
  std::uint64_t seed = 1;
  std::size_t hold = 40;
  int held = 0;
  std::string faults;
  std::vector<Given>* noted = nullptr;   // of a Timeline
  std::map<const char*, Block*> blocks;  // by their begin
  char *arena = nullptr, *shadow = nullptr;
  std::size_t used = 0;

  static Engine& get();
  void run(int device);
  /// With the lock held.
  MarkPtr post(int device, c10::StreamId stream, const char* what, const std::vector<Use>& uses,
               std::function<bool()> step);
  void touch(const Use& use, int stream, const Clock& clock, const char* what);
  void release(Block* block);
  /// Takes the lock.
  void record(const void* data, c10::StreamId stream);
  void hand_on(Block* block);
  Block* block_of(const void* data);
  void fault(const std::string& text);
};

c10::Allocator& memory();
c10::Allocator& pinned_memory();
bool is_pinned(const void* data);
/// Keeps a pinned block for as long as it is held.
std::shared_ptr<void> hold_pinned(const void* data);
int& current_device();
std::array<c10::StreamId, kDevices>& current_streams();

}  // namespace tessera::test::stand_in
