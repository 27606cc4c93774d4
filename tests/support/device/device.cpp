#include "device.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>

#include "engine.h"
#include "tessera/base/text.h"

namespace tessera::test::stand_in {
namespace {

// Work is begun when something waits for it, when much of it waits, or after this, unless it is
// held back.
constexpr std::chrono::microseconds kLate{400};
constexpr std::chrono::microseconds kLook{50};
constexpr std::chrono::seconds kLimit{60};

thread_local const char* place = "";

}  // namespace

Counters& counters() {
  static Counters all;
  return all;
}

void set_place(const char* text) { place = text; }

// Never destroyed: its threads may be in a task when the program ends.
Engine& Engine::get() {
  static auto* const one = new Engine;
  return *one;
}

void Engine::fault(const std::string& text) {
  if (faults.size() < 4000) faults += concat(text, *place ? concat(" [", place, "]") : "", "\n");
}

void reseed(std::uint64_t seed, int hold) {
  Engine& engine = Engine::get();
  const std::lock_guard lock(engine.mutex);
  engine.seed = seed;
  engine.hold = static_cast<std::size_t>(hold);
  for (int d = 0; d < kDevices; ++d)
    engine.devices[d].random.seed(seed * 31 + static_cast<std::uint64_t>(d));
}

HeldBack::HeldBack() {
  Engine& engine = Engine::get();
  const std::lock_guard lock(engine.mutex);
  ++engine.held;
}

HeldBack::~HeldBack() {
  Engine& engine = Engine::get();
  const std::lock_guard lock(engine.mutex);
  --engine.held;
  for (auto& d : engine.devices) d.work.notify_one();
}

std::string take_faults() {
  Engine& engine = Engine::get();
  const std::lock_guard lock(engine.mutex);
  return std::exchange(engine.faults, {});
}

MarkPtr Engine::post(int device, c10::StreamId stream, const char* what,
                     const std::vector<Use>& uses, std::function<bool()> step) {
  Device& d = devices[device];
  if (Capture* capture = d.capture_of(stream)) {
    capture->tasks.push_back({what, uses, std::move(step)});
    auto mark = std::make_shared<Mark>();
    mark->device = device;
    mark->captured = true;
    return mark;
  }
  Clock& clock = d.clocks[stream];
  join(clock, d.host);
  ++clock[number_of(device, stream)];
  if (noted) noted->push_back({what, device, stream, clock});
  for (const Use& u : uses) touch(u, number_of(device, stream), clock, what);
  auto mark = std::make_shared<Mark>();
  mark->device = device;
  mark->clock = clock;
  d.queues[stream].push_back({std::move(step), mark, nullptr});
  ++d.waiting;
  if (!d.thread.joinable()) {
    std::iota(d.order.begin(), d.order.end(), 0);
    d.random.seed(seed * 31 + static_cast<std::uint64_t>(device));
    d.thread = std::thread([this, device] { run(device); });
  }
  d.work.notify_one();
  return mark;
}

MarkPtr post(int device, c10::StreamId stream, const char* what, const std::vector<Use>& uses,
             std::function<bool()> step) {
  Engine& engine = Engine::get();
  ++counters().launches;
  const std::lock_guard lock(engine.mutex);
  return engine.post(device, stream, what, uses, std::move(step));
}

void block(int device, c10::StreamId stream, const MarkPtr& mark) {
  if (!mark) return;
  Engine& engine = Engine::get();
  const std::lock_guard lock(engine.mutex);
  auto& d = engine.devices[device];
  const bool captures = d.capture_of(stream) != nullptr;
  TORCH_CHECK(captures == mark->captured,
              "stand-in device: a stream that is captured waits for "
              "another one, or another one for it");
  if (captures) return;
  join(d.clocks[stream], mark->clock);
  if (mark->done) return;
  engine.post(device, stream, "wait", {}, [] { return true; });
  d.queues[stream].back().after = mark;
}

void wait_for(const MarkPtr& mark) {
  TORCH_CHECK(!mark->captured, "stand-in device: the host waits for a stream that is captured");
  Engine& engine = Engine::get();
  std::unique_lock lock(engine.mutex);
  auto& d = engine.devices[mark->device];
  ++d.urgent;
  d.work.notify_one();
  const bool over = engine.over.wait_for(lock, kLimit, [&] { return mark->done.load(); });
  --d.urgent;
  join(d.host, mark->clock);
  if (!over) throw std::runtime_error("stand-in device: a wait took more than its 60 s");
  if (d.error) std::rethrow_exception(std::exchange(d.error, nullptr));
}

void finish() {
  Engine& engine = Engine::get();
  std::unique_lock lock(engine.mutex);
  for (auto& d : engine.devices) {
    ++d.urgent;
    d.work.notify_one();
    // What waits for a stream that is captured never begins.
    engine.over.wait_for(lock, std::chrono::seconds(5), [&] { return d.waiting == 0; });
    --d.urgent;
  }
}

bool is_done(const Mark& mark) { return mark.done; }

// Streams are run in the order drawn, each as far as it goes; the order is drawn anew now and then.
void Engine::run(int device) {
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below;
  Device& d = devices[device];
  std::unique_lock lock(mutex);
  for (;;) {
    d.work.wait(lock, [&] { return d.waiting > 0; });
    const auto hurry = [&] { return d.urgent || d.waiting >= hold; };
    if (!hurry()) d.work.wait_for(lock, kLate, hurry);
    d.work.wait(lock, [&] { return hurry() || !held; });
    if (d.random() % 4 == 0) std::shuffle(d.order.begin(), d.order.end(), d.random);
    bool any = false;
    for (const int s : d.order) {
      if (d.queues[s].empty()) continue;
      Task& task = d.queues[s].front();  // a deque: it stays where it is
      if (task.after && !task.after->done) continue;
      lock.unlock();
      bool finished = true;
      std::exception_ptr error;
      try {
        finished = task.step();
      } catch (...) {
        error = std::current_exception();
      }
      if (finished) task.step = {};  // without the lock: it may let tensors go
      lock.lock();
      if (error && !d.error) d.error = error;
      if (!finished) continue;
      task.mark->done = true;
      d.queues[s].pop_front();
      --d.waiting;
      over.notify_all();
      for (auto& other : devices) other.work.notify_one();
      any = true;
      break;
    }
    if (!any) d.work.wait_for(lock, kLook);
  }
}

int& current_device() {
  static thread_local int one = 0;
  return one;
}

std::array<c10::StreamId, kDevices>& current_streams() {
  static thread_local std::array<c10::StreamId, kDevices> all{};
  return all;
}

c10::StreamId current_stream(int device) { return current_streams()[device]; }

c10::StreamId stream_of_a_group(int device) {
  Engine& engine = Engine::get();
  const std::lock_guard lock(engine.mutex);
  return kPool + engine.devices[device].next_group++ % (kStreams - kPool);
}

}  // namespace tessera::test::stand_in
