#include "tessera/comm/job/manager.h"

#include <algorithm>

#include "tessera/base/deadline.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/comm/job/internal/tagged_group.h"
#include "tessera/launch/internal/secret.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera {

c10::Device detail::choose_device(const std::optional<c10::Device>& wanted, int local_rank,
                                  int devices, const std::string& problem) {
  if (!wanted) {
    if (!problem.empty() || devices < 1) return c10::DeviceType::CPU;
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(local_rank % devices)};
  }
  if (wanted->is_cpu()) return *wanted;
  if (!wanted->is_cuda())
    throw InvalidArgument("the manager was given the device ", *wanted,
                          "; groups serve cpu and cuda");
  if (!problem.empty())
    throw NotAvailable("the manager was given the device ", *wanted,
                       ", but NCCL cannot run here: ", problem);
  const int index = wanted->has_index() ? wanted->index() : local_rank % devices;
  if (index >= devices)
    throw InvalidArgument("the manager was given the device ", *wanted, ", but there are ", devices,
                          " devices");
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

void detail::check_options(const ManagerOptions& options, std::vector<std::string> backends) {
  if (options.timeout.count() < 1)
    throw InvalidArgument("the manager was given a time limit of ", options.timeout.count(),
                          " ms; give a positive one");
  backends.insert(backends.begin(), {"auto", "gloo", "shm"});
  if (!options.backend.empty() && std::ranges::find(backends, options.backend) == backends.end())
    throw InvalidArgument("backend '", options.backend,
                          "' is not one for processes; choose one of ", list(backends));
  if (options.between_hosts != "auto" && options.between_hosts != "gloo" &&
      options.between_hosts != "mpi")
    throw InvalidArgument("the manager was given '", options.between_hosts,
                          "' to use between hosts; choose auto, gloo or mpi");
}

namespace {

// To MPI each program that another launcher has started is a world of its own: N jobs of one rank
// would run side by side and write the same files.
void require_mpi_launcher(const MpiWorld& mpi) {
  const Environment environment = Environment::of_process();
  if (mpi.size() > 1 ||
      !(environment.has("TESSERA_RANK") || environment.has("TORCHELASTIC_RUN_ID")))
    return;
  const Launch around = detect_launch(environment);
  if (around.world_size > 1)
    throw ConfigurationError(
        "the manager was given ranks of MPI, which says that this process is alone, and ",
        around.launcher, " has started ", around.world_size,
        " of them: that launcher starts no ranks of MPI. Start it with mpirun (or srun)");
}

}  // namespace

DistributedManager DistributedManager::initialize(const ManagerOptions& options) {
  detail::ManagerBase base;
  if (options.mpi) require_mpi_launcher(*options.mpi);
  base.options = options;
  base.launch = options.launch ? *options.launch
                : options.mpi  ? options.mpi->launch()
                               : detect_launch(Environment::of_process());
  validate(base.launch);
  detail::check_options(options, {"mpi"});
  const bool begins_mpi = options.between_hosts == "mpi" && !options.mpi;
  base.backend = !options.backend.empty() ? options.backend : options.mpi ? "mpi" : "auto";
  const bool meets = options.launch || !options.mpi;
  if (meets) require_rendezvous(base.launch);
  // A job on the CPU does not start CUDA: children of a process that started it cannot use it.
  if (!options.device || !options.device->is_cpu())
    base.device = detail::choose_device(options.device, base.launch.local_rank, cuda_device_count(),
                                        nccl_unavailable());
  if (options.mpi && base.backend != "mpi" && (base.backend != "auto" || !options.launch))
    throw InvalidArgument("the manager was given ranks of MPI, but the backend ", base.backend,
                          "; give the backend mpi, or auto and a launch: groups of auto meet "
                          "at a store");
  if (!meets && !base.device.is_cpu()) {
    if (options.device)
      throw InvalidArgument("the manager was given the device ", base.device,
                            ", and ranks of MPI without a launch: groups of ", base.device.type(),
                            " tensors meet at a store; give ManagerOptions::launch too");
    base.device = c10::DeviceType::CPU;
  }
  if (base.backend == "mpi" || options.mpi || begins_mpi) {
    // Threads of groups over several hosts call MPI.
    base.mpi = options.mpi ? *options.mpi
                           : MpiWorld::initialize(begins_mpi ? MpiThreadLevel::multiple
                                                             : MpiThreadLevel::funneled);
    if (base.mpi->rank() != base.launch.rank || base.mpi->size() != base.launch.world_size)
      throw ConfigurationError(
          "the launch says rank ", base.launch.rank, " of ", base.launch.world_size, " (",
          base.launch.launcher, "), and MPI says rank ", base.mpi->rank(), " of ", base.mpi->size(),
          options.mpi ? "; give a launch with the rank and size of these ranks of MPI"
                      : "; start the ranks by MPI's own launcher (mpirun or srun), with no other "
                        "around it");
  }
  if (meets && base.mpi && base.launch.world_size > 1)
    base.launch.secret =
        base.mpi->first(base.launch.secret.empty() ? new_secret() : base.launch.secret,
                        bounded_limit(options.rendezvous_timeout));
  if (meets) base.rendezvous = Rendezvous::meet(base.launch, options.rendezvous_timeout);
  return DistributedManager(std::make_shared<detail::ManagerState>(std::move(base)));
}

