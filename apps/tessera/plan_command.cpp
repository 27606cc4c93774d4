#include <fstream>
#include <iostream>
#include <memory>

#include "commands.h"
#include "plan.h"
#include "plan_data.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"
#include "tessera/config/group_config_file.h"
#include "tessera/config/internal/hwloc_topology.h"
#include "tessera/config/rank_file.h"
#include "tessera/config/topology_file.h"
#include "tessera/launch/launch.h"
#include "tessera/mesh/errors.h"

namespace tessera::app {
namespace {

struct Flags {
  std::string file, ranks, mesh, sizes, order, tree, groups, hierarchical, hosts, topology,
      slurm_topology, hwloc, device = "gpu", traffic, mapping, data, processes;
  std::vector<std::string> views;
  int world = 0, rank = -1, show = 32;
  std::int64_t batch = 0;
  bool launcher = false, keep = false;
  std::string json, rank_file, slurm_file, picture;
};

std::optional<Topology> machines(const Flags& flags) {
  const int ways = !flags.hosts.empty() + !flags.topology.empty() + flags.launcher;
  if (ways > 1)
    throw ConfigFileError("give the machines in one way: --hosts, --topology or --from-launcher");
  std::optional<Topology> topology;
  if (!flags.hosts.empty()) topology = parse_hosts(flags.hosts);
  if (!flags.topology.empty()) topology = read_topology(flags.topology);
  if (flags.launcher) topology = topology_of(Environment::of_process());
  if (!flags.hwloc.empty()) {
    const auto device = host_device_from(flags.device);
    Topology one = flags.hwloc == "live" ? live_hwloc_topology(device, "host0")
                                         : read_hwloc_topology(flags.hwloc, device, "host0");
    if (topology) {
      std::vector<std::string> names;
      for (const Host& host : topology->hosts) {
        if (host.devices != one.hosts.front().devices)
          throw MappingError("host '", host.name, "' is said to have ", host.devices,
                             " devices, but hwloc finds ", one.hosts.front().devices);
        names.push_back(host.name);
      }
      one = replicate_host(one, names);
    }
    topology = std::move(one);
  }
  if (!flags.slurm_topology.empty()) {
    if (!topology)
      throw ConfigFileError(
          "--slurm-topology needs the hosts: --topology or --from-launcher with their names");
    topology = read_slurm_topology(flags.slurm_topology, *topology);
  }
  return topology;
}

/// The file, with the flags on top.
PlanRequest request_of(const Flags& flags) {
  PlanRequest request = flags.file.empty() ? PlanRequest{} : read_plan_request(flags.file);
  if (flags.world > 0) request.world = flags.world;
  if (!flags.mesh.empty() || !flags.order.empty() || !flags.tree.empty()) {
    request.mesh.clear();
    request.order.clear();
    request.sizes.clear();
    request.tree.reset();
  }
  if (!flags.mesh.empty()) request.mesh = parse_axes(flags.mesh, "--mesh");
  if (!flags.order.empty()) request.order = flags.order;
  if (!flags.sizes.empty()) {
    request.sizes.clear();
    for (const Axis& axis : parse_axes(flags.sizes, "--sizes"))
      request.sizes[axis.name] = axis.size;
  }
  if (!flags.tree.empty()) request.tree = read_group_config(flags.tree);
  for (const auto& view : flags.views) {
    const auto colon = view.find(':');
    if (colon == std::string::npos || colon == 0)
      throw ConfigFileError("--view '", view, "' is not name:axis=size,...");
    request.views.emplace_back(view.substr(0, colon), parse_axes(view.substr(colon + 1), "--view"));
  }
  if (!flags.ranks.empty()) request.ranks = parse_ranks(flags.ranks, "--ranks");
  if (!flags.groups.empty()) request.groups = parse_names(flags.groups, "--groups");
  if (!flags.hierarchical.empty())
    request.hierarchical = parse_names(flags.hierarchical, "--hierarchical");
  if (auto topology = machines(flags)) request.topology = std::move(topology);
  if (!flags.traffic.empty()) set_traffic(request, flags.traffic, "--traffic");
  if (!flags.mapping.empty()) {
    if (!request.topology)
      throw ConfigFileError("--mapping needs the machines: --hosts or --topology");
    request.mapping = read_rank_file(flags.mapping, *request.topology);
  }
  if (flags.keep) request.optimise = false;
  return request;
}

void put(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::cout << text;
    return;
  }
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file)
    throw ConfigFileError(path, ": cannot be written; check the folder and its permissions");
}

