#pragma once
// A device that is none, for tests of what lies on a device and what in host memory: libtorch's
// PrivateUse1, with kernels of the CPU. It differs from the CPU where a real one does: an operator
// refuses tensors of both, fresh memory holds NaN, and a copy from host memory that need not block
// is made late, when something waits for the stream that it was started on. Of a whole process,
// with a thread of the autograd engine of its own: ranks are processes.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/job/device_mesh.h"

namespace tessera::test::stand_in {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
inline constexpr auto kKey = c10::DispatchKey::PrivateUse1;

/// Bytes that live, and copies from host memory by the stream that they were started on.
inline std::atomic<std::int64_t> bytes{0}, most_bytes{0};
inline std::atomic<std::int64_t> copies_aside{0}, copies_in_place{0};
/// Bytes copied from host memory, and to it.
inline std::atomic<std::int64_t> copied_here{0}, copied_back{0};

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    auto* block = new Block{std::malloc(n + 1), n};
    std::memset(block->data, 0xff, n);
    const std::int64_t now = bytes += static_cast<std::int64_t>(n);
    for (std::int64_t most = most_bytes;
         most < now && !most_bytes.compare_exchange_weak(most, now);) {
    }
    return {block->data, block, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }
  static Memory& get() {
    static Memory memory;
    return memory;
  }

 private:
  struct Block {
    void* data;
    std::size_t n;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    bytes -= static_cast<std::int64_t>(block->n);
    std::free(block->data);
    delete block;
  }
};

/// Copies that have been started and not been made.
class Late {
 public:
  void add(std::function<void()> copy) {
    const std::lock_guard lock(mutex_);
    copies_.push_back(std::move(copy));
  }
  void make() {
    std::vector<std::function<void()>> now;
    {
      const std::lock_guard lock(mutex_);
      now.swap(copies_);
    }
    for (const auto& copy : now) copy();
  }
  static Late& get() {
    static Late late;
    return late;
  }

 private:
  std::mutex mutex_;
  std::vector<std::function<void()>> copies_;
};

inline c10::StreamId& current_stream() {
  static thread_local c10::StreamId id = 0;
  return id;
}

// Stream 0 computes at once; stream 1 is the one beside it.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(1); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(1); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream(), next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new c10::StreamId;
    *static_cast<c10::StreamId*>(*event) = on.id();
  }
  void block(void* event, const c10::Stream& waits) const override {
    if (event && waits.id() != *static_cast<c10::StreamId*>(event)) synchronizeEvent(event);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event && *static_cast<c10::StreamId*>(event) == 1) Late::get().make();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::StreamId*>(event);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { Late::get().make(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { Late::get().make(); }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// The autograd engine asks for the streams of such devices alone that have a name.
inline const bool named = [] {
  c10::register_privateuse1_backend("stand_in");
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

inline bool is_here(const at::Tensor& t) { return t.device().type() == kDevice.type(); }

/// The same memory, for the kernels of the CPU.
inline at::Tensor over(const at::Tensor& t) {
  if (!t.defined() || !is_here(t)) return t;
  return at::from_blob(
      t.mutable_data_ptr(), t.sizes(), t.strides(), [t](void*) {},
      at::TensorOptions(t.scalar_type()));
}

// A number may be on the CPU.
inline at::Tensor argument(const std::string& name, const at::Tensor& t) {
  TORCH_CHECK(!t.defined() || is_here(t) || t.dim() == 0, name,
              ": expected all tensors to be on one device, and one is on the CPU");
  return over(t);
}

inline at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                                std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                                std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &Memory::get(),
                                           c10::DispatchKeySet(kKey), dtype.value_or(at::kFloat));
}
inline at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                        std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &Memory::get(), c10::DispatchKeySet(kKey),
                                   dtype.value_or(at::kFloat), format);
}
inline at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  const bool uploads = is_here(self) && !is_here(from);
  if (uploads) ++(current_stream() == 0 ? copies_in_place : copies_aside);
  const auto moved = static_cast<std::int64_t>(self.numel() * from.element_size());
  if (uploads) copied_here += moved;
  if (!is_here(self)) copied_back += moved;
  if (uploads && non_blocking && current_stream() != 0) {
    Late::get().add([self, from] { over(self).copy_(from); });
  } else {
    at::Tensor to = over(self);
    to.copy_(over(from));
  }
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage, std::int64_t offset,
                               c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

