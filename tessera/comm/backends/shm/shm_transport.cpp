#include "tessera/comm/backends/shm/shm_transport.h"

#include <ATen/ATen.h>

#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm.h"
#include "tessera/comm/backends/shm/shm_elements.h"

namespace tessera::detail {

namespace {

bool shm_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  // libtorch divides a complex number by a real one with other rounding.
  if (op == ReduceOp::Kind::avg && c10::isComplexType(dtype)) return false;
  const auto element = element_of(dtype);
  return element && shm::reduces(*element, reduction_of(op).kind);
}

/// The group's signature of a call, combined with the dtype.
std::uint64_t shm_signature(const TransportCall& call, const at::Tensor& tensor) {
  const auto dtype = tensor.defined() ? tensor.scalar_type() : c10::ScalarType::Undefined;
  return Hash().number(call.sign).number(static_cast<std::uint64_t>(dtype)).value();
}

const void* shm_read(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
void* shm_written(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

std::vector<std::size_t> sizes_in(std::size_t unit, const TransportCall::Counts& counts) {
  std::vector<std::size_t> result;
  result.reserve(counts.size());
  for (const auto n : counts) result.push_back(static_cast<std::size_t>(n) * unit);
  return result;
}

}  // namespace

Abilities ShmTransport::abilities() {
  Abilities result;
  result.reduces = shm_reduces;
  result.moves = moves_every_dtype;
  result.reduces_bits = result.signs = result.ends_collectives = result.ends_messages = true;
  result.share = [this](std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                        std::chrono::milliseconds limit) { return share(bytes, store, limit); };
  return result;
}

template <class Make>
void ShmTransport::run(TransportCall& call, std::uint64_t sign, const Make& make) {
  if (!call.blocking)
    return start(call, sign, [&](std::vector<shm::Request>& requests, shm::Call o) {
      requests.push_back(make(group().started(), o));
    });
  try {
    make(static_cast<const shm::Calls<void>&>(group()), shm::Call{call.timeout, sign});
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
}

template <class Make>
void ShmTransport::start(TransportCall& call, std::uint64_t sign, const Make& make) {
  std::vector<shm::Request> requests;
  try {
    make(requests, shm::Call{call.timeout, sign});
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
  const auto work = c10::make_intrusive<ShmWork>(link_, call, std::move(requests));
  if (call.blocking) {
    work->wait();
    return;
  }
  if (!work->isCompleted()) link_->follow(work);
  call.works.push_back({work});
}

void ShmTransport::broadcast(TransportCall& call) {
  void* data =
      rank_ == call.root ? const_cast<void*>(shm_read(call.output)) : shm_written(call.output);
  run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
    return calls.broadcast(data, call.output.nbytes(), call.root, o);
  });
}

void ShmTransport::all_reduce(TransportCall& call) {
  const auto how = reduces_of("all_reduce", call, call.output);
  void* data = shm_written(call.output);
  run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
    return calls.all_reduce(data, data, static_cast<std::size_t>(call.output.numel()), how.element,
                            how.reduction, o);
  });
}

void ShmTransport::reduce(TransportCall& call) {
  const auto how = reduces_of("reduce", call, call.output);
  void* output = rank_ == call.root ? shm_written(call.output) : nullptr;
  const void* input = output ? output : shm_read(call.output);
  run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
    return calls.reduce(input, output, static_cast<std::size_t>(call.output.numel()), how.element,
                        how.reduction, call.root, o);
  });
}

void ShmTransport::all_gather(TransportCall& call) {
  const auto sizes = sizes_in(call.input.element_size(), call.counts);
  run(call, shm_signature(call, call.input), [&](const auto& calls, shm::Call o) {
    return calls.all_gather(shm_read(call.input), shm_written(call.output), sizes, o);
  });
}

void ShmTransport::reduce_scatter(TransportCall& call) {
  const auto how = reduces_of("reduce_scatter", call, call.input);
  const auto counts = sizes_in(1, call.counts);
  run(call, shm_signature(call, call.input), [&](const auto& calls, shm::Call o) {
    return calls.reduce_scatter(shm_read(call.input), shm_written(call.output), counts, how.element,
                                how.reduction, o);
  });
}

void ShmTransport::gather(TransportCall& call) {
  const auto sizes = sizes_in(call.input.element_size(), call.counts);
  run(call, shm_signature(call, call.input), [&](const auto& calls, shm::Call o) {
    return calls.gather(shm_read(call.input), shm_written(call.output), sizes, call.root, o);
  });
}

void ShmTransport::scatter(TransportCall& call) {
  const auto sizes = sizes_in(call.output.element_size(), call.counts);
  run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
    return calls.scatter(shm_read(call.input), shm_written(call.output), sizes, call.root, o);
  });
}

// Made of messages, with a barrier beside them in which it is compared with what the others call.
void ShmTransport::all_to_all(TransportCall& call) {
  const auto out = sizes_in(call.output.element_size(), call.counts),
             in = sizes_in(call.input.element_size(), call.input_counts);
  start(call, shm_signature(call, call.input),
        [&](std::vector<shm::Request>& requests, shm::Call o) {
          const auto calls = group().started();
          requests.push_back(
              calls.all_to_all(shm_read(call.input), in, shm_written(call.output), out, o));
          requests.push_back(calls.barrier(o, "all_to_all"));
        });
}

void ShmTransport::exchange(TransportCall& call) {
  std::vector<shm::Message> messages;
  messages.reserve(call.messages.size());
  for (const auto& m : call.messages) {
    const bool sends = m.kind == Message::Kind::send;
    messages.push_back(
        {sends ? shm::Message::Kind::send : shm::Message::Kind::receive,
         sends ? const_cast<void*>(shm_read(m.tensor)) : shm_written(m.tensor), m.tensor.nbytes(),
         m.peer == TransportCall::kAnyRank ? shm::Message::kAnySource : m.peer,
         // Tags of c10d have 31 bits, and the others the highest one.
         static_cast<std::uint32_t>(call.tag), static_cast<std::uint8_t>(m.tensor.scalar_type())});
  }
  const char* name = messages.size() != 1                                ? "exchange"
                     : messages.front().kind == shm::Message::Kind::send ? "send"
                     : messages.front().peer == shm::Message::kAnySource ? "receive from any rank"
                                                                         : "receive";
  run(call, 0, [&](const auto& calls, shm::Call o) { return calls.exchange(messages, o, name); });
}

void ShmTransport::barrier(TransportCall& call) {
  run(call, shm_signature(call, {}),
      [&](const auto& calls, shm::Call o) { return calls.barrier(o); });
}

std::shared_ptr<shm::Arena> ShmTransport::share(std::size_t bytes,
                                                const c10::intrusive_ptr<c10d::Store>& store,
                                                std::chrono::milliseconds limit) {
  try {
    return group().share(bytes, directory_at(store), {bounded_limit(limit)});
  } catch (const shm::SetupError& error) {
    if (error.cause() == shm::Cause::disagreement) throw MismatchError(error.what());
    if (error.cause() == shm::Cause::absent) throw PeerLostError(error.what(), {});
    throw NotAvailable(error.what());
  } catch (const Error&) {
    link_->rethrow();
  }
}

}  // namespace tessera::detail