// Who reads what, instead of the groups.
int run_data_plan(const Flags& flags, const Mesh& mesh) {
  if (!flags.rank_file.empty() || !flags.slurm_file.empty())
    throw ConfigFileError(
        "--data plans who reads what: leave out --rankfile and --slurm-hostfile, which belong to a "
        "plan of groups");
  if (!flags.picture.empty() && !flags.picture.ends_with(".svg") &&
      !flags.picture.ends_with(".html"))
    throw ConfigFileError("--picture ", flags.picture, ": the name must end in .svg or .html");
  const auto axes =
      flags.data == "none" ? std::vector<std::string>{} : parse_names(flags.data, "--data");
  const auto processes =
      flags.processes.empty() ? std::vector<int>{} : parse_ranks(flags.processes, "--processes");
  const DataPlan plan = make_data_plan(mesh, axes, processes, flags.batch);
  if (flags.json != "-") std::cout << data_plan_text(plan, flags.show);
  if (!flags.json.empty()) put(flags.json, data_plan_json(plan));
  if (!flags.picture.empty())
    put(flags.picture,
        flags.picture.ends_with(".html") ? data_plan_html(plan) : data_plan_svg(plan));
  return 0;
}

int run_plan(const Flags& flags) {
  const PlanRequest request = request_of(flags);
  Plan plan = make_plan(request);
  if (!flags.data.empty()) return run_data_plan(flags, plan.mesh);
  if (!flags.processes.empty() || flags.batch != 0)
    throw ConfigFileError("--processes and --batch belong to --data");
  std::optional<int> rank;
  if (flags.rank >= 0) rank = flags.rank;
  if (rank) plan.mesh.position(*rank);  // refuses a rank that is not there
  if ((!flags.rank_file.empty() || !flags.slurm_file.empty()) && !plan.placement)
    throw ConfigFileError("a rank file needs the machines: --hosts or --topology");
  if (!flags.picture.empty() && !flags.picture.ends_with(".svg") &&
      !flags.picture.ends_with(".html"))
    throw ConfigFileError("--picture ", flags.picture, ": the name must end in .svg or .html");
  if (!flags.slurm_file.empty() &&
      !keeps_device_order(plan.placement->topology, plan.placement->slot_of))
    plan.warnings.push_back(
        "Slurm numbers the ranks of a host in their order, but the placement has them on the "
        "devices in another; the host file says only the hosts");
  if (flags.json != "-" && flags.rank_file != "-" && flags.slurm_file != "-")
    std::cout << plan_text(plan, rank, flags.show);
  else
    for (const auto& warning : plan.warnings)
      std::cerr << "tessera plan: warning: " << warning << "\n";
  if (!flags.json.empty()) put(flags.json, plan_json(plan, rank));
  if (!flags.rank_file.empty())
    put(flags.rank_file, open_mpi_rank_file(plan.placement->topology, plan.placement->slot_of));
  if (!flags.slurm_file.empty())
    put(flags.slurm_file, slurm_host_file(plan.placement->topology, plan.placement->slot_of));
  const int shown = rank.value_or(plan.mesh.ranks().front());
  if (!flags.picture.empty())
    put(flags.picture,
        flags.picture.ends_with(".html") ? plan_html(plan, shown) : plan_svg(plan, shown));
  return 0;
}

}  // namespace

