#include "tessera/comm/group/detail/group_state.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"

namespace tessera::detail {
namespace {

c10d::ProcessGroup::BackendType backend_type(const std::string& name) {
  if (name == "gloo") return c10d::ProcessGroup::BackendType::GLOO;
  if (name == "nccl") return c10d::ProcessGroup::BackendType::NCCL;
  if (name == "mpi") return c10d::ProcessGroup::BackendType::MPI;
  return c10d::ProcessGroup::BackendType::CUSTOM;
}

}  // namespace

GroupState::GroupState(const GroupSpec& spec)
    : name_(spec.name),
      ranks_(spec.ranks),
      rank_(spec.rank),
      timeout_ms_(0),
      level_(spec.check_level),
      store_alone_(spec.backend == "store"),
      watch_(spec.watch),
      store_(spec.store) {
  set_timeout(spec.timeout);
  if (spec.trace) set_trace(spec.trace);
  watch_->set_interrupt([this] {
    for (Endpoint* endpoint : {&cpu_, &cuda_}) {
      if (!endpoint->backend) continue;
      try {
        endpoint->backend->abort();
      } catch (...) {  // nothing more can be done to wake its callers: their time limits end them
      }
    }
    const std::lock_guard lock(waiting_mutex_);
    for (auto* work : waiting_) work->abort();
  });
}

GroupState::~GroupState() { close(); }

void GroupState::close() {
  if (closed_) return;
  closed_ = true;
  watch_->set_interrupt({});
  process_group_.reset();
  for (Endpoint* endpoint : {&cpu_, &cuda_}) {
    // on purpose never freed
    if (endpoint->name == "gloo" && watch_->poison()) endpoint->backend.release();
    *endpoint = {};
  }
}

void GroupState::enlist(c10d::Work& work) {
  const std::lock_guard lock(waiting_mutex_);
  waiting_.push_back(&work);
  if (watch_->poison()) work.abort();
}

void GroupState::strike(c10d::Work& work) {
  const std::lock_guard lock(waiting_mutex_);
  std::erase(waiting_, &work);
}

std::uint64_t GroupState::next_message(int peer, bool to_peer) {
  const std::lock_guard lock(messages_mutex_);
  if (messages_.empty()) messages_.resize(ranks_.size());
  return messages_[peer][to_peer ? 1 : 0]++;
}

void GroupState::set_timeout(std::chrono::milliseconds limit) {
  if (limit.count() <= 0)
    throw InvalidArgument(concat("group '", name_, "': a time limit of ", limit.count(),
                                 " ms was given; it must be positive"));
  timeout_ms_.store(bounded_limit(limit).count(), std::memory_order_relaxed);
}

void GroupState::set_endpoint(c10::DeviceType device, std::string name,
                              c10::intrusive_ptr<c10d::Backend> backend) {
  Endpoint& endpoint = device == c10::DeviceType::CUDA ? cuda_ : cpu_;
  endpoint.uneven = dynamic_cast<UnevenBackend*>(backend.get());
  endpoint.reducing = dynamic_cast<ReducingBackend*>(backend.get());
  endpoint.name = std::move(name);
  endpoint.backend = std::move(backend);
}

bool GroupState::has_endpoint(c10::DeviceType device) const {
  return (device == c10::DeviceType::CPU && cpu_.backend) ||
         (device == c10::DeviceType::CUDA && cuda_.backend);
}

void GroupState::require_open() const {
  if (closed_)
    throw CommError(concat("group '", name_, "' was shut down; get it again from the manager"));
}

bool GroupState::meets_at_store() const {
  if (store_alone_) require_open();
  return store_alone_;
}

const Endpoint& GroupState::endpoint(c10::DeviceType device) const {
  if (device == c10::DeviceType::CPU && cpu_.backend) return cpu_;
  if (device == c10::DeviceType::CUDA && cuda_.backend) return cuda_;
  require_open();
  throw NotAvailable(concat("group '", name_, "' has no backend for ", c10::DeviceTypeName(device),
                            " tensors (it has: ", cpu_.backend ? "CPU over " : "no CPU", cpu_.name,
                            cuda_.backend ? ", CUDA over " : "", cuda_.name,
                            "). Move the tensor to a device the group serves, or build and choose "
                            "a backend for it (tessera doctor lists them)"));
}

void GroupState::set_trace(std::shared_ptr<CommTrace> trace) {
  const std::lock_guard lock(mutex_);
  trace_raw_.store(trace.get(), std::memory_order_release);
  if (trace) traces_.push_back(std::move(trace));
}

c10::intrusive_ptr<c10d::ProcessGroup> GroupState::process_group() {
  const std::lock_guard lock(mutex_);
  if (!process_group_) {
    auto store =
        store_ ? store_ : c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>());
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank_, size());
    if (cpu_.backend)
      group->setBackend(c10::DeviceType::CPU, backend_type(cpu_.name), cpu_.backend);
    if (cuda_.backend)
      group->setBackend(c10::DeviceType::CUDA, backend_type(cuda_.name), cuda_.backend);
    if (cpu_.backend) group->setDefaultBackend(backend_type(cpu_.name));
    group->setGroupName(name_);
    process_group_ = std::move(group);
  }
  return process_group_;
}

}  // namespace tessera::detail
