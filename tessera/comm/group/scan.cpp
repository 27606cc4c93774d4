#include "tessera/comm/group/scan.h"

#include <memory>

#include "tessera/comm/group/detail/collectives.h"
#include "tessera/comm/group/detail/request_state.h"

namespace tessera {
namespace {

constexpr auto kScan = "inclusive_scan";

}  // namespace

void inclusive_scan(const Group& group, const at::Tensor& tensor, ReduceOp op,
                    const CallOptions& options) {
  detail::RequestState call(*group.state(), kScan, options, true);
  call.start([&](detail::RequestState& state) { launch_scan(state, tensor, op); });
  call.wait();
}

Request start_inclusive_scan(const Group& group, const at::Tensor& tensor, ReduceOp op,
                             const CallOptions& options) {
  auto call = std::make_shared<detail::RequestState>(*group.state(), kScan, options, false);
  call->keep_group(group.state());
  call->start([&](detail::RequestState& state) { launch_scan(state, tensor, op); });
  return Request(std::move(call));
}

}  // namespace tessera
