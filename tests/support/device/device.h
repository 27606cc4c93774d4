#pragma once
// A device that is none: a stand-in for a GPU under a key of libtorch's for which nothing is
// registered here (HPU: unlike PrivateUse1's, `set_data` takes its memory for dense, as CUDA's), so
// that what goes wrong on a GPU goes wrong here. A host that reads its memory ends the program.
// Work is done late, on streams whose order among each other is drawn from a seed. Memory is handed
// on as soon as it is free, and then holds NaN. Operators run the CPU's kernels, in the order of
// their stream. Whatever touches memory says so: what no event orders is a fault, in any order
// drawn.
//
//   reseed(7);
//   const at::Tensor x = at::ones({3}).to(device(0));   // four devices, one for each rank
//   EXPECT_EQ((x + 1).cpu().sum().item<float>(), 6);
//   EXPECT_EQ(take_faults(), "");

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::test::stand_in {

constexpr int kDevices = 4;
inline c10::Device device(int index) {
  return {c10::DeviceType::HPU, static_cast<c10::DeviceIndex>(index)};
}
inline const c10::Device kDevice = device(0);
inline bool is_here(const at::Tensor& t) {
  return t.defined() && t.device().type() == c10::DeviceType::HPU;
}

/// What a whole process did. Waits are those of the host for the device, `own_waits` those that
/// only this stand-in needs: an operator whose result it cannot foretell.
struct Counters {
  std::atomic<std::int64_t> waits{0}, own_waits{0}, launches{0};
  /// Bytes that are in use, and the most of them.
  std::atomic<std::int64_t> bytes{0}, most_bytes{0};
  /// Copies from host memory, by whether the device's first stream or another one makes them; bytes
  /// copied from host memory and to it; copies that shall not block of memory that is not pinned.
  std::atomic<std::int64_t> copies_in_place{0}, copies_aside{0}, copied_here{0}, copied_back{0},
      unpinned{0};
};
Counters& counters();

/// Draws the order of streams anew. `hold`: how much work may wait before any is begun, so that
/// what need not be done is done late.
void reseed(std::uint64_t seed, int hold = 40);
/// While one lives, work is begun only where something waits for it or much of it waits, however
/// long the host takes: for tests of what is done too early.
class HeldBack {
 public:
  HeldBack();
  ~HeldBack();
  HeldBack(const HeldBack&) = delete;
  HeldBack& operator=(const HeldBack&) = delete;
};
/// What was found wrong since the last call, a line each.
std::string take_faults();
/// Waits until no device has work: what runs while a program ends meets libtorch taken apart.
void finish();
/// Names the place of the program in faults and at the end by a host's read; of this thread.
void set_place(const char* place);

/// What a task on a stream touches: memory from `begin` on.
struct Use {
  const void* begin;
  std::size_t bytes;
  bool writes;
};
Use use(const at::Tensor& t, bool writes);

/// The end of a task, in the order of its stream.
class Mark;
using MarkPtr = std::shared_ptr<Mark>;
bool is_done(const Mark& mark);
/// Adds a task to a stream of a device. `step` runs on the device's thread and is called again
/// until it returns true.
MarkPtr post(int device, c10::StreamId stream, const char* what, const std::vector<Use>& uses,
             std::function<bool()> step);
/// Makes what comes later on the stream wait for the mark.
void block(int device, c10::StreamId stream, const MarkPtr& mark);
/// Makes the host wait.
void wait_for(const MarkPtr& mark);
c10::StreamId current_stream(int device);
/// A stream for the calls of a group.
c10::StreamId stream_of_a_group(int device);
/// The tensor's memory, for kernels of the CPU that run in a task. Does not keep it.
at::Tensor over(const at::Tensor& t);

}  // namespace tessera::test::stand_in
