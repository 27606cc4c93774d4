#include "tessera/comm/backends/profile_event.h"

#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/backends/own_work.h"

namespace tessera::detail {
namespace {

// As PyTorch's own backends name theirs.
const char* event_name(c10d::OpType type) {
  using enum c10d::OpType;
  switch (type) {
    case BROADCAST:
      return "tessera:broadcast";
    case ALLREDUCE:
      return "tessera:all_reduce";
    case REDUCE:
      return "tessera:reduce";
    case ALLGATHER:
    case _ALLGATHER_BASE:
    case ALLGATHER_COALESCED:
      return "tessera:all_gather";
    case GATHER:
      return "tessera:gather";
    case SCATTER:
      return "tessera:scatter";
    case REDUCE_SCATTER:
    case _REDUCE_SCATTER_BASE:
      return "tessera:reduce_scatter";
    case ALLTOALL:
    case ALLTOALL_BASE:
      return "tessera:all_to_all";
    case SEND:
      return "tessera:send";
    case RECV:
      return "tessera:recv";
    case RECVANYSOURCE:
      return "tessera:recvAnySource";
    case BARRIER:
      return "tessera:barrier";
    default:
      return "tessera:call";
  }
}

}  // namespace

ProfileEvent::ProfileEvent(const TransportCall& call) {
  auto listeners = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!listeners) return;
  event_ = std::make_shared<at::RecordFunction>(std::move(*listeners));
  event_->_setAsync();
  std::vector<c10::IValue> tensors;
  if (event_->needsInputs()) {
    if (call.input.defined()) tensors.emplace_back(call.input);
    for (const auto& message : call.messages) tensors.emplace_back(message.tensor);
    if (tensors.empty()) tensors.assign(call.results.begin(), call.results.end());
  }
  event_->before(event_name(call.type), &tensors);
}

c10::intrusive_ptr<c10d::Work> ProfileEvent::end_with(c10::intrusive_ptr<c10d::Work> work) {
  // Others record themselves.
  if (event_ && dynamic_cast<OwnWork*>(work.get()))
    work->getFuture()->addCallback(
        [event = std::exchange(event_, nullptr)](c10::ivalue::Future&) { event->end(); });
  return work;
}

}  // namespace tessera::detail
