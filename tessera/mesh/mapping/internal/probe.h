#pragma once
// From measured links to a topology: what `tessera bench topology` measured between ranks becomes
// hosts, link classes and switches.

#include <string>
#include <vector>

#include "tessera/mesh/mapping/topology.h"

namespace tessera {

/// A link between two slots, measured while nothing else used it.
struct LinkSample {
  int a = 0, b = 0;
  /// Seconds of an empty message, one way.
  double latency = 0;
  /// Bytes per second, one way.
  double bandwidth = 0;
};

/// What was measured on hosts of known sizes. Slots count host by host, device by device.
struct Probe {
  /// Names of the hosts.
  std::vector<std::string> hosts;
  /// Number of ranks on each host.
  std::vector<int> devices;
  /// Samples of any pairs of slots, inside hosts and between them; not all pairs are needed.
  std::vector<LinkSample> samples;
  /// The fraction of its own bandwidth that a pair of a host keeps while other pairs of the host
  /// send as well, one number per host. Empty, or 1: all of it.
  std::vector<double> kept = {};
  /// Bytes per second that leave a host while all of its devices send to another host. 0: not
  /// measured.
  double adapter = 0;
};

struct ProbedTopology {
  Topology topology;
  /// What could not be determined from the measurements, one sentence each.
  std::vector<std::string> notes;
};

/// Derives a topology from measurements. Inside hosts: samples whose bandwidths and latencies are
/// close (gaps below 1.6x and 2x) form a class, whose numbers are medians; a host's ordinary class
/// is its most frequent one, other pairs become links of their own. A class is a shared bus if
/// pairs keep less than 0.6 of their bandwidth.
///
/// Between hosts: one class is one network. If the nearest class divides the hosts into sets, with
/// every pair inside a set near and every pair across far, each set becomes a switch below a common
/// root: half the difference in latency is each uplink's, and the far bandwidth its bandwidth if
/// that is the smaller one. Hosts that are not divided further stay one network of medians, and a
/// note says so.
///
/// Rails and deeper trees cannot be determined in this way. Throws MappingError: no hosts, slots
/// out of range, numbers that are not positive.
ProbedTopology topology_of_probe(const Probe& probe);

}  // namespace tessera
