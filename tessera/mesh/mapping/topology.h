#pragma once
// Topology: the machines as plain data: hosts with devices (one rank each), links between devices,
// rails, and switches as a tree.
//
// A slot is a place for one rank. Slots are numbered host by host, device by device: with hosts of
// 3 and 2 devices, slot 3 is device 0 of host 1. The launcher starts rank r on slot r unless a rank
// file says otherwise.

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// The cost of a message over a link: latency + bytes / bandwidth.
struct LinkClass {
  std::string name;
  /// Seconds.
  double latency = 0;
  /// Bytes per second, in one direction.
  double bandwidth = 1;
  /// True: all links of this class inside one host share the bandwidth (a bus); false: each pair
  /// has it to itself (point to point).
  bool shared = false;
  bool operator==(const LinkClass&) const = default;
};

/// A link between two devices of one host that is not of the host's ordinary class.
struct DeviceLink {
  int a = 0, b = 0;
  /// Index into Topology::device_links.
  int link_class = 0;
  bool operator==(const DeviceLink&) const = default;
};

struct Host {
  std::string name;
  /// Number of devices, that is, of ranks that it runs; may differ from host to host.
  int devices = 1;
  /// Link class between two devices unless `links` says otherwise. Index into
  /// Topology::device_links.
  int link_class = 0;
  std::vector<DeviceLink> links = {};
  /// Network adapter of each device; empty: all devices share adapter 0.
  std::vector<int> rail = {};
  /// The switch that it is connected to; -1: the only, unnamed one.
  int network = -1;
  bool operator==(const Host&) const = default;
};

/// A switch (rack, leaf, spine). Traffic between two hosts goes up to the nearest switch above both
/// and uses every uplink on the way.
struct Switch {
  std::string name;
  /// Index of the parent; -1: this is the root. Parents may come before or after their children;
  /// the tree has one root.
  int parent = -1;
  /// Seconds, added for each uplink that a message passes.
  double latency = 0;
  /// Bytes per second of the link to the parent, each way; 0: unlimited.
  double uplink_bandwidth = 0;
  bool operator==(const Switch&) const = default;
};

struct Topology {
  std::vector<Host> hosts;
  std::vector<LinkClass> device_links = {{"host", 1e-6, 50e9, false}};
  /// Bandwidth of one adapter in each direction, shared by everything that leaves through it.
  LinkClass network = {"network", 5e-6, 12.5e9, true};
  /// Added to messages between devices on different rails.
  double cross_rail_latency = 0;
  std::vector<Switch> switches = {};

  /// `hosts` hosts with `devices` devices each, all on one switch.
  static Topology uniform(int hosts, int devices);
  /// One host per number of devices, named host0, host1, ...
  static Topology of_counts(const std::vector<int>& devices);

  int slots() const;
  /// The host of a slot. Throws MappingError if it is out of range.
  int host_of(int slot) const;
  /// The host of every slot.
  std::vector<int> hosts_of_slots() const;
  int first_slot(int host) const;
  int rail_of(int host, int device) const;
  /// Throws MappingError for an inconsistent topology: no hosts, devices below 1, duplicate names,
  /// links or rails out of range, switches that form a cycle or several trees, bandwidths that are
  /// not positive, latencies below 0.
  void check() const;

  bool operator==(const Topology&) const = default;
};

struct RankMapping;

/// The machines of a running job, as its ranks have found them, and where each rank sits:
/// find_topology() of tessera/comm/job/find_topology.h makes one.
struct FoundTopology {
  /// Has a slot for each rank of the job.
  Topology topology;
  /// The slot of each rank. Launchers that deal ranks to hosts in turn leave rank r elsewhere than
  /// on slot r.
  std::vector<int> slot_of;
  /// What could not be found, one sentence each; there the topology has its defaults.
  std::vector<std::string> unknown;

  /// The rank to put at each row-major position of a mesh over the whole job, so that a mapping
  /// holds: Mesh(axes, found.ranks(mapping)). Throws MappingError for another number of positions.
  std::vector<int> ranks(const RankMapping& mapping) const;
};

/// How the ranks of a job look at their machines: machine_look() in tessera/config/topology_file.h
/// has hwloc, Slurm's tables and files of `tessera bench topology`. What a member throws on one
/// rank is thrown on all.
struct MachineLook {
  /// The name of this rank's host; ranks that say the same share it. Empty: the launcher's name of
  /// it or the system's, and two ranks share a host if the kernel says so.
  std::function<std::string()> host = {};
  /// What the first rank of each host says of its inside, for so many ranks.
  std::function<std::string(int ranks)> inside = {};
  /// What rank 0 says of all machines.
  std::function<std::string()> around = {};
  /// Called on every rank with the same values: hosts, ranks and their slots; what was said of the
  /// inside of each host, and of all. Returns the whole.
  std::function<FoundTopology(FoundTopology hosts, const std::vector<std::string>& insides,
                              const std::string& around)>
      join = {};
};

}  // namespace tessera
