#include "tessera/comm/group/group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "tessera/comm/group/detail/collectives.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/request_state.h"

namespace tessera {
namespace {

using detail::GroupState;
using detail::RequestState;

template <class Launch>
void block(const std::shared_ptr<GroupState>& group, const char* operation,
           const CallOptions& options, Launch&& launch) {
  RequestState call(*group, operation, options, true);
  call.start(launch);
  call.wait();
}

template <class Launch>
Request start(const std::shared_ptr<GroupState>& group, const char* operation,
              const CallOptions& options, Launch&& launch) {
  auto call = std::make_shared<RequestState>(*group, operation, options, false);
  call->keep_group(group);
  call->start(launch);
  return Request(std::move(call));
}

std::shared_ptr<GroupState> alone() {
  detail::GroupSpec spec;
  spec.name = "self";
  spec.ranks = {0};
  spec.backend = "self";
  spec.timeout = std::chrono::minutes(5);
  spec.watch = std::make_shared<detail::GroupWatch>(spec.name, spec.ranks, 0, nullptr);
  return std::make_shared<GroupState>(spec);
}

}  // namespace

// ---- request ----

Request::Request() = default;
Request::Request(std::shared_ptr<RequestState> state) : state_(std::move(state)) {}
Request::Request(Request&&) noexcept = default;
Request& Request::operator=(Request&&) noexcept = default;
Request::~Request() = default;

bool Request::done() const { return !state_ || state_->done(); }

void Request::wait() {
  if (state_) state_->wait();
}

// ---- group ----

Group::Group() : state_(alone()) {}
Group::Group(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

int Group::rank() const { return state_->rank(); }
int Group::size() const { return state_->size(); }
const std::vector<int>& Group::ranks() const { return state_->ranks(); }
const std::string& Group::name() const { return state_->name(); }
const std::string& Group::backend(c10::DeviceType device) const {
  static const std::string self = "self";
  return state_->size() == 1 && !state_->has_endpoint(device) ? self
                                                              : state_->endpoint(device).name;
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

void Group::broadcast(const at::Tensor& tensor, int root, const CallOptions& options) const {
  block(state_, "broadcast", options,
        [&](RequestState& call) { launch_broadcast(call, tensor, root); });
}
Request Group::start_broadcast(const at::Tensor& tensor, int root,
                               const CallOptions& options) const {
  return start(state_, "broadcast", options,
               [&](RequestState& call) { launch_broadcast(call, tensor, root); });
}

void Group::all_reduce(const at::Tensor& tensor, ReduceOp op, const CallOptions& options) const {
  block(state_, "all_reduce", options,
        [&](RequestState& call) { launch_all_reduce(call, tensor, op); });
}
Request Group::start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                const CallOptions& options) const {
  return start(state_, "all_reduce", options,
               [&](RequestState& call) { launch_all_reduce(call, tensor, op); });
}

void Group::reduce(const at::Tensor& tensor, int root, ReduceOp op,
                   const CallOptions& options) const {
  block(state_, "reduce", options,
        [&](RequestState& call) { launch_reduce(call, tensor, root, op); });
}
Request Group::start_reduce(const at::Tensor& tensor, int root, ReduceOp op,
                            const CallOptions& options) const {
  return start(state_, "reduce", options,
               [&](RequestState& call) { launch_reduce(call, tensor, root, op); });
}

void Group::all_gather(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes,
                       const CallOptions& options) const {
  block(state_, "all_gather", options,
        [&](RequestState& call) { launch_all_gather(call, output, input, sizes); });
}
Request Group::start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                const Sizes& sizes, const CallOptions& options) const {
  return start(state_, "all_gather", options,
               [&](RequestState& call) { launch_all_gather(call, output, input, sizes); });
}

void Group::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                           const Sizes& sizes, const CallOptions& options) const {
  block(state_, "reduce_scatter", options,
        [&](RequestState& call) { launch_reduce_scatter(call, output, input, op, sizes); });
}
Request Group::start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                    const Sizes& sizes, const CallOptions& options) const {
  return start(state_, "reduce_scatter", options,
               [&](RequestState& call) { launch_reduce_scatter(call, output, input, op, sizes); });
}

void Group::all_to_all(const at::Tensor& output, const at::Tensor& input, const Sizes& output_sizes,
                       const Sizes& input_sizes, const CallOptions& options) const {
  block(state_, "all_to_all", options, [&](RequestState& call) {
    launch_all_to_all(call, output, input, output_sizes, input_sizes);
  });
}
Request Group::start_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                const Sizes& output_sizes, const Sizes& input_sizes,
                                const CallOptions& options) const {
  return start(state_, "all_to_all", options, [&](RequestState& call) {
    launch_all_to_all(call, output, input, output_sizes, input_sizes);
  });
}

void Group::gather(const at::Tensor& output, const at::Tensor& input, int root, const Sizes& sizes,
                   const CallOptions& options) const {
  block(state_, "gather", options,
        [&](RequestState& call) { launch_gather(call, output, input, root, sizes); });
}
Request Group::start_gather(const at::Tensor& output, const at::Tensor& input, int root,
                            const Sizes& sizes, const CallOptions& options) const {
  return start(state_, "gather", options,
               [&](RequestState& call) { launch_gather(call, output, input, root, sizes); });
}

void Group::scatter(const at::Tensor& output, const at::Tensor& input, int root, const Sizes& sizes,
                    const CallOptions& options) const {
  block(state_, "scatter", options,
        [&](RequestState& call) { launch_scatter(call, output, input, root, sizes); });
}
Request Group::start_scatter(const at::Tensor& output, const at::Tensor& input, int root,
                             const Sizes& sizes, const CallOptions& options) const {
  return start(state_, "scatter", options,
               [&](RequestState& call) { launch_scatter(call, output, input, root, sizes); });
}

void Group::send(const at::Tensor& tensor, int to, const CallOptions& options) const {
  block(state_, "send", options,
        [&](RequestState& call) { launch_exchange(call, {{Message::Kind::send, tensor, to}}); });
}
Request Group::start_send(const at::Tensor& tensor, int to, const CallOptions& options) const {
  return start(state_, "send", options, [&](RequestState& call) {
    launch_exchange(call, {{Message::Kind::send, tensor, to}});
  });
}

void Group::receive(const at::Tensor& tensor, int from, const CallOptions& options) const {
  block(state_, "receive", options, [&](RequestState& call) {
    launch_exchange(call, {{Message::Kind::receive, tensor, from}});
  });
}
Request Group::start_receive(const at::Tensor& tensor, int from, const CallOptions& options) const {
  return start(state_, "receive", options, [&](RequestState& call) {
    launch_exchange(call, {{Message::Kind::receive, tensor, from}});
  });
}

void Group::exchange(const std::vector<Message>& messages, const CallOptions& options) const {
  block(state_, "exchange", options, [&](RequestState& call) { launch_exchange(call, messages); });
}
Request Group::start_exchange(const std::vector<Message>& messages,
                              const CallOptions& options) const {
  return start(state_, "exchange", options,
               [&](RequestState& call) { launch_exchange(call, messages); });
}

void Group::barrier(const CallOptions& options) const {
  block(state_, "barrier", options, [&](RequestState& call) { launch_barrier(call); });
}
Request Group::start_barrier(const CallOptions& options) const {
  return start(state_, "barrier", options, [&](RequestState& call) { launch_barrier(call); });
}

}  // namespace tessera
