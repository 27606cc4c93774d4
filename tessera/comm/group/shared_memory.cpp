#include "tessera/comm/group/shared_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DefaultDtype.h>

#include "tessera/comm/group/detail/group_state.h"
#include "tessera/shm/group.h"

namespace tessera {

bool SharedMemory::available(const Group& group) {
  const auto& state = *group.state();
  return state.has_endpoint(c10::DeviceType::CPU) &&
         state.endpoint(c10::DeviceType::CPU).abilities.share;
}

SharedMemory SharedMemory::make(const Group& group, std::int64_t bytes,
                                const CallOptions& options) {
  if (bytes < 1)
    throw InvalidArgument("SharedMemory: ", bytes, " bytes for each rank of group '", group.name(),
                          "'; ask for at least 1");
  if (!available(group))
    throw NotAvailable("SharedMemory: group '", group.name(), "' goes over ", group.backend(),
                       ", and only ranks that meet in memory (shm) have "
                       "any in common; SharedMemory::available() tells");
  // Ranks that are late, gone, or elsewhere in the program are found out by the group.
  group.barrier(options);
  const auto& state = *group.state();
  if (!state.store())
    throw NotAvailable("SharedMemory: group '", group.name(), "' has no store to meet at");
  SharedMemory memory;
  memory.arena_ =
      state.endpoint(c10::DeviceType::CPU)
          .abilities.share(static_cast<std::size_t>(bytes), state.store(),
                           options.timeout.count() > 0 ? options.timeout : state.timeout());
  return memory;
}

at::Tensor SharedMemory::empty(at::IntArrayRef sizes, const at::TensorOptions& options) const {
  if (!options.device().is_cpu())
    throw InvalidArgument("SharedMemory: a tensor on ", options.device().str(),
                          "; it is memory of the CPU");
  std::int64_t count = options.dtype().itemsize();
  for (const auto size : sizes)
    if (size < 0 || __builtin_mul_overflow(count, size, &count))
      throw InvalidArgument("SharedMemory: a tensor of shape ", sizes);
  if (!arena_)
    throw NotAvailable("SharedMemory: a tensor is asked of no memory; make some with make()");
  std::byte* data = arena_->try_allocate(static_cast<std::size_t>(count));
  if (data == nullptr)
    throw NotAvailable("SharedMemory: ", count, " bytes are asked of ", bytes(), ", of which ",
                       used(), " are taken and ", arena_->largest_free(), " are free in one piece");
  return at::from_blob(
      data, sizes, [arena = arena_](void* p) { arena->deallocate(static_cast<std::byte*>(p)); },
      options);
}

std::int64_t SharedMemory::bytes() const {
  return arena_ ? static_cast<std::int64_t>(arena_->size()) : 0;
}

std::int64_t SharedMemory::used() const {
  return arena_ ? static_cast<std::int64_t>(arena_->used()) : 0;
}

}  // namespace tessera
