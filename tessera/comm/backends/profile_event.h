#pragma once
// ProfileEvent: a call of c10d's in the profile of torch.profiler.

#include <ATen/record_function.h>

#include <memory>

#include "tessera/comm/backends/transport_call.h"

namespace tessera::detail {

/// Shows a call as an event such as "tessera:all_reduce", from here until its work is complete.
/// Nothing happens unless a profiler listens.
class ProfileEvent {
 public:
  explicit ProfileEvent(const TransportCall& call);
  /// Gives `work` back.
  c10::intrusive_ptr<c10d::Work> end_with(c10::intrusive_ptr<c10d::Work> work);

 private:
  std::shared_ptr<at::RecordFunction> event_;
};

}  // namespace tessera::detail