Command add_plan(CLI::App& program) {
  auto flags = std::make_shared<Flags>();
  CLI::App* parser =
      program.add_subcommand("plan", "Plan process groups and where their ranks run; needs no job");
  parser->footer(
      "Examples:\n"
      "  tessera plan --world 16 --sizes tp=2,dp=2,pp=4 --order tp-cp-ep-dp-pp --groups "
      "tp,dp,pp,tp-pp --json -\n"
      "  tessera plan --hosts 16x8 --mesh data=8,domain=4,model=4 --traffic "
      "model=all_reduce:512MB,data=all_reduce:1GB --picture plan.html\n"
      "  tessera plan --world 16 --tree groups.yaml --rank 5\n"
      "  tessera plan --mesh data=4,model=4 --data data --processes "
      "0,0,1,1,2,2,3,3,0,0,1,1,2,2,3,3 --picture who.html");
  parser->add_option("file", flags->file,
                     "A request with the fields of these options (.json, .yaml)");
  parser->add_option("--world", flags->world, "Number of ranks")->check(CLI::Range(1, 2147483647));
  parser->add_option("--mesh", flags->mesh, "Axes, outermost first: data=8,model=4");
  parser->add_option("--order", flags->order, "Axes, first = adjacent ranks: tp-cp-ep-dp-pp");
  parser->add_option("--sizes", flags->sizes,
                     "Sizes of the order's axes; those not given are 1: tp=2,dp=4");
  parser->add_option("--tree", flags->tree, "Group configuration (.json, .yaml)");
  parser
      ->add_option(
          "--view", flags->views,
          "Another factorisation of the same ranks: expert:expert_data=2,expert=2,tensor=2")
      ->allow_extra_args(false);
  parser->add_option("--ranks", flags->ranks, "Rank table, row-major over the mesh: 5,0,3,1");
  parser->add_option("--groups", flags->groups,
                     "Groups to list (all of the mesh or tree without it): tp,dp,tp-pp");
  parser->add_option("--hierarchical", flags->hierarchical,
                     "Groups to split into those inside and those between hosts: data");
  parser
      ->add_option("--rank", flags->rank,
                   "Print the groups of this rank, and frame them in the picture")
      ->check(CLI::Range(0, 2147483647));
  parser->add_option("--show", flags->show, "Groups of a family that are printed at most")
      ->check(CLI::Range(1, 2147483647))
      ->capture_default_str();
  parser->add_option("--hosts", flags->hosts, "16x8 (16 hosts with 8 devices) or 8,8,4");
  parser->add_option("--topology", flags->topology,
                     "Hosts, links, rails and switches (.json, .yaml)");
  parser->add_flag("--from-launcher", flags->launcher,
                   "Hosts and ranks per host from the launcher's environment, or from the batch "
                   "script's (Slurm)");
  parser->add_option("--slurm-topology", flags->slurm_topology,
                     "Slurm's topology.conf: the switches above the hosts");
  parser->add_option("--hwloc", flags->hwloc,
                     "A host's inside: an XML file of hwloc, or 'live' for this machine");
  parser
      ->add_option("--device", flags->device,
                   "What carries a rank for --hwloc: gpu, package, numa or core")
      ->capture_default_str();
  parser->add_option(
      "--traffic", flags->traffic,
      "Per step: model=all_reduce:512MB,data=reduce_scatter:1GB*2 (twice); or a file "
      "of traced traffic (.json, .yaml), whose mesh it is then");
  parser->add_option("--mapping", flags->mapping,
                     "Your own placement: a rank file of Open MPI, or a host a line");
  parser->add_flag("--keep", flags->keep,
                   "Leave the ranks where the launcher starts them; only count the cost");
  parser->add_option("--json", flags->json, "Write the plan as JSON ('-': to standard output)");
  parser->add_option("--rankfile", flags->rank_file,
                     "Write a rank file for Open MPI (mpirun --rankfile)");
  parser->add_option("--slurm-hostfile", flags->slurm_file,
                     "Write SLURM_HOSTFILE for srun --distribution=arbitrary");
  parser->add_option("--picture", flags->picture,
                     "Write one picture of hosts, devices and groups (.svg, .html)");
  parser->add_option("--data", flags->data,
                     "Plan who reads what instead: the axes that shard the batch, outermost first "
                     "(data,fsdp), or none");
  parser->add_option(
      "--processes", flags->processes,
      "With --data: the process of each device, row-major over the mesh (each its own without it)");
  parser
      ->add_option("--batch", flags->batch,
                   "With --data: samples of a global batch (two a coordinate without it)")
      ->check(CLI::PositiveNumber);
  return {parser, [flags] { return run_plan(*flags); }};
}

}  // namespace tessera::app
