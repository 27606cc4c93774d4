// Faults of groups over several hosts whose first ranks talk over MPI: ranks 0 and 2 are on one
// host, rank 1 on another one. Over Gloo: faults_test.cpp.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mpi_on_hosts.h"
#include "tessera/base/text.h"

namespace tessera::test {

void run_host_fault(const MpiWorld& world, const std::string& fault);

namespace {

using namespace std::chrono_literals;

constexpr auto kFault = "no more fuel";

void tell(const MpiWorld& world, const std::string& text) {
  std::printf("rank %d: %s\n", world.rank(), text.c_str());
  std::fflush(stdout);
}

/// Prints the error that `call` gives, and whether it came long before its limit.
template <class Call>
void tell_error(const MpiWorld& world, Call&& call) {
  const auto begin = std::chrono::steady_clock::now();
  const auto in_time = [&] {
    return std::chrono::steady_clock::now() - begin < 20s ? " in time: " : " late: ";
  };
  try {
    call();
    tell(world, "no error");
  } catch (const PeerLostError& error) {
    tell(world, concat("PeerLostError ", list(error.ranks()), in_time(), error.what()));
  } catch (const TimeoutError& error) {
    tell(world, concat("TimeoutError ", list(error.missing()), in_time(), error.what()));
  }
}

}  // namespace

void run_host_fault(const MpiWorld& world, const std::string& fault) {
  // "hosts_stopped_1": how, and which rank
  const auto end = fault.rfind('_');
  const int victim = std::stoi(fault.substr(end + 1));
  const std::string how = fault.substr(6, end - 6);
  std::vector<int> others = all_ranks(world);
  std::erase(others, victim);
  BackendPtr survivors;
  if (world.rank() != victim) survivors = backend(world, others, "survivors");
  ManagerOptions options;
  options.timeout = 60s;
  options.between_hosts = "mpi";
  const auto launch = launch_with_store(world);
  try {
    const auto manager =
        testing::manager_on_host(launch, world.rank() % 2, std::move(options), world);
    auto all = manager.world();
    if (all.backend_reason().find("mpi between the hosts") == std::string::npos)
      throw std::logic_error(concat("not over MPI: ", all.backend_reason()));
    all.barrier();
    // The fault comes once all have left the barrier: who is still in it would fail there.
    const auto store = manager.state()->base().store->clone();
    if (store->add("through", 1) == world.size()) store->set("all through", "1");
    if (world.rank() == victim) store->wait({"all through"});
    if (how == "stopped") all.set_timeout(3s);
    if (world.rank() == victim) {
      if (how == "stopped") ::raise(SIGSTOP);
      if (how == "killed") ::raise(SIGKILL);
      throw std::runtime_error(kFault);
    }
    tell_error(world, [&] { all.all_reduce(at::ones({300000})); });
    // Who ends first ends the others: the launcher's doing.
    survivors->barrier(c10d::BarrierOptions())->wait();
    std::_Exit(0);
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()) != kFault) throw;
    tell(world, "threw");
    for (;;) ::pause();
  }
}

}  // namespace tessera::test
