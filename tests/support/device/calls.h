#pragma once
// What the operators of the stand-in device share: memory of a size, tasks on the current stream.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "engine.h"

namespace tessera::test::stand_in {

inline int index_of(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
inline int index_of(const at::Tensor& t) { return t.device().index(); }

/// Makes a device the current one of this thread.
struct OnDevice {
  explicit OnDevice(int index) : before(std::exchange(current_device(), index)) {}
  ~OnDevice() { current_device() = before; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  int before;
};

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> on, std::optional<bool>);
/// Memory of its own if what is there is too small; then what was there comes along.
void resize_to(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides);
/// Posts to the device, on its current stream.
MarkPtr post_here(int index, const char* what, const std::vector<Use>& uses,
                  std::function<void()> task);
/// The kernel of the CPU in a task: any operator.
void call_late(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::test::stand_in