// Every other operator.
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t n = schema.arguments().size();
  const std::vector<c10::IValue> given(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
  // A result that is given may get another size: it is made apart.
  const auto is_out = [&](std::size_t i) {
    const auto& argument = schema.arguments()[i];
    return argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite() &&
           given[i].isTensor() && is_here(given[i].toTensor());
  };
  for (std::size_t i = 0; i < n; ++i) {
    c10::IValue& v = *(stack->end() - static_cast<std::ptrdiff_t>(n - i));
    if (is_out(i)) {
      v = at::empty({0}, at::TensorOptions(given[i].toTensor().scalar_type()));
    } else if (v.isTensor()) {
      v = argument(schema.name(), v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : given[i].toTensorVector())
        list.push_back(argument(schema.name(), t));
      v = std::move(list);
    } else if (v.isDevice()) {
      v = c10::Device(c10::kCPU);
    }
  }
  op.callBoxed(stack);
  const auto fresh = [](const at::Tensor& made) {
    if (!made.defined()) return made;
    at::Tensor t = at::detail::empty_strided_generic(made.sizes(), made.strides(), &Memory::get(),
                                                     c10::DispatchKeySet(kKey), made.scalar_type());
    over(t).copy_(made);
    return t;
  };
  const std::size_t results = schema.returns().size();
  for (std::size_t r = 0; r < results; ++r) {
    c10::IValue& v = *(stack->end() - static_cast<std::ptrdiff_t>(results - r));
    const auto* alias = schema.returns()[r].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), schema.name(), " makes a view");
    if (alias) {
      for (std::size_t i = 0; i < n; ++i) {
        const auto* of = schema.arguments()[i].alias_info();
        if (!of || of->beforeSets() != alias->beforeSets()) continue;
        if (is_out(i)) {
          const at::Tensor to = given[i].toTensor(), made = v.toTensor();
          if (to.sizes() == made.sizes()) {
            over(to).copy_(made);
          } else {
            const at::Tensor t = fresh(made);
            to.unsafeGetTensorImpl()->set_storage_keep_dtype(t.storage());
            to.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), 0);
          }
        }
        v = given[i];
      }
    } else if (v.isTensor()) {
      v = fresh(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(fresh(t));
      v = std::move(list);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

/// The tensors of a call, as another backend takes them.
struct Given {
  at::Tensor operator()(const at::Tensor& t) {
    Late::get().make();
    kept.push_back(t);
    return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(),
                         at::TensorOptions(t.scalar_type()));
  }
  std::vector<at::Tensor> kept;
};

/// A call of another backend. Its tensors go when it has been waited for: that backend's threads,
/// and groups, which look at calls on a device, keep it for longer.
class Call final : public c10d::Work {
 public:
  Call(c10::intrusive_ptr<c10d::Work> inner, Given given)
      : inner_(std::move(inner)), given_(std::move(given)) {}
  bool isCompleted() override { return over_; }
  bool wait(std::chrono::milliseconds limit) override {
    if (over_) return true;
    inner_->wait(limit);
    given_ = {};
    over_ = true;
    return true;
  }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  Given given_;
  std::atomic<bool> over_{false};
};

/// The calls of another transport, on memory of the device. A call waits for what the current
/// stream has to do before it.
class OnDevice final : public detail::Transport {
 public:
  explicit OnDevice(std::shared_ptr<detail::Transport> inner)
      : Transport(inner->rank(), inner->size(), inner->timeout()), inner_(std::move(inner)) {}
  const char* name() const override { return "stand-in"; }

  void broadcast(detail::TransportCall& c) override { pass(c, &Transport::broadcast); }
  void all_reduce(detail::TransportCall& c) override { pass(c, &Transport::all_reduce); }
  void reduce(detail::TransportCall& c) override { pass(c, &Transport::reduce); }
  void all_gather(detail::TransportCall& c) override { pass(c, &Transport::all_gather); }
  void reduce_scatter(detail::TransportCall& c) override { pass(c, &Transport::reduce_scatter); }
  void gather(detail::TransportCall& c) override { pass(c, &Transport::gather); }
  void scatter(detail::TransportCall& c) override { pass(c, &Transport::scatter); }
  void all_to_all(detail::TransportCall& c) override { pass(c, &Transport::all_to_all); }
  void exchange(detail::TransportCall& c) override { pass(c, &Transport::exchange); }
  void barrier(detail::TransportCall& c) override { pass(c, &Transport::barrier); }
  bool step_in_waits(const std::weak_ptr<const std::function<bool()>>& step) override {
    return inner_->step_in_waits(step);
  }
  bool batches(int peer) const override { return inner_->batches(peer); }
  detail::Abilities abilities() override {
    const detail::Abilities inner = inner_->abilities();
    detail::Abilities own;
    own.reduces = inner.reduces;
    own.reduce_scatters = inner.reduce_scatters;
    own.moves = inner.moves;
    return own;
  }
  void abort() override { inner_->abort(); }

 private:
  void pass(detail::TransportCall& c, void (Transport::*make)(detail::TransportCall&)) {
    Given given;
    for (at::Tensor* t : {&c.output, &c.input})
      if (t->defined()) *t = given(*t);
    for (Message& m : c.messages) m.tensor = given(m.tensor);
    (inner_.get()->*make)(c);
    for (auto& started : c.works)
      started.work = c10::make_intrusive<Call>(std::move(started.work), given);
  }
  const std::shared_ptr<detail::Transport> inner_;
};

/// Lets all groups over axes of the mesh serve the device.
inline void serve(const DeviceMesh& mesh) {
  const int axes = mesh.mesh().dims();
  for (unsigned subset = 0; subset < 1U << axes; ++subset) {
    std::vector<int> over_axes;
    for (int a = 0; a < axes; ++a) {
      if (subset >> a & 1U) over_axes.push_back(a);
    }
    const Group group = subset + 1 == 1U << axes ? mesh.all() : mesh.group(over_axes);
    if (group.size() == 1 || group.state()->has_endpoint(kDevice.type())) continue;
    group.state()->set_endpoint(
        kDevice, std::make_shared<OnDevice>(group.state()->endpoint(c10::kCPU).transport));
  }
}

}  // namespace tessera::test::stand_in
