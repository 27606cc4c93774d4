// The transports that a GroupSpec names: a new backend is named here alone.

#include <atomic>
#include <future>
#include <thread>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/comm/backends/gloo/gloo.h"
#include "tessera/comm/backends/hosts/hosts.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/mpi/mpi_attempt.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/backends/shm/shm.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/group_watch.h"

namespace tessera::detail {
namespace {

void require_store(const GroupSpec& spec) {
  if (!spec.store)
    throw InvalidArgument("group '", spec.name, "' over ", spec.backend,
                          ": its ranks meet at a store, which a manager of MPI ranks has "
                          "with ManagerOptions::launch");
}

}  // namespace

bool met_at_store(const std::string& backend) {
  return backend == "gloo" || backend == "shm" || backend == "auto";
}

std::shared_ptr<GroupState> make_group_state(const GroupSpec& spec) {
  auto state = std::make_shared<GroupState>(spec);
  const int size = static_cast<int>(spec.ranks.size());
  if (size == 1 || spec.backend == "store") return state;
  if (spec.backend == "gloo") {
    state->set_endpoint(c10::DeviceType::CPU, make_gloo_transport(spec.store, spec.rank, size,
                                                                  spec.timeout, spec.address));
  } else if (spec.backend == "auto") {
    require_store(spec);
    auto chosen = make_transport_by_host(spec.store, spec.rank, size, spec);
    state->set_endpoint(c10::DeviceType::CPU, std::move(chosen.transport),
                        std::move(chosen.reason));
  } else if (spec.backend == "shm") {
    require_store(spec);
    state->set_endpoint(c10::DeviceType::CPU,
                        make_shm_transport(spec.store, spec.rank, size, spec));
  } else if (spec.backend == "mpi") {
    if (!spec.mpi)
      throw InvalidArgument("group '", spec.name,
                            "' over MPI: the manager was not made with the backend mpi");
    // Failures and tries that others have made are part of the name.
    const MpiAttempt attempt{Hash().text(spec.name).value(),
                             [watch = spec.watch] { return watch->poison() != nullptr; }};
    state->set_endpoint(c10::DeviceType::CPU,
                        make_mpi_transport(*spec.mpi, spec.ranks,
                                           {.name = spec.name, .timeout = spec.timeout}, attempt));
  } else {
    throw InvalidArgument("group '", spec.name, "': there is no backend '", spec.backend,
                          "'; choose auto, gloo, shm or mpi");
  }
  if (spec.device.is_cuda())
    state->set_endpoint(
        spec.device, make_nccl_transport(spec.store, spec.rank, size, spec.timeout, spec.device));
  return state;
}

namespace {

// What was woken usually ends within this time.
constexpr std::chrono::milliseconds kToEnd{300};

// Ends a wait, at the first ring of any thread.
class Alarm {
 public:
  void ring() {
    if (!rung_.exchange(true)) promise_.set_value();
  }
  void wait_until(Deadline deadline) const { future_.wait_until(deadline); }

 private:
  std::atomic<bool> rung_{false};
  std::promise<void> promise_;
  const std::future<void> future_ = promise_.get_future();
};

}  // namespace

std::shared_ptr<GroupState> make_group_in_time(const GroupSpec& spec,
                                               std::function<void()> interrupt) {
  const Deadline deadline = deadline_after(spec.timeout);
  std::packaged_task<std::shared_ptr<GroupState>()> make([spec] { return make_group_state(spec); });
  auto made = make.get_future();
  const auto alarm = std::make_shared<Alarm>();
  spec.watch->set_interrupt(
      [alarm, interrupt = std::move(interrupt)] {
        if (interrupt) interrupt();
        alarm->ring();
      },
      GroupWatch::Of::creation);
  std::thread([alarm, make = std::move(make)]() mutable {
    make();
    alarm->ring();
  }).detach();
  alarm->wait_until(deadline);
  if (made.wait_for(kToEnd) == std::future_status::ready) return made.get();
  made = {};  // what is made too late goes with the thread
  spec.watch->require_healthy("its creation", GroupWatch::creation);
  spec.watch->expire("its creation", GroupWatch::creation, spec.timeout);
}

}  // namespace tessera::detail