DistributedManager::DistributedManager(std::shared_ptr<detail::ManagerState> state)
    : state_(std::move(state)) {}

int DistributedManager::rank() const { return launch().rank; }

int DistributedManager::world_size() const { return launch().world_size; }

int DistributedManager::local_rank() const { return launch().local_rank; }

c10::Device DistributedManager::device() const { return state_->base().device; }

const Launch& DistributedManager::launch() const { return state_->base().launch; }

Group DistributedManager::world() const { return group(numbers_below(world_size())); }

Group DistributedManager::group(const std::vector<int>& ranks) const {
  return Group(state_->group(ranks));
}

Group DistributedManager::group(const std::vector<int>& ranks, const GroupOptions& options) const {
  return Group(state_->group(ranks, options));
}

Group tagged_group(const DistributedManager& manager, const std::vector<int>& ranks,
                   const GroupOptions& options, const std::string& tag) {
  if (tag.empty() || tag.find('/') != std::string::npos)
    throw InvalidArgument("a group was given the tag '", tag,
                          "'; tags have at least one character, and none is '/'");
  // In quotes, so that it differs from the library's own tags.
  return Group(manager.state()->group(ranks, options, concat("'", tag, "'")));
}

DeviceMesh DistributedManager::mesh(const Mesh& mesh) const { return DeviceMesh(mesh, *this); }

DeviceMesh DistributedManager::mesh(const std::vector<Axis>& axes) const {
  Mesh mesh(closed_axes(axes, world_size()));
  if (mesh.size() != world_size())
    throw InvalidArgument(
        "the mesh ", mesh.to_string(), " has ", mesh.size(), " coordinates, the world ",
        world_size(),
        " ranks; let the sizes multiply up to the world, or give a Mesh with a rank table");
  return DeviceMesh(std::move(mesh), *this);
}

DeviceMesh DistributedManager::mesh(const GroupPlan& plan) const {
  return DeviceMesh(plan.mesh(), *this, detail::axis_options(plan, 0));
}

DeviceMesh DistributedManager::named_mesh(const std::string& name) const {
  auto [mesh, options] = state_->named_mesh(name);
  return DeviceMesh(std::move(mesh), *this, std::move(options));
}

void DistributedManager::add_mesh(const std::string& name, const Mesh& mesh) const {
  const DeviceMesh checked(mesh, *this);
  state_->add_mesh(name, checked.mesh());
}

void DistributedManager::create_process_groups(const GroupPlan& plan, bool eager) const {
  agree::same(Group(state_->meeting_place()), "the plan of the process groups", plan.canonical());
  state_->add_families(plan);
  if (!eager || !plan.mesh().contains(rank())) return;
  for (const auto& family : plan.families()) named_group(family.name);
}

void DistributedManager::create_process_groups(const ProcessGroupConfig& config, bool eager) const {
  create_process_groups(GroupPlan::of_config(config, world_size()), eager);
}

void DistributedManager::create_process_groups(const ProcessGroupConfig& config,
                                               const std::vector<int>& ranks, bool eager) const {
  create_process_groups(GroupPlan::of_config(config, ranks), eager);
}

RankMapping DistributedManager::create_process_groups(const ProcessGroupConfig& config,
                                                      const Topology& topology,
                                                      const std::vector<Traffic>& traffic,
                                                      bool eager) const {
  if (topology.slots() != world_size())
    throw MappingError("the topology has ", topology.slots(), " slots and the world ", world_size(),
                       " ranks; describe the machines that the ranks run on, one slot per rank");
  const CostModel model(topology, config.mesh(world_size()).axes(), traffic);
  RankMapping mapping = traffic.empty() ? naive_mapping(model) : optimise_mapping(model);
  create_process_groups(GroupPlan::of_config(config, mapping.slot_of), eager);
  return mapping;
}

Group DistributedManager::named_group(const std::string& family) const {
  const Membership mine = state_->membership(family);
  return group(mine.ranks, mine.options);
}

int DistributedManager::group_size(const std::string& family) const {
  return static_cast<int>(state_->membership(family).ranks.size());
}

int DistributedManager::group_rank(const std::string& family) const {
  return state_->membership(family).group_rank;
}

std::vector<std::string> DistributedManager::group_names() const { return state_->family_names(); }

void DistributedManager::set_check_level(CheckLevel level) const { state_->set_check_level(level); }

void DistributedManager::fail_groups_within(const Mesh& mesh, const std::string& reason) const {
  state_->fail_within(mesh.ranks(), reason);
}

void DistributedManager::shutdown() { state_->shutdown(); }

std::uint64_t failures_of(const DistributedManager& manager, const std::vector<int>& ranks) {
  return manager.state()->failures(ranks);
}

std::uint64_t failures_of(const DeviceMesh& mesh) {
  return failures_of(mesh.manager(), mesh.mesh().ranks());
}

bool has_ended(const Group& group) { return group.state()->watch().poison() != nullptr; }

}  // namespace tessera
