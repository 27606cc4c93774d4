#include "tessera/comm/job/c10d_interop.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/base/internal/split.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/backends/of_c10d.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/store/store.h"

namespace tessera {
namespace {

constexpr auto kGivenGroup = "c10d";
constexpr auto kHostsKey = "hosts";

std::string host_key(int rank) { return concat("host of rank ", rank); }

C10dRanks checked(C10dRanks ranks, const ManagerOptions& options) {
  if (options.launch || options.mpi || options.between_hosts == "mpi")
    throw InvalidArgument(
        "manager_of() was given a launch or MPI in its options; its ranks are those of the group "
        "or store, which say all that a launch would");
  if (ranks.group) {
    if (ranks.size != 0 &&
        (ranks.rank != ranks.group->getRank() || ranks.size != ranks.group->getSize()))
      throw InvalidArgument("manager_of() was given rank ", ranks.rank, " of ", ranks.size,
                            " and a process group in which this is rank ", ranks.group->getRank(),
                            " of ", ranks.group->getSize(), "; give the group alone");
    ranks.rank = ranks.group->getRank();
    ranks.size = ranks.group->getSize();
    if (!ranks.store) ranks.store = ranks.group->getStore();
  }
  if (!ranks.store)
    throw InvalidArgument(ranks.group ? "manager_of() was given a process group that was made "
                                        "without a store; give C10dRanks::store too"
                                      : "manager_of() was given neither a process group nor a "
                                        "store of c10d's; give one of them");
  if (ranks.rank < 0 || ranks.rank >= ranks.size)
    throw InvalidArgument("manager_of() was given rank ", ranks.rank, " of ", ranks.size,
                          " ranks; ranks are 0 to their number - 1");
  std::vector<std::string> own;
  for (const auto& [name, make] : ranks.backends) {
    const std::vector<std::string> taken{"",     "auto", "gloo",    "shm",   "mpi",
                                         "nccl", "self", "threads", "store", kGivenGroup};
    if (!make || std::ranges::find(taken, name) != taken.end())
      throw InvalidArgument("manager_of() was given a backend '", name, "' ",
                            make ? "whose name is the library's; give it another one"
                                 : "without a function that makes it");
    own.push_back(name);
  }
  if (ranks.group) own.emplace_back(kGivenGroup);
  detail::check_options(options, own);
  return ranks;
}

/// Every rank says where it runs, rank 0 tells all: a cost per rank that does not grow with their
/// number.
std::vector<std::string> hosts_of(c10d::Store& board, const C10dRanks& ranks,
                                  std::chrono::milliseconds limit) {
  const Deadline deadline = deadline_after(limit);
  const std::string mine = Environment::of_process().hostname;
  if (ranks.size == 1) return {mine};
  const auto read = [&](const std::string& key, int writer) {
    try {
      board.wait({key}, std::max(std::chrono::milliseconds(1), time_left(deadline)));
      return board.get_to_str(key);
    } catch (const c10::Error&) {
      throw RendezvousError(
          concat("rank ", ranks.rank, ": rank ", writer, " did not come within ", limit.count(),
                 " ms to the store that manager_of() was given; "
                 "every rank calls it, as often and in the same order"),
          {writer});
    }
  };
  board.set(host_key(ranks.rank), mine);
  if (ranks.rank == 0) {
    std::string all;
    for (int rank = 0; rank < ranks.size; ++rank) all += read(host_key(rank), rank) + "\n";
    board.set(kHostsKey, all);
  }
  auto hosts = split(read(kHostsKey, 0), '\n');
  hosts.pop_back();  // behind the last line's end
  return hosts;
}

Launch launch_of(const C10dRanks& ranks, const std::vector<std::string>& hosts) {
  Launch launch;
  launch.launcher = kGivenGroup;
  launch.rank = ranks.rank;
  launch.world_size = ranks.size;
  const auto me = hosts.begin() + ranks.rank;
  launch.local_rank = static_cast<int>(std::count(hosts.begin(), me, *me));
  launch.local_size = static_cast<int>(std::ranges::count(hosts, *me));
  bool one_after_another = true;
  for (auto host = hosts.begin(); host != hosts.end(); ++host) {
    const bool next = host == hosts.begin() || *host != host[-1];
    const auto known = std::ranges::find(launch.hosts, *host);
    if (known == launch.hosts.end()) {
      launch.hosts.push_back(*host);
      launch.ranks_per_host.push_back(1);
    } else {
      ++launch.ranks_per_host[known - launch.hosts.begin()];
      one_after_another = one_after_another && !next;
    }
  }
  launch.node_rank = static_cast<int>(std::ranges::find(launch.hosts, *me) - launch.hosts.begin());
  // The counts say which ranks a host has, if they follow one another.
  if (!one_after_another) launch.ranks_per_host.clear();
  launch.address = launch.hosts.size() == 1 ? "127.0.0.1"
                   : ranks.address.empty()  ? hosts.front()
                                            : ranks.address;
  return launch;
}

// A backend of the program's: its calls are made here, its end is not.
class Lent : public detail::OfC10d {
 public:
  using OfC10d::OfC10d;
  void abort() override {}
  void shutdown() override {}
};

template <class Transport>
std::shared_ptr<detail::Transport> over(const c10::intrusive_ptr<c10d::Backend>& backend,
                                        const detail::GroupSpec& spec) {
  detail::Abilities can;
  can.reduce_scatters = detail::reduces_in_order;  // composed
  // The group's limit comes first, so that its error can name the missing ranks.
  can.slack = std::chrono::seconds(2);
  can.may_hang = true;
  return std::make_shared<Transport>(backend, spec.timeout, std::move(can));
}

std::shared_ptr<detail::GroupState> over_given_group(const detail::GroupSpec& spec,
                                                     c10d::ProcessGroup& group) {
  if (spec.ranks != numbers_below(group.getSize()))
    throw InvalidArgument("group '", spec.name,
                          "' over c10d: the process group that manager_of() was given serves all "
                          "its ",
                          group.getSize(),
                          " ranks in their order, and no others; use another backend");
  auto state = std::make_shared<detail::GroupState>(spec);
  for (const c10::Device device : group.getDeviceTypes()) {
    const bool mine = device.type() == spec.device.type();
    if (device.is_cpu() || mine)
      state->set_endpoint(mine ? spec.device : device,
                          over<Lent>(group.getBackend(device.type()), spec), "the group given");
  }
  return state;
}

/// Groups over the program's backends; null for the library's.
std::shared_ptr<detail::GroupState> own_group(const detail::GroupSpec& spec,
                                              const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                              const std::map<std::string, MakeBackend>& backends) {
  if (spec.ranks.size() == 1) return nullptr;
  if (spec.backend == kGivenGroup && group) return over_given_group(spec, *group);
  const auto own = backends.find(spec.backend);
  if (own == backends.end()) return nullptr;
  const int size = static_cast<int>(spec.ranks.size());
  const auto backend = own->second(spec.store, spec.rank, size, spec.timeout);
  if (!backend || backend->getRank() != spec.rank || backend->getSize() != size)
    throw InvalidArgument(
        "group '", spec.name, "': the program's backend '", spec.backend, "' was asked for rank ",
        spec.rank, " of ", size, " and gave ",
        backend ? concat("rank ", backend->getRank(), " of ", backend->getSize()) : "none");
  auto state = std::make_shared<detail::GroupState>(spec);
  state->set_endpoint(c10::DeviceType::CPU, over<detail::OfC10d>(backend, spec), "asked for");
  if (spec.device.is_cuda())
    state->set_endpoint(
        spec.device, make_nccl_transport(spec.store, spec.rank, size, spec.timeout, spec.device));
  return state;
}

}  // namespace

DistributedManager manager_of(const C10dRanks& given, const ManagerOptions& options) {
  const C10dRanks ranks = checked(given, options);
  // The n-th call of a rank meets the n-th of the others.
  const auto round = ranks.store->add(concat("tessera/calls of rank ", ranks.rank), 1);
  const auto board =
      c10::make_intrusive<c10d::PrefixStore>(concat("tessera/call ", round), ranks.store);
  const auto base = std::make_unique<detail::ManagerBase>();
  base->options = options;
  base->launch = launch_of(ranks, hosts_of(*board, ranks, options.rendezvous_timeout));
  base->backend = options.backend.empty() ? "auto" : options.backend;
  if (!options.device || !options.device->is_cpu())
    base->device = detail::choose_device(options.device, base->launch.local_rank,
                                         cuda_device_count(), nccl_unavailable());
  base->rendezvous = Rendezvous::meet(base->launch, options.rendezvous_timeout, board);
  base->make_group = [group = ranks.group, own = ranks.backends](const detail::GroupSpec& spec) {
    return own_group(spec, group, own);
  };
  auto state = std::make_shared<detail::ManagerState>(std::move(*base));
  if (ranks.rank == 0 && ranks.size > 1) {  // all have met, and read what they need
    for (int rank = 0; rank < ranks.size; ++rank) board->deleteKey(host_key(rank));
    board->deleteKey(kHostsKey);
  }
  return DistributedManager(std::move(state));
}

}  // namespace tessera
