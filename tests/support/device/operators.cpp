// What libtorch calls of the stand-in device: its guard and hooks, what makes and copies tensors,
// and for every other operator the kernel of the CPU, in a task.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>

#include "calls.h"
#include "tessera/base/text.h"

namespace tessera::test::stand_in {

constexpr auto kKey = c10::DispatchKey::HPU;

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> on, std::optional<bool>) {
  const OnDevice guard(index_of(on.value_or(device(current_device()))));
  return at::detail::empty_strided_generic(sizes, strides, &memory(), c10::DispatchKeySet(kKey),
                                           dtype.value_or(at::kFloat));
}

MarkPtr post_here(int index, const char* what, const std::vector<Use>& uses,
                  std::function<void()> task) {
  return post(index, current_stream(index), what, uses, [task = std::move(task)] {
    task();
    return true;
  });
}

namespace {

void host_waits(const MarkPtr& mark) {
  ++counters().waits;
  wait_for(mark);
}

struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    return device(std::exchange(current_device(), static_cast<int>(d.index())));
  }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device d) const override { current_device() = index_of(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current_device() = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    return stream(d, current_stream(index_of(d)));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    Engine& engine = Engine::get();
    const std::lock_guard lock(engine.mutex);
    return stream(d, 1 + engine.devices[index_of(d)].next_pool++ % (kPool - 1));
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return getStreamFromGlobalPool(d, false);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto& now = current_streams()[next.device_index()];
    return stream(next.device(), std::exchange(now, next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark =
        post(on.device_index(), on.id(), "an event", {}, [] { return true; });
  }
  void block(void* event, const c10::Stream& waits) const override {
    if (event) stand_in::block(waits.device_index(), waits.id(), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    const auto* one = static_cast<Event*>(event);
    return !one || !one->mark || one->mark->done;
  }
  void synchronizeEvent(void* event) const override {
    const auto* one = static_cast<Event*>(event);
    if (one && one->mark) host_waits(one->mark);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& s) const override {
    Engine& engine = Engine::get();
    const std::lock_guard lock(engine.mutex);
    return engine.devices[s.device_index()].queues[s.id()].empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    host_waits(post(s.device_index(), s.id(), "a wait", {}, [] { return true; }));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    for (int s = 0; s < kStreams; ++s) synchronizeStream(stream(device(d), s));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool isStreamCapturing(const c10::Stream& s) const override {
    Engine& engine = Engine::get();
    const std::lock_guard lock(engine.mutex);
    return engine.devices[index_of(s.device())].capture_of(s.id()) != nullptr;
  }
#endif
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Engine::get().record(data.get(), s.id());
  }

 private:
  static c10::Stream stream(c10::Device d, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index_of(d)), id);
  }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override {}
  // libtorch knows one kind of accelerator at a time.
  bool hasHPU() const override { return !at::hasCUDA(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex d) const override { current_device() = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device(), static_cast<int>(d)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void* data) const override {
    Engine& engine = Engine::get();
    const std::lock_guard lock(engine.mutex);
    const Block* block = engine.block_of(data);
    TORCH_CHECK(block, "memory that is not the stand-in device's");
    return device(block->device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    static std::array<at::Generator, kDevices> all{
        at::detail::createCPUGenerator(), at::detail::createCPUGenerator(),
        at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
    return all[static_cast<std::size_t>(d < 0 ? current_device() : d)];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

const bool registered = [] {
  at::HPUHooksRegistry()->Register(
      "HPUHooks", [](at::HPUHooksArgs args) -> std::unique_ptr<at::HPUHooksInterface> {
        return std::make_unique<HPUHooks>(args);
      });
  return true;
}();

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> on, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const OnDevice guard(index_of(on.value_or(device(current_device()))));
  return at::detail::empty_generic(sizes, &memory(), c10::DispatchKeySet(kKey),
                                   dtype.value_or(at::kFloat), format);
}

void copy_between(const at::Tensor& self, const at::Tensor& from) {
  const int to = index_of(self), of = index_of(from);
  const auto meet = [](int first, int then) {
    block(then, current_stream(then), post_here(first, "a meeting", {}, [] {}));
  };
  if (to != of) meet(of, to);
  post_here(to, "copy_", {use(from, false), use(self, true)},
            [a = over(self), b = over(from)] { a.copy_(b); });
  if (to != of) meet(to, of);
}

void copy_here(const at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  const int to = index_of(self);
  ++(current_stream(to) == 0 ? counters().copies_in_place : counters().copies_aside);
  counters().copied_here += static_cast<std::int64_t>(self.numel() * from.element_size());
  auto held = hold_pinned(from.const_data_ptr());
  const bool late = non_blocking && held;
  if (non_blocking && !held && from.numel() > 0) ++counters().unpinned;
  // What is not pinned is copied aside before the call returns.
  const at::Tensor source = late || !non_blocking
                                ? at::from_blob(const_cast<void*>(from.const_data_ptr()),
                                                from.sizes(), from.strides(), from.options())
                                : from.clone();
  if (from.is_conj()) source._set_conj(true);
  if (from.is_neg()) source._set_neg(true);
  const MarkPtr mark = post_here(to, "copy_", {use(self, true)},
                                 [a = over(self), source, held] { a.copy_(source); });
  if (!non_blocking) host_waits(mark);
}

void copy_back(const at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  counters().copied_back += static_cast<std::int64_t>(self.numel() * from.element_size());
  auto held = hold_pinned(self.const_data_ptr());
  if (non_blocking && !held && self.numel() > 0) ++counters().unpinned;
  const at::Tensor target = at::from_blob(self.mutable_data_ptr(), self.sizes(), self.strides(),
                                          self.options().pinned_memory(false));
  // What the host reads too early is not what it gets.
  if (non_blocking && held && self.is_non_overlapping_and_dense())
    std::memset(target.mutable_data_ptr(), 0xff, target.nbytes());
  const MarkPtr mark = post_here(index_of(from), "copy_", {use(from, false)},
                                 [target, b = over(from), held] { target.copy_(b); });
  if (!non_blocking || !held) host_waits(mark);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (is_here(self) && is_here(from)) {
    copy_between(self, from);
  } else if (is_here(self)) {
    copy_here(self, from, non_blocking);
  } else {
    copy_back(self, from, non_blocking);
  }
  return self;
}

at::Scalar item(const at::Tensor& self) {
  at::Tensor value = at::empty({}, at::TensorOptions(self.scalar_type()));
  host_waits(post_here(index_of(self), "item", {use(self, false)},
                       [value, t = over(self)] { value.copy_(t.reshape({})); }));
  return value.item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, std::int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

}  // namespace

void resize_to(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const std::size_t needed = at::detail::computeStorageNbytes(sizes, strides, self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  const auto offset = static_cast<std::size_t>(self.storage_offset()) * self.element_size();
  if (needed > 0 && needed + offset > self.storage().nbytes()) {
    const at::Tensor more =
        empty_strided(sizes, strides, self.scalar_type(), {}, self.device(), {});
    if (self.numel() > 0) {
      const auto n = std::min<std::int64_t>(self.numel(), more.numel());
      copy_between(more.as_strided({n}, {1}), self.as_strided({n}, {1}));
    }
    // The storage stays the same object: aliases of it grow too.
    at::Storage storage = more.storage();
    const auto bytes = storage.nbytes();
    self.storage().set_data_ptr_noswap(storage.set_data_ptr(c10::DataPtr(nullptr, self.device())));
    self.storage().set_nbytes(bytes);
    impl->set_sizes_and_strides(sizes, strides, 0);
    return;
  }
  impl->set_sizes_and_strides(sizes, strides);
}

namespace {

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes,
                         std::optional<c10::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) return self;
  const at::Tensor like = at::empty(sizes, at::TensorOptions(at::kMeta).dtype(self.scalar_type()),
                                    format.value_or(at::MemoryFormat::Contiguous));
  resize_to(self, sizes, like.strides());
  return self;
}

void record_stream(at::Tensor& self, at::Stream s) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), s);
}

// Attention by its definition.
std::int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                              bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_late>());
}
TORCH_LIBRARY_IMPL(aten, HPU, m) {
  // Of others libtorch's own are for devices with a convolution of their own.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_late>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &item);
  m.impl("_fused_sdp_choice", &attention_choice);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

}  // namespace
}  // namespace tessera::test::stand_in
