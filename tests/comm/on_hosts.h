#pragma once
// Ranks of several hosts on one machine: each says of its host what the test says, and meets the
// others at a real store. What is real here: who shares memory, and everything that goes through
// it, through Gloo and through the store. Real network namespaces: tests/system/netns_test.cpp.

#include <gtest/gtest.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#endif

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/store.h"

namespace tessera::testing {

/// The manager of a rank whose groups of backend "auto" take ranks of another number for ranks of
/// another host. `mpi`: the job's ranks of MPI, if this rank has them.
inline DistributedManager manager_on_host(const Launch& launch, int host, ManagerOptions options,
                                          std::optional<MpiWorld> mpi = std::nullopt) {
  detail::ManagerBase base;
  base.mpi = std::move(mpi);
  options.launch = launch;
  base.launch = launch;
  base.backend = "auto";
  base.rendezvous = Rendezvous::meet(launch, std::chrono::seconds(30));
  base.options = std::move(options);
  base.make_group = [host](const detail::GroupSpec& given) {
    detail::GroupSpec spec = given;
    spec.host = concat("host ", host);
    return detail::make_group_state(spec);
  };
  return DistributedManager(std::make_shared<detail::ManagerState>(std::move(base)));
}

/// Runs `body` on a thread for each rank; rank r is on host `hosts[r]`. An exception that leaves it
/// ends the other ranks' calls, and is a failure of the test.
inline void run_on_hosts(const std::vector<int>& hosts,
                         const std::function<void(DistributedManager&)>& body,
                         CheckLevel level = CheckLevel::local) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  // Its map of groups is written by every thread that calls Gloo, without a lock.
  c10d::FlightRecorder<c10::Event>::get()->enabled_ = false;
#endif
  const int world = static_cast<int>(hosts.size()), port = free_port();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      try {
        ManagerOptions options;
        options.timeout = std::chrono::seconds(60);
        options.check_level = level;
        auto manager = manager_on_host(local_launch(rank, world, port),
                                       hosts[static_cast<std::size_t>(rank)], options);
        body(manager);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace tessera::testing
