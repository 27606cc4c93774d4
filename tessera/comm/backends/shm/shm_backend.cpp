#include "tessera/comm/backends/shm/shm_backend.h"

#include <algorithm>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout)
    : c10d::Backend(link->rank(), link->size()), link_(std::move(link)), timeout_(timeout) {
  init();
}

ShmBackend::~ShmBackend() { link_->close(); }

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

bool ShmBackend::reduces(c10::ScalarType dtype, ReduceOp::Kind op) const {
  // libtorch divides a complex number by a real one with other rounding.
  if (op == ReduceOp::Kind::avg && c10::isComplexType(dtype)) return false;
  const auto element = element_of(dtype);
  return element && shm::reduces(*element, kind_of(op));
}

void ShmBackend::require_rank(int rank, const char* what) const {
  if (rank < 0 || rank >= ranks())
    throw InvalidArgument(concat(what, " is rank ", rank, " in a group of ", ranks(), " ranks"));
}

void ShmBackend::require_sizes(const Counts& sizes, const char* name) const {
  if (static_cast<int>(sizes.size()) != ranks())
    throw InvalidArgument(
        concat(name, ": ", sizes.size(), " sizes for ", ranks(), " ranks: ", list(sizes)));
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t n) { return n < 0; }))
    throw InvalidArgument(concat(name, ": a size is negative: ", list(sizes)));
}

std::uint64_t ShmBackend::signature(c10::ScalarType dtype) {
  const auto call = signature_;
  signature_ = 0;
  return Hash().number(call).number(static_cast<std::uint64_t>(dtype)).value();
}

shm::Call ShmBackend::options(ShmCall& call, CallLimit limit, std::uint64_t sign) {
  call.timeout = bounded_limit(limit.timeout.count() > 0 ? limit.timeout : timeout_);
  sequence_.fetch_add(1, std::memory_order_relaxed);
  return {call.timeout, sign};
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only("broadcast", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of broadcast");
  auto call = call_of("broadcast", OpType::BROADCAST, {tensor});
  void* data = rank_ == root ? const_cast<void*>(readable(call, tensor)) : target_of(call, tensor);
  return run(
      std::move(call), shm_limit(options), signature(tensor.scalar_type()),
      [&](shm::Call o) { group().broadcast(data, tensor.nbytes(), root, o); },
      [&](shm::Call o) { return group().start_broadcast(data, tensor.nbytes(), root, o); });
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(
      call_of("barrier", OpType::BARRIER), shm_limit(options),
      signature(c10::ScalarType::Undefined), [&](shm::Call o) { group().barrier(o); },
      [&](shm::Call o) { return group().start_barrier(o); });
}

}  // namespace tessera::detail
