#include "tessera/comm/group/group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <type_traits>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/comm/group/detail/collectives.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/request_state.h"

namespace tessera {
namespace {

using detail::GroupState;
using detail::RequestState;

// A blocking call keeps its state on the stack, and its backend is told that it blocks. `launch` is
// one of collectives.h.
template <class Result, class Launch, class... Arguments>
Result make(const std::shared_ptr<GroupState>& group, const char* operation,
            const CallOptions& options, const Launch& launch, const Arguments&... arguments) {
  const auto body = [&](RequestState& call) { launch(call, arguments...); };
  if constexpr (std::is_void_v<Result>) {
    RequestState call(*group, operation, options, true);
    call.start(body);
    call.wait();
  } else {
    auto call = std::make_shared<RequestState>(*group, operation, options, false);
    call->keep_group(group);
    call->start(body);
    return Request(std::move(call));
  }
}

std::shared_ptr<GroupState> alone() {
  detail::GroupSpec spec;
  spec.name = "self";
  spec.ranks = {0};
  spec.backend = "self";
  spec.timeout = kDefaultLimit;
  spec.watch = std::make_shared<detail::GroupWatch>(spec.name, spec.ranks, 0, nullptr);
  return std::make_shared<GroupState>(spec);
}

}  // namespace

Group::Group() : Collectives(alone()) {}
Group::Group(std::shared_ptr<GroupState> state) : Collectives(std::move(state)) {}

int Group::rank() const { return state_->rank(); }
int Group::size() const { return state_->size(); }
const std::vector<int>& Group::ranks() const { return state_->ranks(); }
const std::string& Group::name() const { return state_->name(); }
const std::string& Group::backend(c10::DeviceType device) const {
  static const std::string self = "self";
  return state_->size() == 1 && !state_->has_endpoint(device) ? self
                                                              : state_->endpoint(device).name;
}
const std::string& Group::backend_reason(c10::DeviceType device) const {
  static const std::string none;
  return state_->size() == 1 && !state_->has_endpoint(device) ? none
                                                              : state_->endpoint(device).reason;
}
CheckLevel Group::check_level() const { return state_->check_level(); }
void Group::set_check_level(CheckLevel level) { state_->set_check_level(level); }
std::chrono::milliseconds Group::timeout() const { return state_->timeout(); }
void Group::set_timeout(std::chrono::milliseconds limit) { state_->set_timeout(limit); }
std::uint64_t Group::sequence() const { return state_->sequence(); }
void Group::abort(const std::string& reason) const { state_->watch().announce(reason); }
c10::intrusive_ptr<c10d::ProcessGroup> Group::process_group() const {
  return state_->process_group();
}

template <class Result>
Result Collectives<Result>::broadcast(const at::Tensor& tensor, int root,
                                      const CallOptions& options) const {
  return make<Result>(state_, "broadcast", options, detail::launch_broadcast, tensor, root);
}

template <class Result>
Result Collectives<Result>::all_reduce(const at::Tensor& tensor, ReduceOp op,
                                       const CallOptions& options) const {
  return make<Result>(state_, "all_reduce", options, detail::launch_all_reduce, tensor, op);
}

template <class Result>
Result Collectives<Result>::reduce(const at::Tensor& tensor, int root, ReduceOp op,
                                   const CallOptions& options) const {
  return make<Result>(state_, "reduce", options, detail::launch_reduce, tensor, root, op);
}

template <class Result>
Result Collectives<Result>::all_gather(const at::Tensor& output, const at::Tensor& input,
                                       const Sizes& sizes, const CallOptions& options) const {
  return make<Result>(state_, "all_gather", options, detail::launch_parts, output, input,
                      std::nullopt, sizes, true);
}

template <class Result>
Result Collectives<Result>::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                           ReduceOp op, const Sizes& sizes,
                                           const CallOptions& options) const {
  return make<Result>(state_, "reduce_scatter", options, detail::launch_reduce_scatter, output,
                      input, op, sizes);
}

template <class Result>
Result Collectives<Result>::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                       const Sizes& output_sizes, const Sizes& input_sizes,
                                       const CallOptions& options) const {
  return make<Result>(state_, "all_to_all", options, detail::launch_all_to_all, output, input,
                      output_sizes, input_sizes);
}

template <class Result>
Result Collectives<Result>::gather(const at::Tensor& output, const at::Tensor& input, int root,
                                   const Sizes& sizes, const CallOptions& options) const {
  return make<Result>(state_, "gather", options, detail::launch_parts, output, input, root, sizes,
                      true);
}

template <class Result>
Result Collectives<Result>::scatter(const at::Tensor& output, const at::Tensor& input, int root,
                                    const Sizes& sizes, const CallOptions& options) const {
  return make<Result>(state_, "scatter", options, detail::launch_parts, input, output, root, sizes,
                      false);
}

template <class Result>
Result Collectives<Result>::send(const at::Tensor& tensor, int to,
                                 const CallOptions& options) const {
  return make<Result>(state_, "send", options, detail::launch_exchange,
                      std::vector<Message>{{Message::Kind::send, tensor, to}});
}

template <class Result>
Result Collectives<Result>::receive(const at::Tensor& tensor, int from,
                                    const CallOptions& options) const {
  return make<Result>(state_, "receive", options, detail::launch_exchange,
                      std::vector<Message>{{Message::Kind::receive, tensor, from}});
}

template <class Result>
Result Collectives<Result>::exchange(const std::vector<Message>& messages,
                                     const CallOptions& options) const {
  return make<Result>(state_, "exchange", options, detail::launch_exchange, messages);
}

template <class Result>
Result Collectives<Result>::barrier(const CallOptions& options) const {
  return make<Result>(state_, "barrier", options, detail::launch_barrier);
}

template class Collectives<void>;
template class Collectives<Request>;

void inclusive_scan(const Group& group, const at::Tensor& tensor, ReduceOp op,
                    const CallOptions& options) {
  make<void>(group.state(), "inclusive_scan", options, detail::launch_scan, tensor, op);
}

Request start_inclusive_scan(const Group& group, const at::Tensor& tensor, ReduceOp op,
                             const CallOptions& options) {
  return make<Request>(group.state(), "inclusive_scan", options, detail::launch_scan, tensor, op);
}

}  // namespace tessera
