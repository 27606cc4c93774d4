#include "tessera/comm/backends/shm/shm_backend.h"

#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm.h"
#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

bool shm_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  // libtorch divides a complex number by a real one with other rounding.
  if (op == ReduceOp::Kind::avg && c10::isComplexType(dtype)) return false;
  const auto element = element_of(dtype);
  return element && shm::reduces(*element, kind_of(op));
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout)
    : OwnBackend(link->rank(), link->size(), timeout), link_(std::move(link)) {
  init();
}

ShmBackend::~ShmBackend() { link_->close(); }

Abilities ShmBackend::abilities() {
  Abilities result = own_abilities(shm_reduces);
  result.ends_collectives = result.ends_messages = true;
  result.share = [this](std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                        std::chrono::milliseconds limit) { return share(bytes, store, limit); };
  return result;
}

std::uint64_t ShmBackend::signature(c10::ScalarType dtype) {
  const auto call = signature_;
  signature_ = 0;
  return Hash().number(call).number(static_cast<std::uint64_t>(dtype)).value();
}

shm::Call ShmBackend::options(ShmCall& call, CallLimit limit, std::uint64_t sign) {
  call.timeout = limit_of_call(limit);
  sequence_.fetch_add(1, std::memory_order_relaxed);
  return {call.timeout, sign};
}

ShmBackend::WorkPtr ShmBackend::broadcast_one(OwnCall how) {
  auto call = call_of("broadcast", how);
  const at::Tensor& tensor = how.output;
  const int root = how.root;
  void* data = rank_ == root ? const_cast<void*>(readable(call, tensor)) : target_of(call, tensor);
  return run(
      std::move(call), how.limit, signature(tensor.scalar_type()),
      [&](shm::Call o) { group().broadcast(data, tensor.nbytes(), root, o); },
      [&](shm::Call o) { return group().started().broadcast(data, tensor.nbytes(), root, o); });
}

std::shared_ptr<shm::Arena> ShmBackend::share(std::size_t bytes,
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

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(
      call_of("barrier", OpType::BARRIER), limit_of(options), signature(c10::ScalarType::Undefined),
      [&](shm::Call o) { group().barrier(o); },
      [&](shm::Call o) { return group().started().barrier(o); });
}

}  // namespace tessera::detail
