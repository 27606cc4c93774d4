#pragma once
// Topologies from JSON or YAML, from Slurm's topology.conf, and from what a launcher reports.
//
//   hosts:                                  # or "16x8": 16 hosts with 8 devices, host0 ... host15;
//     or "4,4,2"
//     - {name: n0, devices: 4, link: nvlink, rails: [0, 0, 1, 1], switch: rack0}
//     - {name: n1, devices: 2, links: [{between: [0, 1], class: nvlink}], switch: rack1}
//   device_links:                           # the first is every host's, unless it names another
//     - {name: pcie, latency: 3us, bandwidth: 25GB/s, shared: true}
//     - {name: nvlink, latency: 1us, bandwidth: 200GB/s}
//   network: {latency: 5us, bandwidth: 12.5GB/s}
//   cross_rail_latency: 2us
//   switches:
//     - {name: spine}
//     - {name: rack0, parent: spine, latency: 1us, uplink_bandwidth: 50GB/s}
//     - {name: rack1, parent: spine, latency: 1us, uplink_bandwidth: 50GB/s}

#include <string>
#include <vector>

#include "tessera/config/errors.h"
#include "tessera/launch/launch.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// Reads a topology; the format follows from the ending .json, .yaml or .yml. Throws
/// ConfigFileError (syntax, fields, unknown names) and MappingError (as Topology::check()).
Topology read_topology(const std::string& path);
Topology parse_topology(const std::string& text, FileFormat format,
                        const std::string& source = "topology");
/// Writes a topology; reading it back gives an equal one. Throws InvalidArgument for a name that
/// the format cannot hold.
std::string format_topology(const Topology& topology, FileFormat format);
void write_topology(const Topology& topology, const std::string& path);

/// Reads device counts: "16x8" (16 hosts of 8) or "8,8,4". Throws ConfigFileError.
Topology parse_hosts(const std::string& text);

/// Adds to `topology` the switches of a Slurm topology.conf (tree plugin: SwitchName, Switches,
/// Nodes; Slurm calls the units of LinkSpeed arbitrary, so they say nothing about bandwidth here).
/// Switches that lead to none of the hosts are left out. Each uplink gets `latency` and
/// `uplink_bandwidth`. Throws ConfigFileError for a line that cannot be read, a host that is below
/// no switch or below two, a switch with two parents, and hosts in unconnected trees.
Topology with_slurm_switches(Topology topology, const std::string& conf, double latency = 1e-6,
                             double uplink_bandwidth = 0,
                             const std::string& source = "topology.conf");
Topology read_slurm_topology(const std::string& path, Topology hosts);

/// The job's hosts and ranks per host: those of detect_launch(), or in a batch script of Slurm,
/// which is no step itself, those of its allocation (SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE).
/// Throws ConfigurationError as the function below does.
Topology topology_of(const Environment& environment);
/// The hosts and the number of ranks on each, as the launcher reports them. Throws
/// ConfigurationError if it does not say how many ranks each host has.
Topology topology_of(const Launch& launch);

// How the ranks of a job look at their machines, for find_topology() (tessera/comm/job):
//
//   const FoundTopology found = find_topology(manager, machine_look());

/// Where ranks look. Rank 0's count.
struct MachineSources {
  /// A topology in a file, as `tessera bench topology` measures it, which rank 0 reads; empty:
  /// found as below.
  std::string file = {};
  /// Slurm's tree of switches (tree plugin), which rank 0 reads; where there is no such file, none
  /// is known.
  std::string slurm = "/etc/slurm/topology.conf";
};

/// A look at the inside of each host with hwloc (of its GPUs, packages and NUMA nodes the first
/// kind of which there are as many as ranks, else equal shares of its cores: which are near each
/// other, and the adapter next to each) and at Slurm's switches above the hosts; or a file in place
/// of both. The hosts of a file are found by their names; where those are none of the job's, rank r
/// is taken to run on slot r, which `unknown` says. What cannot be read of a host or of Slurm is
/// unknown too. find_topology() throws ConfigurationError for a file that cannot be read, and
/// MappingError for one that has another number of slots than the job has ranks.
MachineLook machine_look(const MachineSources& sources = {});

}  // namespace tessera
