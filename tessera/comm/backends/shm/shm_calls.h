#pragma once
// What the calls of ShmBackend share: memory that ranks read and write, and how a call is made, for
// the sources of ShmBackend alone.

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/comm/backends/arguments.h"
#include "tessera/comm/backends/shm/shm_backend.h"
#include "tessera/comm/backends/shm/shm_elements.h"
#include "tessera/comm/group/detail/backend_calls.h"

namespace tessera::detail {

/// Memory that the other ranks may read: the tensor's own if it is in row-major order, else a copy.
inline const void* readable(ShmCall& call, const at::Tensor& tensor) {
  const at::Tensor plain =
      is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  call.tensors.push_back(plain);
  return plain.const_data_ptr();
}

/// Memory for a result: the tensor's own, or some that is copied to it at the end. `filled`: with
/// the tensor's values.
inline void* target_of(ShmCall& call, const at::Tensor& tensor, bool filled = false) {
  if (is_plain(tensor)) {
    call.tensors.push_back(tensor);
    return tensor.mutable_data_ptr();
  }
  const at::Tensor scratch =
      at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  if (filled) scratch.copy_(tensor);
  call.tensors.push_back(scratch);
  call.finish.emplace_back([tensor, scratch] { tensor.copy_(scratch); });
  return scratch.mutable_data_ptr();
}

inline std::vector<std::size_t> sizes_in(std::size_t unit,
                                         const std::vector<std::int64_t>& counts) {
  std::vector<std::size_t> result;
  for (const auto n : counts) result.push_back(static_cast<std::size_t>(n) * unit);
  return result;
}

inline std::uint8_t type_of(const at::Tensor& tensor) {
  return static_cast<std::uint8_t>(tensor.scalar_type());
}

inline shm::Message message_of(ShmCall& call, bool sends, const at::Tensor& tensor, int peer,
                               std::uint32_t tag) {
  shm::Message message;
  message.kind = sends ? shm::Message::Kind::send : shm::Message::Kind::receive;
  message.data = sends ? const_cast<void*>(readable(call, tensor)) : target_of(call, tensor);
  message.bytes = tensor.nbytes();
  message.peer = peer;
  message.tag = tag;
  message.type = type_of(tensor);
  return message;
}

inline ShmCall call_of(const char* name, c10d::OpType type, std::vector<at::Tensor> results = {}) {
  ShmCall call;
  call.name = name;
  call.type = type;
  call.results = std::move(results);
  return call;
}

/// Takes the results and `finish`, whose turn comes after the result has been copied to its own
/// tensor.
inline ShmCall call_of(const char* name, OwnCall& how) {
  ShmCall call = call_of(name, how.type, std::move(how.results));
  call.last = std::move(how.finish);
  return call;
}

template <class Block, class Start>
ShmBackend::WorkPtr ShmBackend::run(ShmCall call, CallLimit limit, std::uint64_t sign,
                                    const Block& block, const Start& start) {
  if (!limit.blocking)
    return run_all(
        std::move(call), limit, sign,
        [&](std::vector<shm::Request>& requests, shm::Call o) { requests.push_back(start(o)); });
  const shm::Call o = options(call, limit, sign);
  try {
    block(o);
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
  return c10::make_intrusive<ShmWork>(link_, std::move(call));
}

template <class Start>
ShmBackend::WorkPtr ShmBackend::run_all(ShmCall call, CallLimit limit, std::uint64_t sign,
                                        const Start& start) {
  const shm::Call o = options(call, limit, sign);
  std::vector<shm::Request> requests;
  try {
    start(requests, o);
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
  auto work = c10::make_intrusive<ShmWork>(link_, std::move(call), std::move(requests));
  if (limit.blocking)
    work->wait();
  else if (!work->isCompleted())
    link_->follow(work);
  return work;
}

template <class Start>
ShmBackend::WorkPtr ShmBackend::run_messages(ShmCall call, CallLimit limit, std::uint64_t sign,
                                             const Start& start) {
  const char* name = call.name;
  return run_all(std::move(call), limit, sign,
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   requests.push_back(start(o));
                   requests.push_back(group().started().barrier(o, name));
                 });
}

}  // namespace tessera::detail
