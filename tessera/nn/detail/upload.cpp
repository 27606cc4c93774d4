#include "tessera/nn/detail/upload.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::detail {

Uploads::Uploads(c10::Device device)
    : device_(device),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

c10::Stream Uploads::current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

c10::Stream Uploads::begin() const {
  c10::Event used(device_.type());
  used.record(current());
  used.block(stream_);
  return stream_;
}

std::shared_ptr<c10::Event> Uploads::end() const {
  auto copies = std::make_shared<c10::Event>(device_.type());
  copies->record(stream_);
  return copies;
}

at::Tensor Uploads::copy(const at::Tensor& host) const {
  at::Tensor made = at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
  made.copy_(host, /*non_blocking=*/true);
  return made;
}

void Uploads::wait(const c10::Event& copies) const {
  copies.block(current());
  copies.synchronize();
}

}  // namespace tessera::detail
